"""Starts a planner: `python -m services.planner --help`."""

import os
import socket
import sys
from dataclasses import replace

from aiohttp import ClientSession

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import KVMESH_VERSION, PLANNER, VERSION_KEY, Registration, Registry
from kvmesh.discovery.leader import LeaderElection
from kvmesh.discovery.presence import Presence
from kvmesh.discovery.sealed import open_registry
from kvmesh.identity.certificates import source_of
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.lifecycle import run_process, run_until_signalled
from kvmesh.network.place import place_service
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.scaler_client import GrpcScalerClient
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import MetricsServer, Telemetry, configure_logging
from services.planner.connectors.base import Connector
from services.planner.connectors.mesh import MeshConnector
from services.planner.connectors.mesh_actions import MeshActions
from services.planner.connectors.scaler import ScalerConnector
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Fetcher, MetricsSource, PrometheusSource, ScrapeSource
from services.planner.planner import Planner
from services.planner.servicer import SERVICE_NAME, PlannerServicer
from services.planner.settings import PlannerSettings
from services.planner.speeds import WorkerSpeeds

LEADER_KEY = "kvmesh/planner/leader"


def make_source(settings: PlannerSettings, session: ClientSession, clock: SystemClock) -> MetricsSource:
    """Returns a Prometheus source if one is set, else scraping."""
    fetcher = Fetcher(session, timeout_s=settings.fetch_timeout_s)
    if settings.prometheus:
        return PrometheusSource(fetcher, settings.prometheus, clock, window_s=settings.window_s)
    return ScrapeSource(fetcher, clock, window_s=settings.window_s)


def make_connector(settings: PlannerSettings, registry: Registry, channels: ChannelPool) -> Connector:
    """Returns the connector to a scaler if one is set, else one that only flips and deflects."""
    actions = MeshActions(registry, channels)
    if settings.scaler_address:
        return ScalerConnector(GrpcScalerClient(channels, settings.scaler_address), actions)
    return MeshConnector(actions)


async def serve(settings: PlannerSettings) -> None:
    """Runs a planner until a signal."""
    settings = place_service(with_credentials(settings, MeshRole.PLANNER))
    planner_id = settings.planner_id or f"planner-{socket.gethostname()}-{os.getpid()}"
    clock = SystemClock()
    telemetry = Telemetry.create("planner", settings=settings.telemetry)
    registry = open_registry(settings.discovery, settings.mesh)
    mesh = source_of(settings.mesh.tls_directory)
    session = ClientSession()
    channels = ChannelPool(settings.rpc, channel_interceptors(telemetry), mesh=mesh)
    election = LeaderElection(registry, LEADER_KEY, planner_id, clock)
    planner = Planner(
        registry,
        make_source(settings, session, clock),
        PlannerMetrics(telemetry.instruments),
        clock,
        replace(settings, planner_id=planner_id),
        speeds=WorkerSpeeds(GrpcWorkerClient(channels), timeout_s=settings.fetch_timeout_s),
        connector=make_connector(settings, registry, channels),
        lead=election,
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
            [telemetry.tracing, metrics_server, *([election] if settings.mode == "act" else []), planner, server],
            on_ready=on_ready,
            drain=drain,
            settings=settings.lifecycle,
        )
    finally:
        if presence is not None:
            await presence.aclose()
        await channels.aclose()
        await session.close()
        await registry.aclose()


def main() -> int:
    """Runs the process; returns its exit status."""
    settings = load_or_exit(PlannerSettings, program="python -m services.planner", description=__doc__ or "")
    configure_logging(level=settings.telemetry.log_level, style=settings.telemetry.log_format, service="planner")
    return run_process(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
