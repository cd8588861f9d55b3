"""Where frontends ask and report, whichever way they come: over a stream, or from a frontend in the same process."""

import logging
from collections.abc import Sequence
from time import perf_counter

from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement
from kvmesh.errors import MeshError
from kvmesh.telemetry import Tracing
from services.router.core import RouterCore
from services.router.explain import ReportNote
from services.router.metrics import RouterMetrics
from services.router.queue.admission import Queued
from services.router.serving.queue_dispatcher import Dispatch, Replies, Reply
from services.router.serving.report_buffer import Inbox

log = logging.getLogger(__name__)


class Desk:
    """One core's. An ask that need not wait is answered before `ask` returns; `dispatch` answers the others."""

    def __init__(
        self, core: RouterCore, metrics: RouterMetrics, clock: Clock, tracing: Tracing, dispatch: Dispatch
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing
        self._dispatch = dispatch
        self._inbox = Inbox(core, metrics, clock, dispatch)
        self._streams: dict[str, int] = {}
        # A dict keeps the order of arrival, which a set would not: a simulated run must repeat exactly.

    def hello(self, frontend_id: str) -> None:
        """One more way in for a frontend."""
        self._streams[frontend_id] = self._streams.get(frontend_id, 0) + 1
        log.info("frontend_joined", extra={"data": {"frontend": frontend_id}})

    def bye(self, frontend_id: str) -> None:
        """One less; without any, its reservations end with their grace."""
        self._streams[frontend_id] -= 1
        if self._streams[frontend_id] == 0:
            del self._streams[frontend_id]
            self._core.stream_ended(frontend_id, now=self._clock.now())
        log.info("frontend_left", extra={"data": {"frontend": frontend_id}})

    def hung_up(self, outbox: Replies) -> None:
        """A way in is over: what was reported counts, and what was asked and waits is given up."""
        self.count_reports()
        self._dispatch.stream_ended(outbox)

    def report(self, frontend_id: str, reports: Sequence[tuple[int, ReportNote]]) -> None:
        """Takes in what becomes of placed requests, all or, when it raises, none; to be followed by `come_back`."""
        self._inbox.put(frontend_id, reports)

    def come_back(self) -> None:
        """Has the reports counted when what was asked with them is answered."""
        self._inbox.come_back()

    def count_reports(self) -> None:
        """Counts the reports that came, before anybody is told what the router knows."""
        self._inbox.count_all()

    def ask(self, frontend_id: str, ask_id: int, ask: Ask, outbox: Replies) -> None:
        """Places a request, refuses it, or has it wait; the answer comes out of `outbox`."""
        try:
            placement = self._placed(frontend_id, ask_id, ask)
            if self._dispatch.is_waiting:
                self._dispatch.flush()
        except MeshError as error:
            self.refuse(frontend_id, ask_id, ask.request_id, error, outbox)
            return
        if isinstance(placement, Queued):
            self._dispatch.queued(frontend_id, ask_id, outbox)
        else:
            self._reply(frontend_id, ask_id, placement, outbox)

    def refuse(self, frontend_id: str, ask_id: int, request_id: str, error: MeshError, outbox: Replies) -> None:
        """Answers an ask with what is wrong."""
        self._metrics.refused(error)
        error.request_id = error.request_id or request_id
        self._reply(frontend_id, ask_id, error, outbox)

    def _reply(self, frontend_id: str, ask_id: int, outcome: Placement | MeshError, outbox: Replies) -> None:
        if self._dispatch.is_waiting and self._core.queue.get(frontend_id, ask_id) is None:
            self._dispatch.not_queued(frontend_id, ask_id)
        outbox.put_nowait(Reply(ask_id, outcome))

    def _placed(self, frontend_id: str, ask_id: int, ask: Ask) -> Placement | Queued:
        started = perf_counter()
        now, wall = self._clock.now(), self._clock.wall()
        if ask.traceparent or self._tracing.is_on:
            with self._tracing.span("place", parent=ask.traceparent, attributes={"gen_ai.request.model": ask.model}):
                placement = self._core.ask(frontend_id, ask_id, ask, now=now, wall=wall)
        else:
            placement = self._core.ask(frontend_id, ask_id, ask, now=now, wall=wall)
        if isinstance(placement, Placement):
            self._metrics.placed(placement, ask.prompt_tokens, perf_counter() - started)
        return placement
