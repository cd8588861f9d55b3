"""Attacks on the registry: writes without the token, registrations without the mesh's seal."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kvmesh.discovery.base import DECODE, Health, Instance
from tests.integration.mesh import (
    ROOT,
    RunningMesh,
    argv_simulated,
    chat,
    metrics_text,
    running_mesh,
    wait_until,
    worker_metric,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv_simulated("--decode", "2")) as running:
        yield running


CALLS: Sequence[tuple[str, str, object]] = (
    ("PUT", "/v1/agent/service/register", {"ID": "rogue", "Name": DECODE, "Address": "127.0.0.1", "Port": 1}),
    # The agent would probe any address that it is given.
    (
        "PUT",
        "/v1/agent/service/register",
        {"ID": "probe", "Name": "x", "Check": {"GRPC": "127.0.0.1:1", "Interval": "1s"}},
    ),
    ("PUT", "/v1/agent/service/deregister/{id}", None),
    ("PUT", "/v1/agent/service/maintenance/{id}?enable=true", None),
    ("PUT", "/v1/agent/check/update/{id}:ttl", {"Status": "critical", "Output": "rogue"}),
    ("PUT", "/v1/kv/kvmesh/keys", {"keys": []}),
    ("GET", "/v1/kv/kvmesh?recurse", None),
    ("DELETE", "/v1/kv/kvmesh/keys", None),
    ("PUT", "/v1/session/create", {}),
    ("GET", "/v1/health/service/kvmesh-decode", None),
    ("GET", "/v1/agent/services", None),
    ("GET", "/v1/catalog/services", None),
)


@pytest.mark.parametrize("token", ["", "guess"])
async def test_the_registry_refuses_calls_without_its_token(mesh: RunningMesh, token: str) -> None:
    """Every call without the token or with a wrong one is refused, as from another user of the machine."""
    registry = mesh.target.registry()
    before = await registry.instances(DECODE)
    headers = {"X-Consul-Token": token} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for method, path, body in CALLS:
            url = mesh.registry + path.format(id=before.instances[0].instance_id)
            async with session.request(method, url, json=body) as response:
                assert response.status == 403, (method, path, await response.text())
    after = await registry.instances(DECODE)
    assert [lasting(each) for each in after.instances] == [lasting(each) for each in before.instances]
    assert not any(each.notes == "rogue" for each in after.instances)
    await registry.aclose()


def lasting(instance: Instance) -> Instance:
    """Returns the instance without its health, because a heartbeat may be late."""
    return replace(instance, health=Health.PASSING, notes="")


async def test_only_the_user_of_the_mesh_can_read_its_secrets(mesh: RunningMesh) -> None:
    """No secret is on a command line or in the environment of a service, and no other user can read a file with a secret."""
    await asyncio.to_thread(check_secrets, mesh)


def check_secrets(mesh: RunningMesh) -> None:
    credentials = mesh.target.credentials
    assert credentials is not None
    secrets = [Path(name).read_bytes() for name in (credentials.token_file, credentials.secret_file)]
    for pid in (*mesh.pids("gateway"), *mesh.pids("decode"), *mesh.pids("prefill"), mesh.process.pid):
        for part in ("cmdline", "environ"):
            told = Path(f"/proc/{pid}/{part}").read_bytes()
            assert not any(secret in told for secret in secrets)
    files = [path for path in credentials.folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert credentials.folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in mesh.directory.glob("*.log"))


async def test_a_rogue_worker_gets_no_prompt(mesh: RunningMesh) -> None:
    """A worker that can write to the registry (a Consul without ACLs), but has neither the secret nor a certificate, gets no requests."""
    rogue = await start_rogue(mesh)
    plain = replace(mesh.target, credentials=None, token=token_of(mesh)).registry()
    believing = mesh.target.registry()
    try:

        async def is_listed() -> bool:
            return any(each.instance_id == "rogue" for each in (await plain.instances(DECODE)).instances)

        await wait_until(is_listed, PATIENCE_S, "the rogue worker is registered")
        for number in range(12):
            await chat(mesh.url, f"secret {number}", max_tokens=3)
        (port,) = [
            int(each.meta["metrics_port"])
            for each in (await plain.instances(DECODE)).instances
            if each.instance_id == "rogue"
        ]
        assert await tokens(port) == 0
        members = (await believing.instances(DECODE)).instances
        assert "rogue" not in {each.instance_id for each in members}
        assert sum([await tokens(int(each.meta["metrics_port"])) for each in members]) >= 36
    finally:
        rogue.terminate()
        await rogue.wait()
        await plain.aclose()
        await believing.aclose()


async def tokens(metrics_port: int) -> float:
    """Returns the number of output tokens that a worker has generated."""
    return worker_metric(await metrics_text("127.0.0.1", metrics_port), "kvmesh_worker_output_tokens_total")


def token_of(mesh: RunningMesh) -> str:
    assert mesh.target.credentials is not None
    return Path(mesh.target.credentials.token_file).read_text()


async def start_rogue(mesh: RunningMesh) -> asyncio.subprocess.Process:
    """Starts a decode worker with the same model that has only the registry's token."""
    argv = ("--engine", "simulated", "--model", str(ROOT / "models" / "demo"), "--worker-id", "rogue")
    quiet = ("--simulated-kv-transport", "none", "--no-worker-warm-up")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.decode", *argv, *quiet, "--discovery-address", mesh.registry),
        cwd=ROOT,
        env={**os.environ, "KVMESH_DISCOVERY_TOKEN": token_of(mesh)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
