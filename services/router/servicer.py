"""RouterService: translates between protobuf and the core, without decisions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import Server, ServicerContext

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1 import router_pb2_grpc
from kvmesh.checks import check_range
from kvmesh.clock import Clock
from kvmesh.core import WorkerView
from kvmesh.core.planning import Fence, PlacementBounds
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.network.names import peer_host
from kvmesh.rpc.codec.peers import from_peer_update, to_peer_update
from kvmesh.rpc.codec.recording import to_recorded
from kvmesh.rpc.codec.router import (
    fill_placement,
    from_ask,
    from_report,
    read_route_request,
    to_explanation,
    to_request_list,
    to_worker_view,
)
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.status import to_detail
from kvmesh.telemetry import TelemetrySettings, Tracing
from services.router.core import RouterCore
from services.router.explain import explain
from services.router.metrics import RouterMetrics
from services.router.replicas.peer_streams import PeerStreams
from services.router.requests import list_requests
from services.router.serving.queue_dispatcher import QueueDispatcher
from services.router.serving.recorder import RequestRecorder
from services.router.serving.response_queue import AskResponse, QueuedNotice, ResponseQueue
from services.router.serving.route_handler import RouteHandler
from services.router.workers.worker import RegisteredWorker

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
RESPONSES_PER_MESSAGE_MAX = 256
BOUNDED_MODELS_MAX = 256
"""Models with bounds. SetPlacementBounds could otherwise fill the memory."""
TTFT_S_MAX = 86_400.0
SALT_BYTES_MIN, SALT_BYTES_MAX = 16, 64
REQUESTS_LISTED_MAX, REQUESTS_LISTED_DEFAULT = 256, 64
"""In one answer of ListRequests."""
PAUSED_FRONTENDS_MAX = 64
"""In the view of a worker."""
RESPONSES_UNSENT_MAX = 256
"""Responses that a frontend has not taken. With more, the router stops reading from it, and gRPC's flow control holds it back."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One Route stream. The frontend is known after its hello."""

    responses: ResponseQueue = field(default_factory=lambda: ResponseQueue(responses_max=RESPONSES_UNSENT_MAX))
    frontend_id: str = ""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves one core. `dispatcher` is a part that must run while the server runs."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        tracing: Tracing | None = None,
        dispatcher: QueueDispatcher | None = None,
        peers: PeerStreams | None = None,
    ) -> None:
        self._core = core
        self._peers = peers
        self._is_stopping = False
        self.is_joining = False
        """True until this router knows the workers. The registry may still list the process that had its address before."""
        self._streams: dict[_Stream, None] = {}
        self._fence = Fence()
        self._recorder = RequestRecorder(core.history)
        self.dispatcher = dispatcher or QueueDispatcher(core, metrics, clock)
        tracing = tracing or Tracing(TelemetrySettings(), service="router")
        self.handler = RouteHandler(core, metrics, clock, tracing=tracing, dispatcher=self.dispatcher)

    # The generated base class expects a generator, which costs more than context.write.
    async def Route(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.RouteRequest],
        context: ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        if self._is_stopping:
            # A frontend that knows no other router reconnects immediately; its stream would delay the server's stop by the grace period.
            raise _stopping()
        if self.is_joining:
            raise UnavailableError(
                "the router does not know the workers yet; use another router", reason="router_joining"
            )
        # The frontend waits for it before it sends asks: the connection works, and this process reads from it.
        await context.send_initial_metadata(())
        stream = _Stream()
        self._streams[stream] = None
        reading = asyncio.create_task(
            self._read(request_iterator, stream, peer_host(context.peer())), name="route-read"
        )
        reading.add_done_callback(lambda _: stream.responses.close())
        try:
            while responses := await stream.responses.take(RESPONSES_PER_MESSAGE_MAX):
                await context.write(_to_message(responses))
            if not reading.done():
                raise _stopping()
            reading.result()
        finally:
            reading.cancel()
            del self._streams[stream]
            self.handler.end_responses(stream.responses)
            if stream.frontend_id:
                self.handler.remove_stream(stream.frontend_id)

    async def _read(self, requests: AsyncIterator[pb.RouteRequest], stream: _Stream, host: str) -> None:
        """Reads while asks are queued too, since reports make room for them."""
        try:
            async for message in requests:
                if stream.responses.is_ended:
                    return
                if stream.frontend_id:
                    self._on_message(stream.frontend_id, message, stream.responses)
                    if not stream.responses.has_room:
                        await stream.responses.wait_room()
                else:
                    stream.frontend_id = self._on_hello(message, host)
        except MeshError:
            # An invalid message ends the stream, also while its asks are queued.
            stream.responses.end()
            raise

    def add_to(self, server: Server) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)

    def end_streams(self) -> None:
        """Ends all Route streams and accepts no more. Frontends repeat unanswered asks at another router."""
        self._is_stopping = True
        self._recorder.close()
        for stream in self._streams:
            stream.responses.end()

    async def Explain(self, request: pb.ExplainRequest, context: ServicerContext[Any, Any]) -> pb.ExplainResponse:
        request_id = required_text(request.request_id, field="request_id", characters_max=128)
        self.handler.reports.apply_all()
        record = self._core.history.get(request_id)
        if record is None:
            raise NotFoundError(f"the router has no record of request {request_id!r}", reason="placement_not_found")
        return to_explanation(explain(record))

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListRequestsResponse:
        if request.requests_max > REQUESTS_LISTED_MAX:
            raise InvalidRequestError(f"requests_max must be at most {REQUESTS_LISTED_MAX}", field="requests_max")
        self.handler.reports.apply_all()
        return to_request_list(
            list_requests(
                self._core,
                model=request.model,
                in_flight_only=request.in_flight_only,
                requests_max=request.requests_max or REQUESTS_LISTED_DEFAULT,
            )
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListWorkersResponse:
        self.handler.reports.apply_all()
        workers = [worker for _, worker in sorted(self._core.fleet.workers.items())]
        views = [view for worker in workers for view in self._views(worker) if request.model in ("", view.model)]
        return pb.ListWorkersResponse(workers=[to_worker_view(view) for view in views])

    async def SetPlacementBounds(
        self, request: pb.SetPlacementBoundsRequest, context: ServicerContext[Any, Any]
    ) -> pb.SetPlacementBoundsResponse:
        model = required_text(request.model, field="model", characters_max=256)
        check_range(request.ttft_s, "ttft_s", low=0.0, high=TTFT_S_MAX)
        self._fence.check(request.fencing_token)
        bounds = self._core.placer.bounds
        if model not in bounds and len(bounds) >= BOUNDED_MODELS_MAX:
            raise OverloadedError(
                f"{BOUNDED_MODELS_MAX} models already have bounds", reason="bounds_full", retry_after_s=60.0
            )
        self._core.placer.set_bounds(
            model, PlacementBounds(deflect_tokens=request.deflect_tokens, ttft_s=request.ttft_s)
        )
        return pb.SetPlacementBoundsResponse()

    async def RecordRequests(
        self, request: pb.RecordRequestsRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RecordRequestsResponse]:
        if not SALT_BYTES_MIN <= len(request.salt) <= SALT_BYTES_MAX:
            raise InvalidRequestError(f"salt must have {SALT_BYTES_MIN} to {SALT_BYTES_MAX} bytes", field="salt")
        async with aclosing(self._recorder.watch(request.salt)) as batches:
            async for batch in batches:
                yield to_recorded(batch)
        raise _stopping()

    async def SyncPeers(
        self, request_iterator: AsyncIterator[pb.SyncPeersRequest], context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SyncPeersResponse]:
        if self._peers is None:
            raise UnsupportedError("this router does not exchange state with peers", reason="no_peers")
        updates = (from_peer_update(message.update) async for message in request_iterator)
        async with aclosing(self._peers.serve(updates)) as answers:
            async for update in answers:
                yield pb.SyncPeersResponse(update=to_peer_update(update))

    def _on_hello(self, message: pb.RouteRequest, host: str) -> str:
        if not message.HasField("hello") or message.reports or message.asks:
            raise InvalidRequestError("the first message must have a hello and nothing else", field="hello")
        frontend_id = required_text(message.hello.frontend_id, field="hello.frontend_id", characters_max=128)
        self.handler.add_stream(frontend_id, host=host)
        return frontend_id

    def _on_message(self, frontend_id: str, message: pb.RouteRequest, responses: ResponseQueue) -> None:
        reports, asks = read_route_request(message)
        if reports:
            # All reports are read before one is applied: an invalid one rejects the whole message.
            self.handler.reports.add(frontend_id, [(report.ask_id, from_report(report)) for report in reports])
        for ask in asks:
            self._on_ask(frontend_id, ask, responses)
        if reports:
            self.handler.reports.schedule()

    def _on_ask(self, frontend_id: str, message: pb.Ask, responses: ResponseQueue) -> None:
        try:
            ask = from_ask(message)
        except MeshError as error:
            self.handler.refuse(
                frontend_id=frontend_id,
                ask_id=message.ask_id,
                request_id=message.request_id,
                error=error,
                responses=responses,
            )
        else:
            self.handler.ask(frontend_id, message.ask_id, ask, responses=responses)

    def _views(self, worker: RegisteredWorker) -> list[WorkerView]:
        """Returns one view per rank; none of a worker that has not described itself."""
        description, feed = worker.description, worker.feed
        if description is None or feed is None:
            return []
        health = self._core.health.health_of(worker)
        paused_frontend_ids = self._core.health.paths.paused_frontends(worker.worker_id)[:PAUSED_FRONTENDS_MAX]
        excluded_by = worker.excluded_by or ("incompatible" if self._core.fleet.is_incompatible(worker) else "")
        return [
            WorkerView(
                worker=target.ref,
                role=worker.role,
                model=worker.model_name,
                trust=feed.trust.value,
                trust_reason=feed.reason or (health.overlap.fault or ""),
                load=target.load,
                index_blocks=feed.rank_blocks(target.rank),
                requests_in_flight=target.requests_in_flight,
                prompt_tokens_in_flight=target.prompt_tokens_in_flight,
                excluded_by=excluded_by,
                kv_compatibility_hash=description.kv_compatibility_hash,
                coefficients=target.coefficients.all(),
                breaker=health.breaker.state.value,
                blocks_by_tier=feed.blocks_by_tier(target.rank),
                paused_frontend_ids=paused_frontend_ids,
            )
            for target in worker.targets
        ]


def _stopping() -> UnavailableError:
    return UnavailableError("the router is stopping; use another router", reason="router_stopping")


def _to_message(responses: Sequence[AskResponse | QueuedNotice]) -> pb.RouteResponse:
    message = pb.RouteResponse()
    for response in responses:
        if isinstance(response, QueuedNotice):
            message.queued_ask_ids.extend(response.ask_ids)
        elif isinstance(response.outcome, MeshError):
            message.refusals.add(ask_id=response.ask_id, error=to_detail(response.outcome))
        else:
            fill_placement(message.placements.add(), response.ask_id, response.outcome)
    return message
