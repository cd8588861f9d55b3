"""What every connector guarantees: idempotent calls, bounded times, failures as MeshError, fencing of old leaders, and the real state of its
pools."""

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvmesh.core import Role
from kvmesh.core.planning import PoolState, PoolTarget
from kvmesh.errors import (
    DeadlineError,
    InvalidRequestError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.registry import MemoryAgent
from services.planner.connectors import compose as compose_module
from services.planner.connectors.base import Connector
from services.planner.connectors.compose import ComposeOrchestrator, ComposeSettings
from services.planner.connectors.kubernetes import KubernetesOrchestrator, KubernetesSettings, kind_and_name
from services.planner.connectors.pools import read_pools
from services.planner.connectors.sized import Orchestrator, SizedConnector
from tests.patience import PATIENCE_S

POOLS = ("m/prefill=prefill:4", "m/decode=decode")


@dataclass(kw_only=True)
class ConnectorSetup:
    """A connector and control over the orchestrator behind it. `hang` and `fail` change how the orchestrator responds from then on."""

    connector: Connector
    calls: Callable[[], int]
    """The number of changes made so far."""
    hang: Callable[[], None]
    fail: Callable[[], None]
    start_workers: Callable[[], None]
    """Makes all wanted workers run."""


def sized(orchestrator: Orchestrator) -> SizedConnector:
    registry, channels = MemoryAgent().registry(), ChannelPool(settings=RpcSettings())
    return SizedConnector(orchestrator, read_pools(POOLS, field="pools"), registry=registry, channels=channels)


# --- Docker Compose: a program that replaces docker and keeps containers in a file.

DOCKER = """#!{python}
import json, pathlib, sys, time
state = pathlib.Path(__file__).with_name("state.json")
known = json.loads(state.read_text())
words = sys.argv[1:]
if known["mode"] == "hang":
    time.sleep(600)
if known["mode"] == "fail":
    sys.exit("no configuration file provided: not found")
assert words[:5] == ["compose", "--project-name", "p", "--file", "mesh.yml"], words
verb = words[5]
if verb == "ps":
    name = words[-1]
    for number in range(known["sizes"].get(name, 0)):
        its = "running" if number < known["running"].get(name, 0) else "created"
        print(json.dumps({{"Name": f"p-{{name}}-{{number}}", "Service": name, "State": its, "Health": ""}}))
else:
    assert verb == "up" and "--no-recreate" in words and "--no-deps" in words and "--detach" in words, words
    for at, word in enumerate(words):
        if word == "--scale":
            name, size = words[at + 1].split("=")
            assert name in words[at + 2:], words
            known["sizes"][name] = int(size)
    known["ups"] += 1
    state.write_text(json.dumps(known))
"""


@asynccontextmanager
async def compose(folder: Path) -> AsyncIterator[ConnectorSetup]:
    program, state = folder / "docker", folder / "state.json"
    program.write_text(DOCKER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    state.write_text(json.dumps({"mode": "", "ups": 0, "sizes": {"prefill": 1, "decode": 1}, "running": {}}))

    def change(**values: object) -> None:
        state.write_text(json.dumps({**json.loads(state.read_text()), **values}))

    settings = ComposeSettings(command=(str(program), "compose"), project="p", files=("mesh.yml",))
    connector = sized(ComposeOrchestrator(settings))
    with pytest.MonkeyPatch.context() as patch:
        # A busy machine takes longer to report a failure.
        patch.setattr(compose_module, "ACCEPTED_S", PATIENCE_S)
        try:
            yield ConnectorSetup(
                connector=connector,
                calls=lambda: int(json.loads(state.read_text())["ups"]),
                hang=lambda: change(mode="hang"),
                fail=lambda: change(mode="fail"),
                start_workers=lambda: change(running=json.loads(state.read_text())["sizes"]),
            )
        finally:
            await connector.aclose()


# --- Kubernetes: a server with the scale subresource (autoscaling/v1 Scale).


@dataclass
class ApiServer:
    """Serves the Deployments `prefill` and `decode` in the namespace `inference`."""

    wanted: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    running: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    changes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def routes(self) -> web.Application:
        app = web.Application()
        path = "/apis/apps/v1/namespaces/inference/deployments/{name}/scale"
        app.router.add_get(path, self.read)
        app.router.add_patch(path, self.patch)
        return app

    async def read(self, request: web.Request) -> web.Response:
        return await self.answer(request.match_info["name"])

    async def patch(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], json.loads(await request.text())
        kinds = (
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
        )
        assert request.content_type in kinds
        assert request.headers["Authorization"] == "Bearer secret"
        if not self.mode and name in self.wanted and self.wanted[name] != body["spec"]["replicas"]:
            self.changes += 1
            self.wanted[name] = body["spec"]["replicas"]
        return await self.answer(name)

    async def answer(self, name: str) -> web.Response:
        if self.mode == "hang":
            await self.ended.wait()
        if self.mode == "fail":
            return web.json_response({"kind": "Status", "code": 500, "reason": "InternalError"}, status=500)
        if name not in self.wanted:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": name, "namespace": "inference", "resourceVersion": str(self.changes)},
                "spec": {"replicas": self.wanted[name]},
                "status": {"replicas": self.running.get(name, 0), "selector": f"app={name}"},
            }
        )


