"""Starts a frontend: `python -m services.frontend --help`."""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from random import Random, SystemRandom
from typing import Protocol

import grpc.aio

from kvmesh.api.inference.grpc_service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kvmesh.api.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvmesh.clock import Clock, SystemClock
from kvmesh.discovery.base import FRONTEND, KVMESH_VERSION, VERSION_KEY, Registration, Registry
from kvmesh.discovery.identity import open_identity
from kvmesh.discovery.presence import Presence
from kvmesh.event_log import event_logger
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import Part, run_parts, run_process, stop_on_signals
from kvmesh.network.names import is_loopback
from kvmesh.network.place import place_service
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.clients import RouterLink
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.leg_link import GrpcLegLinks
from kvmesh.rpc.mesh.view import MeshReader
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import LoopLag, MetricsServer, Telemetry, configure_logging
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.api.anthropic.serve import add_message_routes
from services.frontend.api.batches.part import BatchesPart
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.api.http.server import HttpServer
from services.frontend.api.kserve.servicer import SERVICE_NAME as KSERVE_NAME
from services.frontend.api.kserve.servicer import KserveServicer
from services.frontend.api.openapi.routes import add_description_routes
from services.frontend.api.responses.serve import Responses
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import DiscoveredModels
from services.frontend.pipeline.fallback_router import WITHOUT_ROUTER_AFTER_S, FallbackRouterLink
from services.frontend.pipeline.local_placement import LocalPlacer
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.processes import supervise
from services.frontend.settings import FrontendSettings
from services.frontend.stores.database import state_directory
from services.frontend.stores.url import shared_database
from services.frontend.ui.observer import READ_TIMEOUT_S, REQUESTS_MAX, MeshObserver
from services.frontend.ui.routes import UiRoutes

_log = event_logger(__name__)
SHARE_AFTER_S = 10.0
"""Longest wait for a model before a process joins a shared port; without a model it could only refuse requests."""


class RouterPart(RouterLink, Part, Protocol):
    """A RouterLink that starts and stops with the process."""


