"""Runs a frontend with /ui and a real router that lists many workers, in a separate process: `python -m tests.ui.fleet DIRECTORY`.

The workers are values in the router and entries in the registry. A fake mesh answers chats. The first line of the output is the address of the
HTTP API. Lines on standard input change the fleet, and the process answers each with a line: `leave ID`, `drain ID`, `hold` (each answer stops
after its next step), `release`.
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvmesh.clock import SystemClock
from kvmesh.core import LoadRecord, Report, ReportKind, Role
from kvmesh.core.planning import (
    Alternative,
    Decision,
    DecisionAction,
    DecisionInputs,
    LatencyReport,
    Load,
    ObservationState,
    PlanReport,
    PoolReport,
    Shape,
    Targets,
)
from kvmesh.discovery.base import DECODE, PLANNER, PREFILL, ROUTER, Registration, Registry
from kvmesh.errors import LostError, MeshError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.mesh.view import MeshReader
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.telemetry import Telemetry
from services.frontend.access import access as access_control
from services.frontend.access.access import Access
from services.frontend.access.settings import AccessSettings
from services.frontend.ui import observer
from services.planner.planner import Planner
from services.planner.servicer import SERVICE_NAME as PLANNER_NAME
from services.planner.servicer import PlannerServicer
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.servicer import SERVICE_NAME, RouterServicer
from tests.frontend_apps import running_part
from tests.patience import PATIENCE_S
from tests.ui.rig import running_page
from tests.unit.router_fleets import ask, core, join, store_blocks

HOSTILE = "<img src=x onerror=\"document.title='broken'\">"
"""A worker's id with markup."""
TENANT = "<script>document.title='broken'</script>"
PREFILLS, DECODES = 16, 48
STARTED_S = 1_700_000_000.0


@dataclass(slots=True)
class Fleet:
    """The fleet, which the lines on standard input change."""

    router: RouterCore
    registry: Registry
    rest_may_follow: asyncio.Event
    steps: int = 0

    async def register(self, worker_id: str, role: Role, port: int) -> None:
        service = PREFILL if role is Role.PREFILL else DECODE
        meta = {"model": "demo", "engine": "simulated", "kvmesh_version": "1"}
        # A registration's id must not have special characters, so the hostile worker is only in the router's list.
        await self.registry.register(
            Registration(
                service=service,
                instance_id=worker_id,
                host="127.0.0.1",
                port=port,
                meta=meta,
                is_checked=False,
                ttl_s=3600,
            )
        )
        await self.registry.heartbeat(worker_id)

    async def change(self, line: str) -> None:
        verb, _, name = line.strip().partition(" ")
        if verb == "leave":
            await self.registry.deregister(name)
            self.router.fleet.unregister(name)
        elif verb == "drain":
            await self.registry.set_draining(name, True, reason="a test")
        elif verb == "hold":
            self.rest_may_follow.clear()
        elif verb == "release":
            self.rest_may_follow.set()

    def step(self) -> None:
        """Advances the load of every worker."""
        self.steps += 1
        for i, (name, worker) in enumerate(sorted(self.router.fleet.workers.items())):
            if worker.role is Role.PREFILL:
                record = _load(name, self.steps, running=i % 3, kv=100 + 10 * i, prompt=4_000 + 100 * i, output=0)
            else:
                record = _load(name, self.steps, running=4 + i % 9, kv=50 + 14 * i, prompt=0, output=200 + 11 * i)
            self.router.fleet.on_load_record(worker, record, now=0.0)


def _load(name: str, step: int, *, running: int, kv: int, prompt: int, output: int) -> LoadRecord:
    return LoadRecord(
        worker_id=name,
        epoch=1,
        sequence=step,
        taken_at_s=STARTED_S + step,
        running_requests=running,
        waiting_requests=running // 8,
        running_requests_max=64,
        kv_blocks_used=kv,
        kv_blocks_free=1000 - kv,
        kv_blocks_total=1000,
        prompt_tokens_total=prompt * step,
        cached_tokens_total=prompt * step // 3,
        output_tokens_total=output * step,
    )


def fill(router: RouterCore) -> None:
    """Adds 64 workers, one with a hostile name, and requests in every state."""
    for i in range(PREFILLS):
        join(router, f"prefill-{i:02d}", "prefill")
    for i in range(DECODES - 1):
        join(router, f"decode-{i:02d}", "decode")
    join(router, HOSTILE, "decode")
    store_blocks(router.fleet.workers["prefill-03"], range(100, 108))
    for number in range(1, 25):
        place(router, number, f"request-{number:02d}", list(range(100, 100 + 2 * (number % 6) + 2)))
    ends = {1: "finished", 2: "failed", 3: "cancelled"}
    for number in range(1, 20):
        report(router, number, "prefilled", 0.05)
        if number < 16:
            report(router, number, "first_token", 0.08)
        if number in ends:
            report(router, number, ends[number], 0.9)
    place(router, 30, "refused-1", [], required_labels={"zone": "none"})
    place(router, 31, "hostile-1", [], tenant=TENANT, pinned_decode_worker_id=HOSTILE)


