"""Router, link and worker streams over the in-memory transport on virtual time: what takes seconds takes none here."""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.api.router.v1.router_pb2_grpc import add_RouterServiceServicer_to_server
from kvmesh.api.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvmesh.clock import SystemClock
from kvmesh.core import KvStored, Report, ReportKind
from kvmesh.discovery.base import DECODE, PREFILL, ROUTER, Health, Instance, View
from kvmesh.errors import UnavailableError
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.simulation.rpc import MemoryNetwork
from kvmesh.telemetry import Telemetry
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.metrics import RouterMetrics
from services.router.servicer import RouterServicer
from services.router.serving.membership import FleetMembership
from tests.integration.workers import ToldWorker
from tests.unit.router_fleets import ask
from tests.virtual_loop import run_virtual

SERVICES = {"p1": PREFILL, "p2": PREFILL, "d1": DECODE, "router-1": ROUTER, "router-2": ROUTER}


class FixedRegistry:
    """Lists the same healthy instances for ever: nothing here depends on the registry noticing anything."""

    async def watch(self, service: str) -> AsyncIterator[View]:
        instances = [
            Instance(
                service=service,
                instance_id=name,
                host=name,
                port=1,
                meta={},
                tags=(),
                health=Health.PASSING,
                is_draining=False,
            )
            for name, of in SERVICES.items()
            if of == service
        ]
        yield View(service=service, index=1, instances=instances)
        await asyncio.Event().wait()


class Stage:
    """Two routers, three workers, one frontend's link."""

    def __init__(self, seed: int) -> None:
        self.generator = Random(seed)
        self.network = MemoryNetwork(latency_s=lambda: self.generator.uniform(0.0001, 0.002), keepalive_s=20.0)
        self.clock = SystemClock()
        self.tasks: list[asyncio.Task] = []
        self.workers = {
            name: ToldWorker(name, "prefill" if name[0] == "p" else "decode") for name in ("p1", "p2", "d1")
        }
        self.cores: dict[str, RouterCore] = {}
        self.link = GrpcRouterLink(
            FixedRegistry(), self.network.pool(), frontend_id="f", clock=self.clock, generator=self.generator
        )

    async def __aenter__(self) -> "Stage":
        for name, worker in self.workers.items():
            await self.serve(name, lambda server, worker=worker: add_WorkerServiceServicer_to_server(worker, server))
        for name in ("router-1", "router-2"):
            await self.start_router(name)
        self.tasks.append(asyncio.create_task(self.link.run()))
        await asyncio.sleep(1)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    async def serve(self, name: str, add) -> None:
        server = self.network.server(f"{name}:1")
        add(server)
        await server.start()

    async def start_router(self, name: str) -> None:
        core = self.cores[name] = RouterCore(CoreSettings(), router_id=name, generator=self.generator)
        metrics = RouterMetrics(Telemetry.create("router", registry=CollectorRegistry()).instruments, core)
        membership = FleetMembership(
            FixedRegistry(),
            GrpcWorkerClient(self.network.pool()),
            core.fleet,
            clock=self.clock,
            generator=self.generator,
        )
        self.tasks.append(asyncio.create_task(membership.run()))
        servicer = RouterServicer(core, metrics, self.clock)
        self.tasks.append(asyncio.create_task(servicer.dispatcher.run()))
        await self.serve(name, lambda server: add_RouterServiceServicer_to_server(servicer, server))

    def excluded(self, worker: str) -> set[str]:
        return {core.fleet.workers[worker].excluded_by for core in self.cores.values()}


async def routers_die_while_asks_go_on(seed: int) -> list[str]:
    """200 asks while one router is killed and the other one hangs for a while; gives where each went."""
    async with Stage(seed) as stage:
        stage.workers["p1"].tell(KvStored(block_hashes=[1, 2]))
        await asyncio.sleep(0.1)
        used = stage.link.router_ids[0]
        other = "router-2" if used == "router-1" else "router-1"

        async def one(number: int) -> str:
            await asyncio.sleep(number * 0.02)
            placed = await stage.link.place(ask(f"r{number}", [1, 2, number + 10]), timeout_s=30)
            stage.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.0))
            return f"{placed.placement.prefill.worker_id} {placed.placement.cached_tokens}"

        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(one(number)) for number in range(200)]
            await asyncio.sleep(1.0)
            stage.network.kill(f"{used}:1")
            await asyncio.sleep(1.0)
            await stage.start_router(used)
            await asyncio.sleep(0.5)
            stage.network.partition(f"{other}:1")
            await asyncio.sleep(5.0)
            stage.network.heal(f"{other}:1")
        return [task.result() for task in asks]


def test_no_ask_is_lost_when_routers_die_and_hang():
    """Every ask is answered, by whichever router lives, and a run repeats exactly from its seed."""
    first = run_virtual(routers_die_while_asks_go_on(3))
    assert len(first) == 200
    assert "p1 32" in first
    assert first == run_virtual(routers_die_while_asks_go_on(3))


def test_a_partitioned_worker_is_silent_after_three_seconds():
    """Nothing fails on the wire; the missing records exclude it, and it is back after the partition."""

    async def story() -> None:
        async with Stage(1) as stage:
            assert stage.excluded("p2") == {""}
            stage.network.partition("p2:1")
            await asyncio.sleep(2.5)
            assert stage.excluded("p2") == {""}
            await asyncio.sleep(1.0)
            assert stage.excluded("p2") == {"silent"}
            stage.network.heal("p2:1")
            await asyncio.sleep(5.0)
            assert stage.excluded("p2") == {""}

    run_virtual(story())


def test_an_ask_ends_in_time_when_all_routers_hang():
    """Silence has a name and a bound."""

    async def story() -> float:
        async with Stage(1) as stage:
            stage.network.partition("router-1:1")
            stage.network.partition("router-2:1")
            began = stage.clock.now()
            with pytest.raises(UnavailableError) as refusal:
                await stage.link.place(ask("r", [1]), timeout_s=7)
            assert refusal.value.reason == "no_router"
            return stage.clock.now() - began

    assert 7 <= run_virtual(story()) < 7.1