class Frontend:
    """The parts of the process and their order of start and stop. `router` None: routers are found in the registry."""

    def __init__(
        self, settings: FrontendSettings, clock: Clock, generator: Random, *, router: RouterPart | None = None
    ) -> None:
        self.settings = settings
        self.instance_id = instance_id(settings)
        self.telemetry = Telemetry.create("frontend", settings=settings.telemetry)
        self.identity = open_identity(settings.mesh, settings.discovery, MeshRole.FRONTEND, clock=clock)
        self.identity.add_metrics(self.telemetry.instruments)
        self.registry: Registry = self.identity.registry(settings.discovery, settings.mesh)
        self.channels = ChannelPool(
            settings=settings.rpc,
            interceptors=channel_interceptors(self.telemetry),
            mesh=self.identity.source,
            role_of=self.identity.book.role_of,
        )
        lost_workers = LostWorkers()
        self.links = GrpcLegLinks(
            self.channels,
            frontend_id=self.instance_id,
            clock=clock,
            on_broken=lambda worker_id: lost_workers.add(worker_id, clock.now()),
        )
        self.models = DiscoveredModels(
            registry=self.registry,
            source=GrpcWorkerClient(self.channels),
            settings=settings.models,
            clock=clock,
            parsers=settings.parser_names,
        )
        self.metrics = FrontendMetrics(self.telemetry.instruments, lambda: self.pipeline.in_flight)
        self.router: Part
        if router is not None:
            placing: RouterLink = router
            self.router = router
        else:
            routers = GrpcRouterLink(
                self.registry,
                self.channels,
                frontend_id=self.instance_id,
                clock=clock,
                generator=generator,
                settings=settings.router,
                no_stream_s=WITHOUT_ROUTER_AFTER_S,
            )
            placing = FallbackRouterLink(
                routers,
                LocalPlacer(),
                knows_router=lambda: routers.knows_router,
                workers=self.models.workers,
                on_placed=self.metrics.local_placements.inc,
            )
            self.router = routers
        self.access = Access(settings.access, clock, instruments=self.telemetry.instruments, registry=self.registry)
        self.pipeline = Pipeline(
            models=self.models,
            links=self.links,
            router=placing,
            clock=clock,
            generator=generator,
            metrics=self.metrics,
            settings=settings.pipeline,
            tracing=self.telemetry.tracing,
            access=self.access,
            lost_workers=lost_workers,
        )
        directory = state_directory(settings.state_dir)
        shared = shared_database(settings.stores, clock)
        self.responses = Responses(settings.responses, directory, clock, shared=shared)
        self.batches = BatchesPart(
            settings=settings.batches,
            directory=directory,
            pipeline=self.pipeline,
            responses=self.responses,
            instruments=self.telemetry.instruments,
            instance_id=self.instance_id,
            shared=shared,
        )
        self.observer = MeshObserver(
            MeshReader(self.registry, self.channels, timeout_s=READ_TIMEOUT_S, requests_max=REQUESTS_MAX),
            clock,
            frontend_id=self.instance_id,
            instruments=self.telemetry.instruments,
        )
        ui_routes = UiRoutes(
            self.observer,
            access=self.access,
            registry=self.registry,
            channels=self.channels,
            ui=settings.ui,
            http=settings.http,
        )
        self.http = HttpServer(
            self.pipeline,
            settings.http,
            self.telemetry.registry,
            problems=self.models.problems,
            more_routes=[
                self.responses.add_routes,
                add_message_routes,
                self.batches.add_routes,
                add_description_routes,
                ui_routes.add_routes,
            ],
        )
        self.server = RpcServer(
            settings.server_rpc,
            service_names=[SERVICE_NAME, *([KSERVE_NAME] if settings.kserve_is_on else [])],
            add_services=self._add_services,
            interceptors=[*server_interceptors(self.telemetry), AccessInterceptor(self.access)],
        )
        self.metrics_server = MetricsServer(
            self.telemetry.registry,
            settings.telemetry.metrics_host,
            settings.telemetry.metrics_port,
            is_healthy=lambda: bool(self.models.served()) and not self.pipeline.is_draining,
        )
        self.registration = FrontendRegistration(self)

    def _add_services(self, server: grpc.aio.Server) -> None:
        # Batches start after the server, so each call looks them up.
        servicer = InferenceServicer(self.pipeline, lambda: self.batches.service)
        add_InferenceServiceServicer_to_server(servicer, server)
        if self.settings.kserve_is_on:
            add_GRPCInferenceServiceServicer_to_server(KserveServicer(self.pipeline), server)

    async def run(self, *, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Runs until `stop`. Then it reports not ready, finishes requests in flight, and closes its parts in reverse order."""
        http = self.settings.http
        if http.host and not is_loopback(http.host) and not self.settings.access.needs_key:
            _log.warning("http_api_needs_no_key", host=http.host, advice="--access-keys-file or --http-host 127.0.0.1")
        parts: list[Part] = [
            self.telemetry.tracing,
            *self.identity.parts,
            ConnectionCloser(self),
            self.access,
            self.router,
            self.models,
            self.metrics_server,
            self.server,
            self.responses,
            self.batches,
            SharedPortDelay(self),
            self.http,
            LoopLag(self.telemetry.instruments, self.pipeline.on_loop_lag),
            # Closed before the HTTP server, which would wait for the viewers' streams.
            self.observer,
            self.registration,
        ]
        await run_parts(parts, stop=stop, hurry=hurry, drain=self._drain, settings=self.settings.lifecycle)

    async def _drain(self) -> None:
        draining = asyncio.ensure_future(self.pipeline.drain())
        await self.server.set_serving(False)
        await self.registration.set_draining()
        await draining

    async def aclose(self) -> None:
        """Closes links, channels and the registry, after every part that uses them."""
        await self.links.aclose()
        await self.channels.aclose()
        await self.registry.aclose()


class FrontendRegistration:
    """Registers the frontend. The last part to start and the first to stop."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._presence: Presence | None = None

    async def start(self) -> None:
        """Sets the health service to serving first, so that the registry's first check passes."""
        frontend = self._frontend
        await frontend.server.set_serving(True)
        registration = Registration(
            service=FRONTEND,
            instance_id=frontend.instance_id,
            host=frontend.settings.rpc.advertised_host,
            port=frontend.server.port,
            meta={
                VERSION_KEY: KVMESH_VERSION,
                "http_port": str(frontend.http.port),
                "metrics_port": str(frontend.metrics_server.port),
            },
            uses_tls=frontend.settings.rpc.has_tls,
            # The certificate is for clients: the registry's agent need not know its authority.
            is_checked=not frontend.settings.rpc.has_tls,
        )
        self._presence = Presence(frontend.registry, registration)
        await self._presence.start()

    async def set_draining(self) -> None:
        """Marks the frontend as draining in the registry."""
        if self._presence is not None:
            await self._presence.set_draining(True, reason="stopping")

    async def aclose(self) -> None:
        """Deregisters the frontend."""
        if self._presence is not None:
            await self._presence.aclose()


class SharedPortDelay:
    """Delays a process that joins a shared port until it has a model, because the kernel sends it requests immediately."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def start(self) -> None:
        """Waits for at most `SHARE_AFTER_S`: a mesh without workers must still answer with errors."""
        if self._frontend.settings.http.shares_port:
            with suppress(TimeoutError):
                async with asyncio.timeout(SHARE_AFTER_S):
                    await self._frontend.models.wait_served()

    async def aclose(self) -> None:
        """Nothing to do."""


class ConnectionCloser:
    """Closes the parts that need no start. Closed last."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def start(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """See Frontend.aclose."""
        await self._frontend.aclose()


def instance_id(settings: FrontendSettings) -> str:
    """Returns the id with which the process registers and connects to routers."""
    return settings.instance_id or f"frontend-{socket.gethostname()}-{os.getpid()}"


async def serve(settings: FrontendSettings) -> None:
    """Runs a frontend until a signal."""
    settings = place_service(with_credentials(settings, MeshRole.FRONTEND))
    stop, hurry = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop, hurry):
        await Frontend(settings, SystemClock(), Random(SystemRandom().getrandbits(128))).run(stop=stop, hurry=hurry)


def main(*, shares_port: bool = False) -> int:
    """Runs the process; returns its exit status. `shares_port`: other processes listen on its HTTP port too."""
    # Otherwise the tokenizer library starts a pool of threads for single prompts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = load_or_exit(FrontendSettings, program="python -m services.frontend", description=__doc__ or "")
    configure_logging(level=settings.telemetry.log_level, style=settings.telemetry.log_format, service=FRONTEND)
    if shares_port:
        settings = replace(settings, processes=1, http=replace(settings.http, shares_port=True))
    if settings.processes > 1:
        return run_process(lambda: supervise(settings, sys.argv[1:], SystemClock()))
    return run_process(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
