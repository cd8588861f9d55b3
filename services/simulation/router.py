"""A router process of the simulation, composed as `services/router/__main__.py` composes a real one."""

import asyncio
from contextlib import suppress
from typing import Any

from kvmesh.discovery.base import ROUTER, Registration
from kvmesh.errors import MeshError
from kvmesh.rpc.health import GrpcHealth
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.router.client import GrpcPeersClient
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.telemetry import Telemetry
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.replicas.joining import join
from services.router.replicas.peer_reservations import PeerReservations
from services.router.replicas.peer_streams import PeerStreams
from services.router.servicer import RouterServicer
from services.router.serving.maintenance import Maintenance
from services.router.serving.membership import FleetMembership
from services.router.settings import RouterSettings
from services.simulation.world import World

PORT = 9100


class SimulatedRouter:
    """One process: core, membership, server, presence."""

    def __init__(self, world: World, router_id: str, settings: RouterSettings, *, run: int = 1) -> None:
        self._world = world
        self.router_id = router_id
        self.run = run
        self.address = f"{router_id}:{PORT}"
        self.is_alive = False
        self.is_leaving = False
        """True from the time of the signal that ends the process."""
        generator = world.random(f"router/{router_id}")
        clock = world.clock_of(router_id)
        telemetry = Telemetry.create("router")
        self.core = RouterCore(settings, router_id=router_id, run_id=f"run{run}", generator=generator)
        self.replica = PeerReservations(self.core, settings.sync)
        metrics = RouterMetrics(telemetry.instruments, self.core)
        metrics.add_peer_gauges(self.replica)
        self._settings = settings
        self._registry = world.agent.registry()
        self._channels = world.network.pool(channel_interceptors(telemetry), client=router_id)
        self._peers = PeerStreams(
            self.replica,
            self._registry,
            GrpcPeersClient(self._channels),
            router_id=router_id,
            clock=clock,
            generator=world.random(f"peers/{router_id}"),
            settings=settings.sync,
        )
        self._servicer = RouterServicer(self.core, metrics, clock, peers=self._peers)
        self._servicer.is_joining = True
        self._membership = FleetMembership(
            self._registry,
            GrpcWorkerClient(self._channels),
            self.core.fleet,
            clock=clock,
            generator=generator,
        )
        self._upkeep = Maintenance(self.core, metrics, clock)
        self._telemetry = telemetry
        self._health = GrpcHealth(())
        self._server: Any = None
        self._presence = world.make_presence(
            self._registry,
            Registration(service=ROUTER, instance_id=router_id, host=router_id, port=PORT),
            is_joining=True,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Registers once it knows what the others know."""
        parts = (self._membership, self._peers, self._upkeep, self._servicer.dispatcher)
        self._tasks = [asyncio.create_task(part.run()) for part in parts]
        # A MemoryServer has the methods that generated code calls, without being grpc.aio's class.
        server: Any = self._world.network.server(self.address, server_interceptors(self._telemetry))
        self._server = server
        self._servicer.add_to(server)
        await self._health.add_to(server)
        await server.start()
        await join(
            self.core,
            self._membership,
            self._peers,
            presence=self._presence,
            set_serving=self._set_serving,
            clock=self._world.clock,
            settings=self._settings.joining,
        )
        self.is_alive = True
        self._world.trace.note("started", self.router_id)

    async def _set_serving(self, is_serving: bool) -> None:
        self._servicer.is_joining = False
        await self._health.set_serving(is_serving)

    def now(self) -> float:
        """Virtual time."""
        return self._world.clock.now()

    @property
    def has_waiting(self) -> bool:
        """True while an answer is owed to a stream."""
        return self._servicer.dispatcher.has_queued

    def workers_ready(self) -> int:
        """Workers that take requests."""
        return sum(not worker.excluded_by for worker in self.core.fleet.workers.values())

    async def kill(self) -> None:
        """SIGKILL."""
        self._world.trace.note("kill", self.router_id)
        self._world.network.kill(self.address)
        self._registry.set_reachable(False)
        for task in self._tasks:
            task.cancel()  # Before any part is closed in order: a killed process sends nothing.
        await self.aclose()

    async def aclose(self) -> None:
        """Signs off and ends."""
        if not self.is_alive:
            return
        self.is_alive = False
        with suppress(MeshError):
            await self._presence.aclose()
        if self._server is not None:
            await self._server.stop(None)
        await self._peers.aclose()
        await self._membership.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channels.aclose()
        await self._registry.aclose()
