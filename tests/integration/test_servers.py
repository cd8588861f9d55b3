import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Server


def put(url: str, body: Any) -> None:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), method="PUT")
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def test_the_shared_consul_takes_registrations(consul: Server) -> None:
    """A service registered with the session's agent is in the catalog, which requires that the agent has a leader."""
    put(f"{consul.url}/v1/agent/service/register", {"Name": "servers-test", "Port": 1})
    try:
        [entry] = get(f"{consul.url}/v1/health/service/servers-test")
        assert entry["Service"]["Port"] == 1
    finally:
        put(f"{consul.url}/v1/agent/service/deregister/servers-test", None)


def test_a_separate_consul_has_its_own_configuration(start_consul: Callable[..., Server]) -> None:
    """With the default policy deny, only requests with a token can read keys."""
    acl = {"enabled": True, "default_policy": "deny", "tokens": {"master": "root-token"}}
    server = start_consul({"acl": acl, "primary_datacenter": "dc1"})
    request = urllib.request.Request(f"{server.url}/v1/kv/some-key?keys", headers={"X-Consul-Token": "root-token"})
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=30)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.url}/v1/kv/some-key", timeout=30)


def test_prometheus_answers_queries(start_prometheus: Callable[[Path], Server], tmp_path: Path) -> None:
    """The real server runs with a test's own configuration."""
    config = tmp_path / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1s}\n")
    assert get(f"{start_prometheus(config).url}/api/v1/query?query=1%2B1")["data"]["result"][1] == "2"
