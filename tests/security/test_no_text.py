"""Heads, forms and ids with bytes that are not UTF-8. HTTP allows them; JSON, databases and gRPC messages do not."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings
from kvmesh.telemetry import MetricsServer
from services.frontend.models import ServedModel
from tests.frontend_apps import RunningApps, running_apps
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import BODY, CHAT, Connection, frontend

BAD = "X\udcffX"
"""The byte 0xFF between two letters, as sent with `surrogateescape`."""
GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def status_of(port: int, path: str, data: bytes = b"", *, method: str = "GET", **headers: str) -> int:
    connection = await Connection.open(port)
    head = "\r\n".join(
        [
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Content-Length: {len(data)}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
            "\r\n",
        ]
    )
    connection.writer.write(head.encode("utf-8", "surrogateescape") + data)
    answer = await asyncio.wait_for(connection.head(), PATIENCE_S)
    connection.writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize("trace", [BAD, f"01{GOOD[2:]}-{BAD}", f"01{GOOD[2:]}-{'x' * 300}", "00-1-2-3", GOOD])
async def test_a_malformed_traceparent_is_dropped(model: ServedModel, trace: str) -> None:
    """A malformed `traceparent` is dropped. A value that is not UTF-8 used to break the worker's stream, with all requests of all tenants on
    it."""
    async with frontend(model) as rig:
        head = {"Content_Type": "application/json", "traceparent": trace}
        assert await status_of(rig.http_port, CHAT, json.dumps(BODY).encode(), method="POST", **head) == 200
        passed = {*(leg.generation.traceparent for leg in rig.mesh.legs), *(ask.traceparent for ask in rig.mesh.asks)}
        assert passed == {trace if trace == GOOD else ""}


async def test_a_key_with_invalid_utf8_is_unknown(
    model: ServedModel, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that is not UTF-8 gets 401 without a traceback in the log, because any client can send one."""
    async with frontend(model, keys=keys) as rig:
        for path, method in (("/v1/models", "GET"), ("/v1/models/tiny", "GET"), (CHAT, "POST")):
            for head in ({"Authorization": f"Bearer {BAD}"}, {"x_api_key": BAD}):
                assert await status_of(rig.http_port, path, method=method, **head) == 401
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_registry_token_with_invalid_utf8_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    agent = EmbeddedAgent(AgentSettings(port=0, token="secret"))
    await agent.start()
    try:
        for head in ({"X_Consul_Token": BAD}, {"Authorization": f"Bearer {BAD}"}):
            assert await status_of(agent.port, "/v1/agent/services", **head) == 403
    finally:
        await agent.aclose()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", [f"/{BAD}", f"/v1/models/{BAD}", f"/v1/messages/{BAD}", f"/v1/{BAD}/%00"])
async def test_paths_with_invalid_utf8_do_not_exist(
    model: ServedModel, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with frontend(model) as rig:
        assert await status_of(rig.http_port, path) in (400, 404)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.fixture
async def apps(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    async with running_apps([model], FakeMesh(answer=lambda _: [3, 2]), tmp_path / "data") as running:
        yield running


def port_of(apps: RunningApps) -> int:
    return int(apps.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "path",
    [
        *(f"/v1/{kind}/{BAD}" for kind in ("files", "batches", "messages/batches", "responses")),
        *(f"/v1/{kind}?{query}={BAD}" for kind in ("files", "batches") for query in ("after", BAD)),
    ],
)
async def test_ids_with_invalid_utf8_are_a_client_error(
    apps: RunningApps, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await status_of(port_of(apps), path) in (400, 404)
    assert not [record for record in caplog.records if record.exc_info]


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "sqlite" not in path.name}


@pytest.mark.parametrize("names", [('name="file"; filename="' + BAD + '"'), (f'name="{BAD}"'), (f'name="file{BAD}"')])
async def test_an_upload_whose_name_cannot_be_stored_leaves_no_file(
    apps: RunningApps, tmp_path: Path, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused upload leaves no file. Its bytes used to stay for a day and counted against no limit."""
    before = files_in(tmp_path)
    parts = ("name=purpose", "batch"), (names, "x" * 100_000)
    form = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{data}\r\n" for head, data in parts)
    body, kind = f"{form}--b--\r\n".encode("utf-8", "surrogateescape"), "multipart/form-data; boundary=b"
    assert await status_of(port_of(apps), "/v1/files", body, method="POST", Content_Type=kind) == 400
    assert files_in(tmp_path) == before
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "data", [b"x\r\n\r\n", b"GET /live HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\nA b\r\n\r\n"]
)
async def test_requests_that_are_not_http_are_not_logged(
    model: ServedModel, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Invalid HTTP gets 400 and is not logged, on the ports of the frontend, the registry and metrics. Any client could fill the disk with
    tracebacks."""
    agent, metrics = EmbeddedAgent(AgentSettings(port=0, token="secret")), MetricsServer(CollectorRegistry(), "", 0)
    await agent.start()
    await metrics.start()
    try:
        async with frontend(model) as rig:
            for port in (rig.http_port, agent.port, metrics.port):
                for _ in range(2):
                    connection = await Connection.open(port)
                    connection.writer.write(data)
                    assert b" 400 " in await asyncio.wait_for(connection.head(), PATIENCE_S)
    finally:
        await agent.aclose()
        await metrics.aclose()
    assert not caplog.records
