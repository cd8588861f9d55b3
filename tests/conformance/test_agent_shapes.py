"""Compares the embedded agent's JSON with real Consul's: a client that reads Consul's responses can read the agent's."""

from typing import Any

import aiohttp
import pytest

from kvmesh.discovery.embedded import EmbeddedAgent
from tests.conformance.conftest import Agent

BODY = {
    "ID": "shape-1",
    "Name": "shape",
    "Address": "127.0.0.1",
    "Port": 1,
    "Tags": ["a"],
    "Meta": {"role": "decode"},
    "Checks": [
        {"CheckID": "shape-1:ttl", "Name": "heartbeat", "TTL": "60s"},
        {"CheckID": "shape-1:grpc", "Name": "grpc", "GRPC": "127.0.0.1:1", "Interval": "60s", "Timeout": "1s"},
    ],
}
PATHS = [
    "/v1/health/service/shape",
    "/v1/health/service/nobody",
    "/v1/catalog/services",
    "/v1/agent/services",
    "/v1/status/leader",
    "/v1/kv/shape/key",
    "/v1/kv/shape/?recurse",
    "/v1/kv/shape/empty",
]


async def _read(port: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as web:

        async def put(path: str, **body: Any) -> Any:
            async with web.put(path, **body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json(content_type=None)

        await put("/v1/agent/service/register", json=BODY)
        await put("/v1/agent/service/maintenance/shape-1?enable=true&reason=r")
        session = await put("/v1/session/create", json={"Name": "n", "TTL": "10s", "LockDelay": "0s"})
        await put(f"/v1/kv/shape/key?acquire={session['ID']}", data=b"v")
        await put("/v1/kv/shape/empty")
        for path in PATHS:
            async with web.get(path) as answer:
                assert answer.status == 200, path
                answers[path] = await answer.json()
                answers[f"{path} has an index"] = "X-Consul-Index" in answer.headers
        answers["renewed session"] = await put(f"/v1/session/renew/{session['ID']}")
        await put(f"/v1/session/destroy/{session['ID']}")
        await put("/v1/agent/service/deregister/shape-1")
    return answers


def missing(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Returns where Consul's response has something that ours lacks or has with another type."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = [f"{where}.{key}" for key in theirs.keys() - ours.keys()]
        return found + [
            line for key in theirs.keys() & ours.keys() for line in missing(theirs[key], ours[key], f"{where}.{key}")
        ]
    if isinstance(theirs, list) and isinstance(ours, list):
        return [line for one, other in zip(theirs, ours, strict=False) for line in missing(one, other, f"{where}[]")]
    return [] if type(theirs) is type(ours) else [f"{where}: {theirs!r} is not {ours!r}"]


def own_entries(answers: dict[str, Any]) -> dict[str, Any]:
    """Removes what other tests left in a shared Consul, and Consul's own service."""
    kept = dict(answers)
    kept["/v1/agent/services"] = {key: value for key, value in kept["/v1/agent/services"].items() if "shape" in key}
    kept["/v1/catalog/services"] = {key: v for key, v in kept["/v1/catalog/services"].items() if key == "shape"}
    return kept


@pytest.mark.parametrize("agent", ["consul"], indirect=True)
async def test_shapes_are_consuls(agent: Agent) -> None:
    """The embedded agent's responses on services, checks, keys and sessions have all of Consul's fields, with the same types."""
    theirs = own_entries(await _read(agent.port))
    embedded = EmbeddedAgent()
    await embedded.start()
    try:
        ours = own_entries(await _read(embedded.port))
    finally:
        await embedded.aclose()
    # Consul adds version-specific variants of its node's address.
    lacking = [line for line in missing(theirs, ours) if "TaggedAddresses.wan_ipv4" not in line]
    assert lacking == []
    for path in ("/v1/health/service/shape", "/v1/kv/shape/?recurse"):
        assert len(ours[path]) == len(theirs[path])
    assert ours["/v1/kv/shape/key"][0]["Value"] == theirs["/v1/kv/shape/key"][0]["Value"]
