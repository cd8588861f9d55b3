"""Runs one worker as a process: engine, gRPC server, metrics, registry, in that order."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from random import SystemRandom
from typing import Any

import grpc.aio

from kvmesh.api.decode.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.api.prefill.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from kvmesh.api.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvmesh.clock import Clock, SystemClock
from kvmesh.core import Role
from kvmesh.discovery.base import Registry
from kvmesh.discovery.identity import open_identity
from kvmesh.engines.base import Engine
from kvmesh.engines.registration import EngineHost
from kvmesh.engines.registry import ENGINES
from kvmesh.errors import UnsupportedError
from kvmesh.identity.credentials import with_credentials
from kvmesh.identity.roles import MeshRole
from kvmesh.identity.secret import MeshSecret
from kvmesh.kv.seals import HandleSeals
from kvmesh.lifecycle import LifecycleSettings, RunningPart, run_until_signalled
from kvmesh.network.names import LOOPBACK, host_port
from kvmesh.network.place import place_service
from kvmesh.network.ucx import set_ucx_variables
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.prefill_client import GrpcPrefillClient
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.telemetry import MetricsServer, Telemetry, configure_logging
from kvmesh.worker.admission import admissions
from kvmesh.worker.kv_checks import KvChecks
from kvmesh.worker.leg_servicer import LegServicer
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.metrics import WorkerMetrics
from kvmesh.worker.own_handoff import OwnHandoff
from kvmesh.worker.servicer import WorkerServicer
from kvmesh.worker.settings import HostSettings
from kvmesh.worker.warm_up import WarmUp
from kvmesh.worker.worker import Worker, WorkerIdentity

SERVICES = ("kvmesh.prefill.v1.PrefillService", "kvmesh.decode.v1.DecodeService", "kvmesh.worker.v1.WorkerService")


ANSWER_S = 0.05
"""For the answer to a call that ends the process."""


def make_identity(settings: HostSettings, role: Role) -> WorkerIdentity:
    """Returns an id that is stable for the process, and an epoch that differs from those of earlier processes with the same id."""
    worker_id = settings.worker_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    return WorkerIdentity(worker_id=worker_id, epoch=time.time_ns())


def _engine_host(settings: HostSettings, role: Role, clock: Clock) -> EngineHost:
    return EngineHost(
        model=settings.model,
        served_name=settings.served_name or Path(settings.model).name,
        role=role,
        kv=settings.kv,
        clock=clock,
        address=settings.address or LOOPBACK,
        ports=settings.ports,
        requests_max=settings.worker.legs_max,
        mesh_secret_file=settings.mesh.secret_file,
    )


def make_engine(settings: HostSettings, role: Role, clock: Clock) -> Engine:
    """Returns the engine named in the settings. UnsupportedError when its packages are not installed."""
    try:
        return ENGINES[settings.engine].make(settings.engine_settings, _engine_host(settings, role, clock))
    except ImportError as error:
        raise UnsupportedError(
            f"the engine {settings.engine} is not installed here ({error}); see the extras in pyproject.toml",
            reason="engine_missing",
            field="engine",
        ) from error


class _Announcement:
    """Registers the worker. It is the last part to start and the first to stop."""

    def __init__(
        self, *, worker: Worker, membership: WorkerMembership, server: RpcServer, metrics: MetricsServer
    ) -> None:
        self._worker = worker
        self._membership = membership
        self._server = server
        self._metrics = metrics

    async def start(self) -> None:
        """Sets the health to SERVING first, so that the registry's first check passes."""
        self._membership.set_ports(port=self._server.port, metrics_port=self._metrics.port)
        await self._server.set_serving(True)
        await self._membership.start()

    async def aclose(self) -> None:
        """Leaves the registry, then ends the streams, which would keep the server open for its whole grace period."""
        try:
            await self._membership.aclose()
        finally:
            self._worker.stop_nowait()