@asynccontextmanager
async def kubernetes(folder: Path) -> AsyncIterator[ConnectorSetup]:
    pytest.importorskip(
        "kubernetes", reason="the package kubernetes is not installed (pip install 'kvmesh[kubernetes]')"
    )
    server = ApiServer()
    runner = web.AppRunner(server.routes())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = folder / "config"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    user = {"name": "u", "user": {"token": "secret"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    config.write_text(
        json.dumps(
            {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x", "kind": "Config"}
        )
    )
    settings = KubernetesSettings(namespace="inference", config_file=str(config))
    connector = sized(KubernetesOrchestrator(settings))
    try:
        yield ConnectorSetup(
            connector=connector,
            calls=lambda: server.changes,
            hang=lambda: setattr(server, "mode", "hang"),
            fail=lambda: setattr(server, "mode", "fail"),
            start_workers=lambda: server.running.update(server.wanted),
        )
    finally:
        server.ended.set()
        await connector.aclose()
        await runner.cleanup()


SETUPS: dict[str, Any] = {"compose": compose, "kubernetes": kubernetes}


@pytest.fixture(params=sorted(SETUPS))
async def setup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConnectorSetup]:
    async with SETUPS[request.param](tmp_path) as found:
        yield found


def target(workers: int, role: Role = Role.DECODE, model: str = "m") -> PoolTarget:
    return PoolTarget(model=model, role=role, workers=workers)


async def scale(setup: ConnectorSetup, workers: int, *, role: Role = Role.DECODE, token: int = 1) -> PoolState:
    return await setup.connector.scale(target(workers, role), fencing_token=token, timeout_s=PATIENCE_S)


async def decode_pool(setup: ConnectorSetup) -> PoolState:
    pools = await setup.connector.pools(timeout_s=PATIENCE_S)
    assert {(pool.model, pool.role) for pool in pools} == {("m", Role.PREFILL), ("m", Role.DECODE)}
    return next(pool for pool in pools if pool.role is Role.DECODE)


async def test_the_same_size_twice_is_one_change(setup: ConnectorSetup) -> None:
    """`scale` is idempotent, because the planner repeats a call whose result it does not know."""
    assert (await scale(setup, 3)).workers_wanted == 3
    assert (await scale(setup, 3)).workers_wanted == 3
    assert setup.calls() == 1
    await scale(setup, 1)
    assert (setup.calls(), (await decode_pool(setup)).workers_wanted) == (2, 1)


async def test_running_workers_are_reported(setup: ConnectorSetup) -> None:
    """`scale` returns when the size is accepted. `pools` counts workers once they run."""
    state = await scale(setup, 3)
    assert state.workers_running < 3
    setup.start_workers()
    pool = await decode_pool(setup)
    assert (pool.workers_wanted, pool.workers_running) == (3, 3)


async def test_a_pool_has_at_most_its_limit(setup: ConnectorSetup) -> None:
    """`scale` returns the size that the limit allows, and starts no more workers."""
    assert (await scale(setup, 9, role=Role.PREFILL)).workers_wanted == 4
    pools = await setup.connector.pools(timeout_s=PATIENCE_S)
    assert [(pool.workers_wanted, pool.workers_max) for pool in pools if pool.role is Role.PREFILL] == [(4, 4)]


async def test_an_old_leader_changes_nothing(setup: ConnectorSetup) -> None:
    """A fencing token older than the newest one is refused."""
    await scale(setup, 2, token=7)
    with pytest.raises(UnsupportedError, match="fencing"):
        await scale(setup, 5, token=6)
    assert (await decode_pool(setup)).workers_wanted == 2


async def test_a_pool_that_is_not_managed_is_named(setup: ConnectorSetup) -> None:
    """Scaling an unknown model is an error and creates no pool. The connector does not support `flip`."""
    with pytest.raises(NotFoundError, match="other"):
        await setup.connector.scale(target(2, model="other"), fencing_token=1, timeout_s=PATIENCE_S)
    with pytest.raises(UnsupportedError):
        await setup.connector.flip("w", Role.PREFILL, fencing_token=1, timeout_s=PATIENCE_S)
    assert setup.calls() == 0


async def test_calls_to_a_hanging_orchestrator_time_out(setup: ConnectorSetup) -> None:
    """Calls raise DeadlineError at their timeout, and change nothing."""
    setup.hang()
    calls: list[Awaitable[object]] = [
        setup.connector.pools(timeout_s=0.3),
        setup.connector.scale(target(3), fencing_token=1, timeout_s=0.3),
    ]
    for call in calls:
        with pytest.raises(DeadlineError):
            await call
    assert setup.calls() == 0


async def test_a_failing_orchestrator_is_a_mesh_error(setup: ConnectorSetup) -> None:
    """The error contains the reason, and nothing was changed."""
    setup.fail()
    for call in (setup.connector.pools(timeout_s=PATIENCE_S), scale(setup, 3)):
        with pytest.raises(UnavailableError) as caught:
            await call
        assert "not found" in caught.value.message or "500" in caught.value.message
    assert setup.calls() == 0


@pytest.mark.parametrize(
    "entries",
    [
        (),
        ("m/prefill",),
        ("m/router=x",),
        ("m/decode=a:b",),
        ("m/decode=a:²",),
        ("m/decode=-a",),
        ("m/decode=a", "m/decode=b"),
    ],
)
def test_malformed_pools_are_refused(entries: tuple[str, ...]) -> None:
    """The error names the setting. A unit cannot be mistaken for a flag of the command."""
    with pytest.raises(InvalidRequestError) as caught:
        read_pools(entries, field="pools")
    assert caught.value.field == "pools"


def test_workloads_of_kubernetes() -> None:
    """A name without a kind is a Deployment. Kinds without a scale subresource are refused."""
    assert kind_and_name("a") == ("deployment", "a")
    assert kind_and_name("StatefulSet/a") == ("statefulset", "a")
    for unit in ("pod/a", "deployment/"):
        with pytest.raises(MeshError):
            kind_and_name(unit)


async def test_compose_without_the_docker_command(tmp_path: Path) -> None:
    """If docker is not installed, the error says that the command cannot be started."""
    orchestrator = ComposeOrchestrator(ComposeSettings(command=(str(tmp_path / "none"), "compose")))
    with pytest.raises(UnavailableError, match="cannot be started"):
        await orchestrator.sizes("decode")
    assert os.listdir(tmp_path) == []
