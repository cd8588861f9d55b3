"""Handles asks and reports of frontends: those of Route streams, and those of a frontend in the same process."""

from time import perf_counter

from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement
from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.telemetry import Tracing
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.queue.admission import Queued
from services.router.serving.queue_dispatcher import QueueDispatcher
from services.router.serving.report_buffer import ReportBuffer
from services.router.serving.response_queue import AskResponse, ResponseQueue

_log = event_logger(__name__)


class RouteHandler:
    """Answers an ask before `ask` returns, unless the ask is queued: then the dispatcher answers it."""

    def __init__(
        self, core: RouterCore, metrics: RouterMetrics, clock: Clock, *, tracing: Tracing, dispatcher: QueueDispatcher
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing
        self._dispatcher = dispatcher
        self.reports = ReportBuffer(core=core, metrics=metrics, clock=clock, dispatcher=dispatcher)
        self._streams: dict[str, int] = {}
        """Streams by frontend."""

    def add_stream(self, frontend_id: str, host: str = "") -> None:
        """A frontend opened a stream. `host` is the address that it comes from."""
        self._streams[frontend_id] = self._streams.get(frontend_id, 0) + 1
        self._core.on_stream_started(frontend_id, host=host)
        _log.info("frontend_joined", frontend_id=frontend_id)

    def remove_stream(self, frontend_id: str) -> None:
        """A stream ended. After the frontend's last one its reservations end within the grace."""
        self._streams[frontend_id] -= 1
        if self._streams[frontend_id] == 0:
            del self._streams[frontend_id]
            self._core.on_stream_ended(frontend_id, now=self._clock.now())
        _log.info("frontend_left", frontend_id=frontend_id)

    def end_responses(self, responses: ResponseQueue) -> None:
        """No more responses are written: applies the reports that came, and removes the stream's asks from the queue."""
        self.reports.apply_all()
        self._dispatcher.on_stream_ended(responses)

    def ask(self, frontend_id: str, ask_id: int, ask: Ask, *, responses: ResponseQueue) -> None:
        """Places, queues or refuses a request; the answer is put into `responses`."""
        try:
            placement = self._place(frontend_id, ask_id, ask)
            # The ask may have displaced others, whose refusals must not wait for the next drain.
            if self._dispatcher.has_queued:
                self._dispatcher.flush()
        except MeshError as error:
            self.refuse(
                frontend_id=frontend_id, ask_id=ask_id, request_id=ask.request_id, error=error, responses=responses
            )
            return
        if isinstance(placement, Queued):
            self._dispatcher.on_queued(frontend_id, ask_id, responses, may_have_room=placement.may_have_room)
        else:
            self._respond(frontend_id, ask_id, placement, responses=responses)

    def refuse(
        self, *, frontend_id: str, ask_id: int, request_id: str, error: MeshError, responses: ResponseQueue
    ) -> None:
        self._metrics.count_refusal(error)
        error.request_id = error.request_id or request_id
        self._respond(frontend_id, ask_id, error, responses=responses)

    def _respond(
        self, frontend_id: str, ask_id: int, outcome: Placement | MeshError, *, responses: ResponseQueue
    ) -> None:
        # The ask may have replaced a queued one with the same number. If that one is still queued, this response refuses the newer ask only.
        if self._dispatcher.has_queued and self._core.queue.get(frontend_id, ask_id) is None:
            self._dispatcher.on_not_queued(frontend_id, ask_id)
        responses.put_nowait(AskResponse(ask_id, outcome))

    def _place(self, frontend_id: str, ask_id: int, ask: Ask) -> Placement | Queued:
        started = perf_counter()
        now, wall = self._clock.now(), self._clock.wall()
        if ask.traceparent or self._tracing.is_on:
            with self._tracing.span("place", parent=ask.traceparent, attributes={"gen_ai.request.model": ask.model}):
                placement = self._core.ask(frontend_id, ask_id, ask, now=now, wall=wall)
        else:
            placement = self._core.ask(frontend_id, ask_id, ask, now=now, wall=wall)
        if isinstance(placement, Placement):
            self._metrics.count_placement(placement, ask.prompt_tokens)
            self._metrics.decision_seconds.observe(perf_counter() - started)
        return placement
