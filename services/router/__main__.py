"""Starts a router: `python -m services.router --help`."""

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from random import Random, SystemRandom

from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.base import KVMESH_VERSION, ROUTER, VERSION_KEY, Health, Registration
from kvmesh.discovery.identity import open_identity
from kvmesh.discovery.presence import Presence
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import Part, run_parts, run_process, stop_on_signals
from kvmesh.network.place import place_service
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.router.client import GrpcPeersClient
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import MetricsServer, Telemetry, configure_logging
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.replicas.joining import join
from services.router.replicas.peer_reservations import PeerReservations
from services.router.replicas.peer_streams import PeerStreams
from services.router.servicer import SERVICE_NAME, RouterServicer
from services.router.serving.maintenance import Maintenance
from services.router.serving.membership import FleetMembership
from services.router.serving.queue_dispatcher import QueueDispatcher
from services.router.settings import RouterSettings


class Router:
    """All parts of a router, and the order in which they start and stop."""

    def __init__(self, settings: RouterSettings, clock: Clock, generator: Random) -> None:
        self.settings = settings
        self.router_id = settings.router_id or f"router-{socket.gethostname()}-{os.getpid()}"
        self._clock = clock
        self.telemetry = Telemetry.create("router", settings=settings.telemetry)
        run_id = f"{SystemRandom().getrandbits(32):08x}"
        self.core = RouterCore(settings, router_id=self.router_id, run_id=run_id, generator=generator)
        reservations = PeerReservations(self.core, settings.sync)
        metrics = RouterMetrics(self.telemetry.instruments, self.core)
        metrics.add_peer_gauges(reservations)
        dispatcher = QueueDispatcher(self.core, metrics, clock)
        identity = open_identity(settings.mesh, settings.discovery, MeshRole.ROUTER, clock=clock)
        self._registry = identity.registry(settings.discovery, settings.mesh)
        identity.add_metrics(self.telemetry.instruments)
        mesh = identity.source
        channels = ChannelPool(
            settings=settings.rpc,
            interceptors=channel_interceptors(self.telemetry),
            mesh=mesh,
            role_of=identity.book.role_of,
        )
        self._peers = PeerStreams(
            reservations,
            self._registry,
            GrpcPeersClient(channels),
            router_id=self.router_id,
            clock=clock,
            generator=generator,
            settings=settings.sync,
        )
        self.servicer = RouterServicer(
            self.core,
            metrics,
            clock,
            tracing=self.telemetry.tracing,
            dispatcher=dispatcher,
            peers=self._peers,
        )
        self.servicer.is_joining = True
        self._membership = FleetMembership(
            self._registry,
            GrpcWorkerClient(channels),
            self.core.fleet,
            clock=clock,
            generator=generator,
        )
        self._server = RpcServer(
            settings.rpc,
            service_names=[SERVICE_NAME],
            add_services=self.servicer.add_to,
            interceptors=server_interceptors(self.telemetry, mesh, identity.intentions),
            mesh=mesh,
        )
        self._metrics_server = MetricsServer(
            self.telemetry.registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port
        )
        self._presence: Presence | None = None
        self._on_joined: Callable[[], Awaitable[None]] | None = None
        maintenance = Maintenance(self.core, metrics, clock)
        self._parts: list[Part] = [
            self.telemetry.tracing,
            *identity.parts,
            channels,
            self._metrics_server,
            self._membership,
            self._peers,
            maintenance,
            dispatcher,
            self._server,
        ]

    async def run(
        self,
        *,
        stop: asyncio.Event,
        hurry: asyncio.Event,
        on_joined: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Runs until `stop`; leaves the registry after everything else. Calls `on_joined` when the router takes requests."""
        self._on_joined = on_joined
        try:
            await run_parts(
                self._parts,
                stop=stop,
                hurry=hurry,
                on_ready=self._join,
                drain=self._drain,
                settings=self.settings.lifecycle,
            )
        finally:
            if self._presence is not None:
                await self._presence.aclose()
            await self._registry.aclose()

    async def _join(self) -> None:
        registration = Registration(
            service=ROUTER,
            instance_id=self.router_id,
            host=self.settings.rpc.advertised_host,
            port=self._server.port,
            meta={
                VERSION_KEY: KVMESH_VERSION,
                "metrics_port": str(self._metrics_server.port),
                "policy": self.core.policy_name,
            },
            uses_tls=self.settings.mesh.has_tls,
        )
        self._presence = Presence(self._registry, registration, health=Health.CRITICAL, note="joining")
        await join(
            self.core,
            self._membership,
            self._peers,
            presence=self._presence,
            set_serving=self._set_serving,
            clock=self._clock,
            settings=self.settings.joining,
        )
        if self._on_joined is not None:
            await self._on_joined()

    async def _set_serving(self, is_serving: bool) -> None:
        self.servicer.is_joining = False
        await self._server.set_serving(is_serving)

    async def _drain(self) -> None:
        if self._presence is not None:
            await self._presence.set_draining(True, reason="stopping")
        await self._server.set_serving(False)
        self.servicer.end_streams()
        self._peers.end_streams()


async def serve(settings: RouterSettings) -> None:
    settings = place_service(with_credentials(settings, MeshRole.ROUTER))
    stop, hurry = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry):
        await Router(settings, SystemClock(), new_generator(settings.seed)).run(stop=stop, hurry=hurry)


def new_generator(seed: int) -> Random:
    """Returns the generator of tie-breaks. Seed 0: a new seed each time."""
    return Random(seed or SystemRandom().getrandbits(64))


def main() -> int:
    settings = load_or_exit(RouterSettings, program="python -m services.router", description=__doc__ or "")
    configure_logging(level=settings.telemetry.log_level, style=settings.telemetry.log_format, service=ROUTER)
    return run_process(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
