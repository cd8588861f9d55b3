"""gRPC health checks: one task per check calls grpc.health.v1 every interval and records the result."""

import asyncio
from collections.abc import Callable, Mapping

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvmesh.clock import Clock
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.records import CheckDefinition
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.base import Health
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import CertificateSource, mesh_channel_credentials, mesh_channel_options
from kvmesh.identity.roles import SERVER_NAME

_CHECK_METHOD = "/grpc.health.v1.Health/Check"
_log = event_logger(__name__)
_Check = grpc.aio.UnaryUnaryMultiCallable[Message, health_pb2.HealthCheckResponse]


class Probes:
    """The running checks. At most `probes_max` call their instance concurrently.

    `mesh`: certificates for checks over mesh TLS. `connect` replaces TCP channels by those of an in-memory network.
    """

    def __init__(
        self,
        live: LiveState,
        clock: Clock,
        *,
        probes_max: int,
        mesh: CertificateSource | None = None,
        connect: Callable[[CheckDefinition], grpc.aio.Channel] | None = None,
    ) -> None:
        self._live = live
        self._clock = clock
        self._mesh = mesh
        self._connect = connect or self._channel
        # By the whole definition, so that a changed check gets a new task.
        self._tasks: dict[CheckDefinition, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(probes_max)

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self) -> None:
        """Starts and stops checks as the catalog changes. Ends all of them when it is cancelled."""
        try:
            while not self._live.is_closing:
                self.follow()
                await self._live.wait_change()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()

    def follow(self) -> None:
        """Starts new checks and stops removed or replaced ones."""
        wanted = wanted_checks(self._live.state)
        for definition in [known for known in self._tasks if known not in wanted]:
            self._tasks.pop(definition).cancel()
        for definition in wanted:
            if definition not in self._tasks:
                task = asyncio.create_task(self._repeat(definition), name=f"probe {definition.check_id}")
                task.add_done_callback(_log_defect)
                self._tasks[definition] = task

    async def _repeat(self, definition: CheckDefinition) -> None:
        async with self._connect(definition) as channel:
            check = channel.unary_unary(
                _CHECK_METHOD,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            while True:
                async with self._slots:
                    status, output = await _ask(check, definition)
                self._record(definition.check_id, status, output)
                await self._clock.sleep(definition.interval_s)

    def _record(self, check_id: str, status: Health, output: str) -> None:
        self._live.change(lambda state, now: state.catalog.record(check_id, status, output, now=now))

    def _channel(self, definition: CheckDefinition) -> grpc.aio.Channel:
        # Each run makes a new connection, instead of waiting for gRPC's backoff of up to two minutes, and does not share the backoff of
        # other channels. gRPC uses the "minimum" as the time limit of one attempt to connect.
        pause_ms = max(20, int(min(definition.interval_s, 1.0) * 500))
        options: list[tuple[str, int | str]] = [
            ("grpc.initial_reconnect_backoff_ms", pause_ms),
            ("grpc.min_reconnect_backoff_ms", int(definition.timeout_s * 1000)),
            ("grpc.max_reconnect_backoff_ms", pause_ms),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if not definition.grpc_uses_tls:
            return grpc.aio.insecure_channel(definition.grpc_target, options=options)
        if self._mesh is None:
            return grpc.aio.secure_channel(definition.grpc_target, grpc.ssl_channel_credentials(), options=options)
        credentials = mesh_channel_credentials(self._mesh.current())
        return grpc.aio.secure_channel(
            definition.grpc_target, credentials, options=[*options, *mesh_channel_options(SERVER_NAME)]
        )


def wanted_checks(state: AgentState) -> Mapping[CheckDefinition, None]:
    """Returns the gRPC checks of the catalog, in order of registration."""
    services = state.catalog.services.values()
    return {c.definition: None for service in services for c in service.checks.values() if c.definition.grpc_target}


async def _ask(check: _Check, definition: CheckDefinition) -> tuple[Health, str]:
    request = health_pb2.HealthCheckRequest(service=definition.grpc_service)
    try:
        answer = await check(request, timeout=definition.timeout_s)
    except grpc.aio.AioRpcError as error:
        return Health.CRITICAL, f"{error.code().name}: {error.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return (
        Health.PASSING if is_serving else Health.CRITICAL,
        f"gRPC check {definition.grpc_target}: {name}",
    )


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        _log.critical("probe_ended_by_defect", exc_info=defect)
