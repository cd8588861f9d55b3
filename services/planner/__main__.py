"""Starts a planner: `python -m services.planner --help`."""

import os
import socket
import sys

from aiohttp import ClientSession

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import KVMESH_VERSION, PLANNER, VERSION_KEY, Registration
from kvmesh.discovery.presence import Presence
from kvmesh.discovery.sealed import open_registry
from kvmesh.identity.certificates import source_of
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import run_process, run_until_signalled
from kvmesh.network.place import place_service
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import MetricsServer, Telemetry, configure_logging
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Fetcher, MetricsSource, PrometheusSource, ScrapeSource
from services.planner.planner import Planner
from services.planner.servicer import SERVICE_NAME, PlannerServicer
from services.planner.settings import PlannerSettings


def make_source(settings: PlannerSettings, session: ClientSession, clock: SystemClock) -> MetricsSource:
    """Returns a Prometheus source if one is set, else scraping."""
    fetcher = Fetcher(session, timeout_s=settings.fetch_timeout_s)
    if settings.prometheus:
        return PrometheusSource(fetcher, settings.prometheus, clock, window_s=settings.window_s)
    return ScrapeSource(fetcher, clock, window_s=settings.window_s)


async def serve(settings: PlannerSettings) -> None:
    """Runs a planner until a signal."""
    settings = place_service(with_credentials(settings, MeshRole.PLANNER))
    planner_id = settings.planner_id or f"planner-{socket.gethostname()}-{os.getpid()}"
    clock = SystemClock()
    telemetry = Telemetry.create("planner", settings=settings.telemetry)
    registry = open_registry(settings.discovery, settings.mesh)
    mesh = source_of(settings.mesh.tls_directory)
    session = ClientSession()
    planner = Planner(
        registry,
        make_source(settings, session, clock),
        PlannerMetrics(telemetry.instruments),
        clock,
        interval_s=settings.interval_s,
    )
    servicer = PlannerServicer(planner)
    server = RpcServer(
        settings.rpc,
        service_names=[SERVICE_NAME],
        add_services=servicer.add_to,
        interceptors=server_interceptors(telemetry, mesh),
        mesh=mesh,
    )
    metrics_server = MetricsServer(telemetry.registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port)
    presence: Presence | None = None

    async def on_ready() -> None:
        nonlocal presence
        await server.set_serving(True)
        registration = Registration(
            service=PLANNER,
            instance_id=planner_id,
            host=settings.rpc.advertised_host,
            port=server.port,
            meta={VERSION_KEY: KVMESH_VERSION, "metrics_port": str(metrics_server.port)},
            uses_tls=mesh is not None,
        )
        presence = Presence(registry, registration)
        await presence.start()

    async def drain() -> None:
        if presence is not None:
            await presence.set_draining(True, reason="stopping")
        planner.end_watches()
        await server.set_serving(False)

    try:
        await run_until_signalled(
            [telemetry.tracing, metrics_server, planner, server],
            on_ready=on_ready,
            drain=drain,
            settings=settings.lifecycle,
        )
    finally:
        if presence is not None:
            await presence.aclose()
        await session.close()
        await registry.aclose()


def main() -> int:
    """Runs the process; returns its exit status."""
    settings = load_or_exit(PlannerSettings, program="python -m services.planner", description=__doc__ or "")
    configure_logging(level=settings.telemetry.log_level, style=settings.telemetry.log_format, service="planner")
    return run_process(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