class _Closing:
    """The registry client as a part that only needs closing."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def start(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        await self._registry.aclose()


def _end_process() -> None:
    """Ends the process as an operator does, once the present call is answered."""
    asyncio.get_running_loop().call_later(ANSWER_S, os.kill, os.getpid(), signal.SIGTERM)


async def serve_worker(settings: HostSettings, role: Role) -> None:
    """Serves until a signal or the engine's death. A signal drains the worker: it refuses new legs and finishes those in flight in
    bounded time.

    `role` is the worker's role at the start. Both roles' services are there at any time, because SetRole may change the role.
    """
    configure_logging(
        level=settings.telemetry.log_level, style=settings.telemetry.log_format, service=f"kvmesh-{role.value}"
    )
    settings = place_service(with_credentials(settings, MeshRole(role.value)))
    set_ucx_variables(settings.address, settings.ports)
    clock = SystemClock()
    telemetry = Telemetry.create(role.value, settings=settings.telemetry)
    follower = ENGINES[settings.engine].make_follower(settings.engine_settings, _engine_host(settings, role, clock))
    if follower is not None:
        await _compute_for_leader(settings, telemetry, follower)
        return
    identity = open_identity(settings.mesh, settings.discovery, MeshRole(role.value), clock=clock)
    registry = identity.registry(settings.discovery, settings.mesh)
    identity.add_metrics(telemetry.instruments)
    mesh = identity.source
    secret = MeshSecret.from_file(settings.mesh.secret_file)
    worker = Worker(
        make_engine(settings, role, clock),
        identity=make_identity(settings, role),
        settings=settings.worker,
        clock=clock,
        tracing=telemetry.tracing,
        seals=None if secret is None else HandleSeals(secret, clock.wall),
    )
    WorkerMetrics(worker, telemetry.registry)
    membership = WorkerMembership(
        worker,
        registry,
        host=settings.rpc.advertised_host,
        uses_tls=mesh is not None,
        clock=clock,
        prepare_identity=lambda role: identity.prepare(MeshRole(role.value)),
    )
    channels = ChannelPool(settings=settings.rpc, mesh=mesh, role_of=identity.book.role_of)
    checks = KvChecks(
        worker,
        registry,
        GrpcPrefillClient(channels),
        host=settings.rpc.advertised_host,
        clock=clock,
        random=SystemRandom(),
    )

    rules = admissions(
        waiting_prompt_tokens_max=settings.waiting_prompt_tokens_max, waiting_requests_max=settings.waiting_requests_max
    )

    def add_services(server: grpc.aio.Server) -> None:
        prefill: Any = LegServicer(worker, Role.PREFILL, rules[Role.PREFILL])
        decode: Any = LegServicer(worker, Role.DECODE, rules[Role.DECODE])
        add_PrefillServiceServicer_to_server(prefill, server)
        add_DecodeServiceServicer_to_server(decode, server)
        servicer = WorkerServicer(worker, membership=membership, clock=clock, checks=checks, exit_process=_end_process)
        add_WorkerServiceServicer_to_server(servicer, server)

    server = RpcServer(
        settings.rpc,
        service_names=SERVICES,
        add_services=add_services,
        interceptors=server_interceptors(telemetry, mesh, identity.intentions),
        mesh=mesh,
    )
    metrics = MetricsServer(telemetry.registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port)

    host = settings.rpc.advertised_host
    own_handoff = OwnHandoff(
        worker,
        registry,
        GrpcWorkerClient(channels),
        host=host,
        address=lambda: host_port(host, server.port),
        random=SystemRandom(),
    )
    warm_up = (
        [WarmUp(worker=worker, checks=checks, own_handoff=own_handoff, clock=clock)] if settings.worker.warm_up else []
    )
    announcement = _Announcement(worker=worker, membership=membership, server=server, metrics=metrics)

    async def drain() -> None:
        await membership.set_draining(True)
        await worker.drain()
        await worker.wait_handles_gone()

    await run_until_signalled(
        [
            # Each part uses those before it. They close in reverse: the worker leaves the registry before its server closes, and the server
            # closes before the engine.
            telemetry.tracing,
            *identity.parts,
            _Closing(registry),
            channels,
            worker,
            membership.files,
            server,
            metrics,
            *warm_up,
            announcement,
            checks,
        ],
        drain=drain,
        settings=LifecycleSettings(start_timeout_s=start_timeout_s(settings)),
    )


async def _compute_for_leader(settings: HostSettings, telemetry: Telemetry, follower: RunningPart) -> None:
    """Runs the engine's ranks of this machine until a signal or the engine's end. Only the leader's machine registers and serves."""
    metrics = MetricsServer(telemetry.registry, settings.telemetry.metrics_host, settings.telemetry.metrics_port)
    await run_until_signalled(
        [telemetry.tracing, metrics, follower],
        settings=LifecycleSettings(start_timeout_s=start_timeout_s(settings)),
    )


def start_timeout_s(settings: HostSettings) -> float:
    """Longest start of a part. The engine's own limit is shorter, because its error says more."""
    return LifecycleSettings().start_timeout_s + ENGINES[settings.engine].start_timeout_s(settings.engine_settings)
