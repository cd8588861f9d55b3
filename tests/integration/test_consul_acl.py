"""A mesh with a real Consul that denies by default, and a token with the policy compose/consul/services.hcl."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.discovery.base import SERVICES, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import PermissionDeniedError
from tests.integration.mesh import ROOT, argv_simulated, running_mesh, wait_until
from tests.patience import PATIENCE_S
from tests.servers import Server, consul_server

OPERATOR = "11111111-2222-3333-4444-555555555555"
ACL = {"acl": {"enabled": True, "default_policy": "deny", "tokens": {"master": OPERATOR, "agent": OPERATOR}}}
POLICY = ROOT / "compose" / "consul" / "services.hcl"


@pytest.fixture
def consul(tmp_path: Path) -> Iterator[Server]:
    with consul_server(tmp_path, ACL) as server:
        yield server


@pytest.fixture
def token(consul: Server) -> str:
    """A token created as the page on several machines describes."""
    policy = put(consul, "/v1/acl/policy", {"Name": "kvmesh-services", "Rules": POLICY.read_text()})
    secret: str = put(consul, "/v1/acl/token", {"Policies": [{"ID": policy["ID"]}]})["SecretID"]
    return secret


def put(consul: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        consul.url + path, data=json.dumps(body).encode(), headers={"X-Consul-Token": OPERATOR}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def keys_under(consul: Server, prefix: str) -> Any:
    request = urllib.request.Request(f"{consul.url}/v1/kv/{prefix}?recurse", headers={"X-Consul-Token": OPERATOR})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


async def test_a_mesh_runs_with_the_policy(consul: Server, token: str, tmp_path: Path) -> None:
    """All services register, answer a request, and deregister."""
    flags = argv_simulated("--consul", consul.address)
    registry = ConsulRegistry(DiscoverySettings(address=consul.address, token=token))
    try:
        async with running_mesh(tmp_path, *flags, token=token) as mesh:
            for service in SERVICES:

                async def takes_requests(service: str = service) -> bool:
                    return [each.takes_requests for each in (await registry.instances(service)).instances] == [True]

                await wait_until(takes_requests, PATIENCE_S, mesh.logs)
            body = {"model": "demo", "prompt": " ".join(["word"] * 200), "max_tokens": 4}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{mesh.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
        for service in SERVICES:
            assert not (await registry.instances(service)).instances
        with pytest.raises(urllib.error.HTTPError, match="404"):
            keys_under(consul, "kvmesh/workers/")
    finally:
        await registry.aclose()


async def test_the_policy_allows_nothing_else(consul: Server, token: str) -> None:
    """The token cannot register other services or write other keys."""
    registry = ConsulRegistry(DiscoverySettings(address=consul.address, token=token))
    try:
        with pytest.raises(PermissionDeniedError):
            await registry.register(Registration(service="web", instance_id="web-1", host="127.0.0.1", port=1))
        with pytest.raises(PermissionDeniedError):
            await registry.put("other/key", b"")
    finally:
        await registry.aclose()
