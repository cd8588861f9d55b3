"""RouterService: protobuf to the core and back, no decisions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1 import router_pb2_grpc
from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.rpc.codec.peers import from_sync, to_sync_response
from kvmesh.rpc.codec.router import (
    TAKES_BATCHES,
    Candidate,
    Coefficient,
    Explanation,
    Report,
    WorkerView,
    fill_placement,
    from_ask,
    report_as,
    said_in,
    to_explanation,
    to_worker_view,
)
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.status import to_detail
from kvmesh.telemetry import TelemetrySettings, Tracing
from services.router.core import RouterCore
from services.router.explain import Record, ReportNote, candidates_of, margin_of
from services.router.metrics import RouterMetrics
from services.router.replicas.peer_streams import Peers
from services.router.serving.queue_dispatcher import Dispatch, Notice, Replies, Reply
from services.router.serving.response_queue import Outbox
from services.router.serving.route_handler import Desk
from services.router.workers.fleet import Worker
from services.router.workers.target import Target

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
ANSWERS_MAX = 256
"""In a message."""
ANSWERS_AHEAD_MAX = 256
"""Answers that a frontend has not taken yet while more of it is read; beyond, gRPC holds it back."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One Route stream; the frontend is known once it has said hello."""

    outbox: Replies = field(default_factory=lambda: Outbox(messages_max=ANSWERS_AHEAD_MAX))
    frontend_id: str = ""
    answers_max: int = 1
    """In a message."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves one core. An ask that need not wait is answered in the order of the stream; `dispatch` answers the others."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        clock: Clock,
        tracing: Tracing | None = None,
        dispatch: Dispatch | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._core = core
        self._peers = peers
        self._is_stopping = False
        self._streams_open: dict[_Stream, None] = {}
        self.dispatch = dispatch or Dispatch(core, metrics, clock)
        """A running part; to be run beside the server."""
        tracing = tracing or Tracing(TelemetrySettings(), service="router")
        self.desk = Desk(core, metrics, clock, tracing, self.dispatch)

    # The generated base class knows generators only, which cost more.
    async def Route(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.RouteRequest],
        context: ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        """Asks and reports of one frontend."""
        if self._is_stopping:
            # A frontend that knows no other router comes back at once; its stream would hold the server up for its grace.
            raise UnavailableError("the router is stopping; ask another one", reason="router_stopping")
        await context.send_initial_metadata(
            ((TAKES_BATCHES, "1"),)
        )  # Tells the frontend that somebody hears, before anything is asked.
        stream = _Stream()
        self._streams_open[stream] = None
        reading = asyncio.create_task(self._read(request_iterator, stream), name="route-read")
        reading.add_done_callback(lambda _: stream.outbox.close())
        try:
            while said := await stream.outbox.take(stream.answers_max):
                await context.write(_response(said[0]) if len(said) == 1 else _responses(said))
            if not reading.done():
                raise UnavailableError("the router is stopping; ask another one", reason="router_stopping")
            reading.result()
        finally:
            reading.cancel()
            del self._streams_open[stream]
            self.desk.hung_up(stream.outbox)
            if stream.frontend_id:
                self.desk.bye(stream.frontend_id)

    async def _read(self, requests: AsyncIterator[pb.RouteRequest], stream: "_Stream") -> None:
        """Hears a frontend out. While asks wait this goes on, since it is reports that make room."""
        try:
            async for message in requests:
                if stream.outbox.is_ended:
                    return
                if stream.frontend_id:
                    self._on_message(stream.frontend_id, message, stream.outbox)
                    if not stream.outbox.has_room:
                        await stream.outbox.wait_room()
                else:
                    stream.frontend_id = self._hello(message)
                    stream.answers_max = ANSWERS_MAX if message.hello.takes_batches else 1
        except MeshError:
            # Something wrong was said; that ends the stream, whoever waits on it.
            stream.outbox.end()
            raise

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that is not started yet."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    def end_streams(self) -> None:
        """Ends all Route streams and takes no more, so that frontends turn to another router, where they ask again what was not answered."""
        self._is_stopping = True
        for stream in self._streams_open:
            stream.outbox.end()

    async def Explain(self, request: pb.ExplainRequest, context: ServicerContext[Any, Any]) -> pb.ExplainResponse:
        """Why a request was placed where it was."""
        request_id = required_text(request.request_id, "request_id", 128)
        self.desk.count_reports()
        record = self._core.history.get(request_id)
        if record is None:
            raise NotFoundError(f"no placement of request {request_id!r} is remembered", reason="placement_not_found")
        return to_explanation(explanation(record))

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListWorkersResponse:
        """Workers as the router sees them."""
        self.desk.count_reports()
        workers = [worker for _, worker in sorted(self._core.fleet.workers.items())]
        views = [view for worker in workers for view in self._views(worker) if request.model in ("", view.model)]
        return pb.ListWorkersResponse(
            workers=[to_worker_view(view) for view in views], index_blocks=len(self._core.index.device)
        )

    async def SyncPeers(
        self, request_iterator: AsyncIterator[pb.SyncPeersRequest], context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SyncPeersResponse]:
        """In-flight state between routers."""
        if self._peers is None:
            raise UnsupportedError("this router does not exchange state with peers", reason="no_peers")
        said = (from_sync(message) async for message in request_iterator)
        async with aclosing(self._peers.serve(said)) as answers:
            async for news in answers:
                yield to_sync_response(news)

    def _hello(self, message: pb.RouteRequest) -> str:
        if message.WhichOneof("kind") != "hello":
            raise InvalidRequestError("the first message must be a hello", field="hello")
        frontend_id = required_text(message.hello.frontend_id, "hello.frontend_id", 128)
        self.desk.hello(frontend_id)
        return frontend_id

    def _on_message(self, frontend_id: str, message: pb.RouteRequest, outbox: Replies) -> None:
        reports, asks = said_in(message)
        if reports:
            # All of a bundle or, when one of it is wrong, none.
            self.desk.report(frontend_id, [(report.ask_id, report_as(ReportNote, report)) for report in reports])
        for ask in asks:
            self._on_ask(frontend_id, ask.ask_id, ask, outbox)
        if reports:
            self.desk.come_back()

    def _on_ask(self, frontend_id: str, ask_id: int, message: pb.Ask, outbox: Replies) -> None:
        try:
            ask = from_ask(message)
        except MeshError as error:
            self.desk.refuse(frontend_id, ask_id, message.request_id, error, outbox)
        else:
            self.desk.ask(frontend_id, ask_id, ask, outbox)

    def _views(self, worker: Worker) -> list[WorkerView]:
        """One view per rank; a worker that has not described itself yet is not listed."""
        description, feed = worker.description, worker.feed
        if description is None or feed is None:
            return []
        health = self._core.health.of(worker)
        excluded_by = worker.excluded_by or ("incompatible" if self._core.fleet.incompatible(worker) else "")
        return [
            WorkerView(
                worker=target.ref,
                role=worker.role,
                model=description.model.name,
                trust=feed.trust.value,
                trust_reason=feed.reason or (health.overlap.fault or ""),
                load=target.load,
                index_blocks=feed.rank_blocks(target.rank),
                requests_in_flight=target.requests_in_flight,
                prompt_tokens_in_flight=target.prompt_tokens_in_flight,
                excluded_by=excluded_by,
                kv_compatibility_hash=description.kv_compatibility_hash,
                coefficients=_coefficients(target),
                breaker=health.breaker.state.value,
                blocks_by_tier=feed.blocks_by_tier(target.rank),
            )
            for target in worker.targets
        ]


def _response(said: Reply | Notice) -> pb.RouteResponse:
    response = pb.RouteResponse()
    if isinstance(said, Notice):
        response.queued.ask_ids.extend(said.ask_ids)
    elif isinstance(said.outcome, MeshError):
        _fill_refusal(response.refusal, said.ask_id, said.outcome)
    else:
        fill_placement(response.placement, said.ask_id, said.outcome)
    return response


def _responses(messages: Sequence[Reply | Notice]) -> pb.RouteResponse:
    response = pb.RouteResponse()
    answers = response.answers
    for said in messages:
        if isinstance(said, Notice):
            answers.queued_ask_ids.extend(said.ask_ids)
        elif isinstance(said.outcome, MeshError):
            _fill_refusal(answers.refusals.add(), said.ask_id, said.outcome)
        else:
            fill_placement(answers.placements.add(), said.ask_id, said.outcome)
    return response


def _fill_refusal(message: pb.Refusal, ask_id: int, error: MeshError) -> None:
    message.ask_id = ask_id
    message.error.CopyFrom(to_detail(error))


def explanation(record: Record) -> Explanation:
    """A remembered decision as it is told."""
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
            for candidate in candidates_of(record)
        ],
        placement=record.placement,
        error=record.error,
        ask_id=record.ask_id,
        reports=[_report(note) for note in record.reports],
        margin=margin_of(record.choice) if record.choice is not None else None,
        observed_ttft_s=record.observed_ttft_s,
        queued_s=record.queued_s,
        cost_unit=record.cost_unit,
    )


def _coefficients(target: Target) -> list[Coefficient]:
    """Those of its cost."""
    return [
        Coefficient(name=of.name, value=of.value, source=of.source.value, observations=of.observations)
        for of in target.coefficients.told()
    ]


def _report(note: ReportNote) -> Report:
    return Report(
        kind=note.kind,
        elapsed_s=note.elapsed_s,
        cached_tokens=note.cached_tokens,
        output_tokens=note.output_tokens,
        error=note.error,
        failed_worker_id=note.failed_worker_id,
        is_answered_by_prefill=note.is_answered_by_prefill,
    )
