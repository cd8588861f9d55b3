"""Router, link and worker streams over the in-memory transport, on virtual time."""

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
    """Lists the same healthy instances forever, because these tests do not depend on the registry."""

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


class RouterSetup:
    """Two routers, three workers, and the link of one frontend."""

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

    async def __aenter__(self) -> "RouterSetup":
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


async def place_while_routers_fail(seed: int) -> list[str]:
    """Places 200 requests while one router is killed and the other hangs for a while. Returns the placements."""
    async with RouterSetup(seed) as setup:
        setup.workers["p1"].tell(KvStored(block_hashes=[1, 2]))
        await asyncio.sleep(0.1)
        used = setup.link.router_ids[0]
        other = "router-2" if used == "router-1" else "router-1"

        async def one(number: int) -> str:
            await asyncio.sleep(number * 0.02)
            placed = await setup.link.place(ask(f"r{number}", [1, 2, number + 10]), timeout_s=30)
            setup.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.0))
            return f"{placed.placement.prefill.worker_id} {placed.placement.cached_tokens}"

        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(one(number)) for number in range(200)]
            await asyncio.sleep(1.0)
            setup.network.kill(f"{used}:1")
            await asyncio.sleep(1.0)
            await setup.start_router(used)
            await asyncio.sleep(0.5)
            setup.network.partition(f"{other}:1")
            await asyncio.sleep(5.0)
            setup.network.heal(f"{other}:1")
        return [task.result() for task in asks]


def test_no_ask_is_lost_when_routers_die_and_hang():
    """Each ask is answered by a router that is reachable, and a run repeats exactly from its seed."""
    first = run_virtual(place_while_routers_fail(3))
    assert len(first) == 200
    assert "p1 32" in first
    assert first == run_virtual(place_while_routers_fail(3))


def test_a_partitioned_worker_is_silent_after_three_seconds():
    """A partition breaks no connection. Missing load records exclude the worker, and it is used again after the partition."""

    async def scenario() -> None:
        async with RouterSetup(1) as setup:
            assert setup.excluded("p2") == {""}
            setup.network.partition("p2:1")
            await asyncio.sleep(2.5)
            assert setup.excluded("p2") == {""}
            await asyncio.sleep(1.0)
            assert setup.excluded("p2") == {"silent"}
            setup.network.heal("p2:1")
            await asyncio.sleep(5.0)
            assert setup.excluded("p2") == {""}

    run_virtual(scenario())


def test_an_ask_ends_in_time_when_all_routers_hang():
    """An ask fails with `no_router` at its timeout if no router answers."""

    async def scenario() -> float:
        async with RouterSetup(1) as setup:
            setup.network.partition("router-1:1")
            setup.network.partition("router-2:1")
            began = setup.clock.now()
            with pytest.raises(UnavailableError) as refusal:
                await setup.link.place(ask("r", [1]), timeout_s=7)
            assert refusal.value.reason == "no_router"
            return setup.clock.now() - began

    assert 7 <= run_virtual(scenario()) < 7.1
