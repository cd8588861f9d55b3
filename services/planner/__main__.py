"""Starts a planner: `python -m services.planner --help`."""

import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from aiohttp import ClientSession
from grpc.aio import Server

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import KVMESH_VERSION, PLANNER, VERSION_KEY, Registration, Registry
from kvmesh.discovery.identity import open_identity
from kvmesh.discovery.leader import LeaderElection
from kvmesh.discovery.presence import Presence
from kvmesh.errors import InvalidRequestError
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
from services.planner.connectors.base import Connector, NoConnector
from services.planner.connectors.compose import ComposeOrchestrator
from services.planner.connectors.kubernetes import KubernetesOrchestrator
from services.planner.connectors.mesh import MeshConnector, ScalerConnector
from services.planner.connectors.pools import read_pools
from services.planner.connectors.sized import Orchestrator, SizedConnector
from services.planner.keda.servicer import SERVICE_NAME as KEDA_SERVICE_NAME
from services.planner.keda.servicer import ExternalScalerServicer
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
    """Returns the connector that the settings name."""
    kind = settings.connector or ("scaler" if settings.scaler_address else "mesh")
    match kind:
        case "none":
            return NoConnector()
        case "scaler":
            return ScalerConnector(GrpcScalerClient(channels, settings.scaler_address), registry, channels)
        case "compose":
            orchestrator: Orchestrator = ComposeOrchestrator(settings.compose)
        case "kubernetes":
            orchestrator = KubernetesOrchestrator(settings.kubernetes)
        case _:
            return MeshConnector(registry, channels)
    pools = read_pools(settings.pools, field="pools")
    return SizedConnector(orchestrator, pools, registry=registry, channels=channels)


def read_history(path: str) -> Mapping[str, Sequence[float]]:
    """Raises InvalidRequestError for a file that does not have rates by model."""
    if not path:
        return {}
    try:
        history = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, list[float]])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(f"{path}: {error}", field="history_file") from None
    if any(not (0 <= rate < math.inf) for rates in history.values() for rate in rates):
        raise InvalidRequestError(f"{path}: a rate is below 0 or not finite", field="history_file")
    return history


async def serve(settings: PlannerSettings) -> None:
    """Runs a planner until a signal."""
    settings = place_service(with_credentials(settings, MeshRole.PLANNER))
    planner_id = settings.planner_id or f"planner-{socket.gethostname()}-{os.getpid()}"
    clock = SystemClock()
    telemetry = Telemetry.create("planner", settings=settings.telemetry)
    identity = open_identity(settings.mesh, settings.discovery, MeshRole.PLANNER, clock=clock)
    registry = identity.registry(settings.discovery, settings.mesh)
    identity.add_metrics(telemetry.instruments)
    mesh = identity.source
    session = ClientSession()
    channels = ChannelPool(
        settings=settings.rpc, interceptors=channel_interceptors(telemetry), mesh=mesh, role_of=identity.book.role_of
    )
    election = LeaderElection(registry, LEADER_KEY, member_id=planner_id, clock=clock)
    connector = make_connector(settings, registry, channels)
    planner = Planner(
        registry=registry,
        source=make_source(settings, session, clock),
        metrics=PlannerMetrics(telemetry.instruments),
        clock=clock,
        settings=replace(settings, planner_id=planner_id),
        speeds=WorkerSpeeds(GrpcWorkerClient(channels), timeout_s=settings.fetch_timeout_s),
        connector=connector,
        lead=election,
        history=read_history(settings.history_file),
    )
    servicers = (PlannerServicer(planner), ExternalScalerServicer(planner))

    def add_services(server: Server) -> None:
        for servicer in servicers:
            servicer.add_to(server)

    server = RpcServer(
        settings.rpc,
        service_names=[SERVICE_NAME, KEDA_SERVICE_NAME],
        add_services=add_services,
        interceptors=server_interceptors(telemetry, mesh, identity.intentions),
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
            [
                telemetry.tracing,
                *identity.parts,
                metrics_server,
                # A planner that does not act must not become the leader.
                *([election] if settings.mode == "act" else []),
                planner,
                server,
            ],
            on_ready=on_ready,
            drain=drain,
            settings=settings.lifecycle,
        )
    finally:
        if presence is not None:
            await presence.aclose()
        await connector.aclose()
        await channels.aclose()
        await session.close()
        await registry.aclose()


def main() -> int:
    """Runs the process; returns its exit status."""
    settings = load_or_exit(PlannerSettings, program="python -m services.planner", description=__doc__ or "")
    configure_logging(level=settings.telemetry.log_level, style=settings.telemetry.log_format, service=PLANNER)
    return run_process(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