def place(router: RouterCore, number: int, name: str, hashes: list[int], **options: Any) -> None:
    with suppress(MeshError):
        router.ask("frontend-1", number, ask(name, hashes, **options), now=0.0, wall=time.time())


def report(router: RouterCore, number: int, kind: str, elapsed_s: float) -> None:
    error = LostError("the worker is gone") if kind == "failed" else None
    tokens = 32 if kind == "finished" else 0
    router.report(
        "frontend-1", number, Report(kind=ReportKind(kind), elapsed_s=elapsed_s, error=error, output_tokens=tokens)
    )


def plan() -> PlanReport:
    """Returns a plan for more workers than are ready."""
    shape, wanted = Shape(prefill_workers=16, decode_workers=48), Shape(prefill_workers=16, decode_workers=52)
    decision = Decision(
        number=7,
        model="demo",
        decided_at_s=STARTED_S,
        action=DecisionAction.SCALE,
        reason="itl_missed",
        inputs=DecisionInputs(
            state=ObservationState.COMPLETE, observed=Load(requests_per_s=12.5), predicted=Load(requests_per_s=14.0),
            ready=shape, wanted=wanted,
        ),
        alternatives=[Alternative(action=DecisionAction.SCALE, shape=wanted)],
    )  # fmt: skip
    latency = LatencyReport(
        model="demo", requests_per_s=12.5, ttft_mean_s=0.11, ttft_p99_s=0.31, itl_mean_s=0.012, itl_p99_s=0.06,
        state=ObservationState.COMPLETE,
    )  # fmt: skip
    return PlanReport(
        mode="act",
        source="prometheus",
        observed_at_s=STARTED_S,
        pools=[
            PoolReport(model="demo", role=Role.PREFILL, workers_ready=16, workers_planned=16),
            PoolReport(model="demo", role=Role.DECODE, workers_ready=48, workers_planned=52),
        ],
        latencies=[latency],
        targets=[Targets(model="demo", ttft_s=0.5, itl_s=0.05)],
        decisions=[decision],
        is_leader=True,
        leader_id="planner-1",
    )


async def serve(directory: Path) -> None:
    # Shortens intervals in this process, so that tests need not wait.
    access_control.RELOAD_INTERVAL_S = observer.INTERVAL_S = 0.2
    clock = SystemClock()
    agent = MemoryAgent()
    router = core(history_max=100)
    fill(router)
    fleet = Fleet(router, agent.registry(), asyncio.Event())
    fleet.rest_may_follow.set()
    telemetry = Telemetry.create("router")
    routing = RouterServicer(router, RouterMetrics(telemetry.instruments, router), clock)
    planning = PlannerServicer(cast(Planner, SimpleNamespace(newest=plan())))
    keys = directory / "keys.json"
    access = Access(AccessSettings(keys_file=str(keys) if keys.exists() else ""), clock)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_part(agent))
        for name, service, servicer in ((ROUTER, SERVICE_NAME, routing), (PLANNER, PLANNER_NAME, planning)):
            server = RpcServer(RpcSettings(grace_s=0), service_names=[service], add_services=servicer.add_to)
            await stack.enter_async_context(running_part(server))
            await server.set_serving(True)
            instance = Registration(
                service=name, instance_id=f"{service.split('.')[1]}-1", host="127.0.0.1", port=server.port, is_checked=False,
                ttl_s=3600,
            )  # fmt: skip
            await fleet.registry.register(instance)
            await fleet.registry.heartbeat(instance.instance_id)
        for i, worker in enumerate(router.fleet.workers.values()):
            if worker.worker_id != HOSTILE:
                await fleet.register(worker.worker_id, worker.role, 20_000 + i)
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        reader = MeshReader(fleet.registry, channels, timeout_s=PATIENCE_S, requests_max=observer.REQUESTS_MAX)
        url = await stack.enter_async_context(
            running_page(
                directory, reader, registry=fleet.registry, channels=channels, access=access,
                rest_may_follow=fleet.rest_may_follow,
            )
        )  # fmt: skip
        print(url, flush=True)
        await follow(fleet)


async def follow(fleet: Fleet) -> None:
    """Advances the workers' load, and handles the lines of standard input until its end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    lines: asyncio.Task[bytes] = asyncio.create_task(reader.readline())
    while True:
        fleet.step()
        done, _ = await asyncio.wait({lines}, timeout=0.2)
        if done:
            line = lines.result().decode()
            if not line:
                return
            await fleet.change(line)
            print("done", flush=True)
            lines = asyncio.create_task(reader.readline())


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
