"""RouterService: protobuf to the core and back, no decisions."""

import logging
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1 import router_pb2_grpc
from kvmesh.clock import Clock
from kvmesh.core import Placement
from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.rpc.codec.router import (
    Candidate,
    Explanation,
    Report,
    WorkerView,
    check_ask_id,
    from_ask,
    from_report,
    to_explanation,
    to_placement,
    to_worker_view,
)
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.status import to_detail
from kvmesh.telemetry import TelemetrySettings, Tracing
from services.router.core import RouterCore
from services.router.explain import Record, ReportNote, weighed_candidates
from services.router.fleet import Worker
from services.router.inbox import Inbox
from services.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
MESSAGES_AHEAD_MAX = 256
"""Messages of one frontend that are read before the one in hand is answered; beyond, gRPC holds them back."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves one core. A decision is synchronous, so a stream's answers come in the order of its asks."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, clock: Clock, tracing: Tracing | None = None) -> None:
        self._core = core
        self._tracing = tracing or Tracing(TelemetrySettings(), service="router")
        self._metrics = metrics
        self._clock = clock
        self._streams: dict[str, int] = {}
        # A dict keeps the order of arrival, which a set would not: a simulated run must repeat exactly.
        self._inboxes: dict[Inbox[pb.RouteRequest], None] = {}

    async def Route(
        self, request_iterator: AsyncIterator[pb.RouteRequest], context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RouteResponse]:
        """Asks and reports of one frontend."""
        frontend_id = ""
        inbox = Inbox(request_iterator, messages_max=MESSAGES_AHEAD_MAX)
        self._inboxes[inbox] = None
        try:
            async for message in inbox.messages():
                if not frontend_id:
                    frontend_id = self._hello(message)
                elif (response := self._on_message(frontend_id, message)) is not None:
                    yield response
            if inbox.is_ended:
                raise UnavailableError("the router is stopping; ask another one", reason="router_stopping")
        finally:
            inbox.close()
            del self._inboxes[inbox]
            if frontend_id:
                self._bye(frontend_id)

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that is not started yet."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    def end_streams(self) -> None:
        """Ends all Route streams, so that frontends turn to another router, where they ask again what was not answered."""
        for inbox in self._inboxes:
            inbox.end()

    async def Explain(self, request: pb.ExplainRequest, context: ServicerContext[Any, Any]) -> pb.ExplainResponse:
        """Why a request was placed where it was."""
        request_id = required_text(request.request_id, "request_id", 128)
        record = self._core.history.get(request_id)
        if record is None:
            raise NotFoundError(f"no placement of request {request_id!r} is remembered", reason="placement_not_found")
        return to_explanation(explanation(record))

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListWorkersResponse:
        """Workers as the router sees them."""
        workers = [worker for _, worker in sorted(self._core.fleet.workers.items())]
        views = [view for worker in workers for view in self._views(worker) if request.model in ("", view.model)]
        return pb.ListWorkersResponse(
            workers=[to_worker_view(view) for view in views], index_blocks=len(self._core.index.device)
        )

    async def SyncPeers(  # type: ignore[override]  # A coroutine is a handler too; the generated type knows generators only.
        self, request_iterator: AsyncIterator[pb.SyncPeersRequest], context: ServicerContext[Any, Any]
    ) -> None:
        """Refused before anything is read: routers keep their in-flight state to themselves so far."""
        raise UnsupportedError("this router does not exchange state with peers", reason="no_peers")

    def _hello(self, message: pb.RouteRequest) -> str:
        if message.WhichOneof("kind") != "hello":
            raise InvalidRequestError("the first message must be a hello", field="hello")
        frontend_id = required_text(message.hello.frontend_id, "hello.frontend_id", 128)
        self._streams[frontend_id] = self._streams.get(frontend_id, 0) + 1
        log.info("frontend_joined", extra={"data": {"frontend": frontend_id}})
        return frontend_id

    def _bye(self, frontend_id: str) -> None:
        self._streams[frontend_id] -= 1
        if self._streams[frontend_id] == 0:
            del self._streams[frontend_id]
            self._core.stream_ended(frontend_id, now=self._clock.now())
        log.info("frontend_left", extra={"data": {"frontend": frontend_id}})

    def _on_message(self, frontend_id: str, message: pb.RouteRequest) -> pb.RouteResponse | None:
        ask_id = check_ask_id(message)
        if message.WhichOneof("kind") == "ask":
            try:
                placement = self._placed(frontend_id, ask_id, message.ask)
            except MeshError as error:
                self._metrics.refused(error)
                error.request_id = error.request_id or message.ask.request_id
                return pb.RouteResponse(refusal=pb.Refusal(ask_id=ask_id, error=to_detail(error)))
            return pb.RouteResponse(placement=to_placement(ask_id, placement))
        report = from_report(message.report)
        self._metrics.reported(report.kind.value)
        self._core.report(frontend_id, ask_id, _note(report))
        return None

    def _placed(self, frontend_id: str, ask_id: int, message: pb.Ask) -> Placement:
        started = perf_counter()
        ask = from_ask(message)
        with self._tracing.span("place", parent=ask.traceparent, attributes={"gen_ai.request.model": ask.model}):
            placement = self._core.ask(frontend_id, ask_id, ask, now=self._clock.now(), wall=self._clock.wall())
        self._metrics.placed(placement, ask.prompt_tokens, perf_counter() - started)
        return placement

    def _views(self, worker: Worker) -> list[WorkerView]:
        """One view per rank; a worker that has not described itself yet is not listed."""
        description, feed = worker.description, worker.feed
        if description is None or feed is None:
            return []
        excluded_by = worker.excluded_by or ("incompatible" if self._core.fleet.incompatible(worker) else "")
        return [
            WorkerView(
                worker=target.ref,
                role=worker.role,
                model=description.model.name,
                trust=feed.trust.value,
                trust_reason=feed.reason,
                load=target.load,
                index_blocks=feed.rank_blocks(target.rank),
                requests_in_flight=target.requests_in_flight,
                prompt_tokens_in_flight=target.prompt_tokens_in_flight,
                excluded_by=excluded_by,
                kv_compatibility_hash=description.kv_compatibility_hash,
            )
            for target in worker.targets
        ]


def explanation(record: Record) -> Explanation:
    """A remembered decision as it is told."""
    candidates = weighed_candidates(record.choice) if record.choice is not None else []
    return Explanation(
        request_id=record.request_id,
        policy=record.policy,
        decided_at_s=record.decided_at_s,
        candidates=[
            Candidate(
                prefill=candidate.prefill.ref if candidate.prefill is not None else None,
                decode=candidate.decode.ref if candidate.decode is not None else None,
                cost=candidate.cost,
                terms=candidate.terms,
                removed_by=candidate.removed_by,
            )
            for candidate in candidates
        ],
        placement=record.placement,
        error=record.error,
        ask_id=record.ask_id,
        reports=[_report(note) for note in record.reports],
    )


def _note(report: Report) -> ReportNote:
    return ReportNote(
        kind=report.kind,
        elapsed_s=report.elapsed_s,
        cached_tokens=report.cached_tokens,
        output_tokens=report.output_tokens,
        error=report.error,
        failed_worker_id=report.failed_worker_id,
    )


def _report(note: ReportNote) -> Report:
    return Report(
        kind=note.kind,
        elapsed_s=note.elapsed_s,
        cached_tokens=note.cached_tokens,
        output_tokens=note.output_tokens,
        error=note.error,
        failed_worker_id=note.failed_worker_id,
    )
