"""Buffers reports, so that asks that arrive with them are answered first.

A request has one ask and three or more reports. A report has an immediate effect only if it frees capacity that an ask needs. So reports
are applied in the next iteration of the event loop, some at a time. They are applied immediately when asks are queued, before the router
refuses an ask, when a request failed, when a stream ends, and before `Explain`, `ListRequests` and `ListWorkers` answer.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from kvmesh.clock import Clock
from kvmesh.core import Report
from kvmesh.core.routing import FAILED, PROGRESS, SETTLING
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.serving.queue_dispatcher import QueueDispatcher

REPORTS_PER_ITERATION = 16
"""They take a few tenths of a millisecond: the longest time that reports delay an ask."""
REPORTS_MAX = 4096
"""If more are buffered, reports are applied before more messages are read."""


class ReportBuffer:
    """The reports of all streams, in order of arrival."""

    def __init__(self, *, core: RouterCore, metrics: RouterMetrics, clock: Clock, dispatcher: QueueDispatcher) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._dispatcher = dispatcher
        self._reports: deque[tuple[str, int, Report]] = deque()
        self._is_scheduled = False
        core.apply_buffered_reports = self.apply_all

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, frontend_id: str, reports: Sequence[tuple[int, Report]]) -> None:
        """Buffers reports, or applies all immediately if one is urgent. The caller must call `schedule` afterwards."""
        is_urgent = self._dispatcher.has_queued
        for ask_id, report in reports:
            self._reports.append((frontend_id, ask_id, report))
            is_urgent = is_urgent or report.kind is FAILED
        if is_urgent or len(self._reports) > REPORTS_MAX:
            self.apply_all()

    def schedule(self) -> None:
        """Applies the buffered reports after everything that is due in the event loop. To be called when responses are put."""
        if self._reports and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._apply_some)

    def apply_all(self) -> bool:
        """Applies all buffered reports. Returns False when there are none."""
        is_any = bool(self._reports)
        self._apply(len(self._reports))
        return is_any

    def _apply_some(self) -> None:
        self._is_scheduled = False
        try:
            self._apply(REPORTS_PER_ITERATION)
        finally:
            # Also after an exception: without it, the rest would wait for the next message.
            self.schedule()

    def _apply(self, reports_max: int) -> None:
        """Applies up to `reports_max` reports, and wakes the dispatcher when they may have made room."""
        now, makes_room = self._clock.now(), False
        for _ in range(min(reports_max, len(self._reports))):
            frontend_id, ask_id, report = self._reports.popleft()
            self._metrics.count_report(report.kind)
            reservation = self._core.report(frontend_id, ask_id, report, now=now)
            if reservation is not None:
                self._metrics.observe_prediction(reservation, report)
            elif report.kind in SETTLING and self._core.queue.requests:
                self._core.withdraw(frontend_id, ask_id, now=now)
                self._dispatcher.flush()
            makes_room = makes_room or report.kind is not PROGRESS
        if makes_room and self._dispatcher.has_queued:
            self._dispatcher.wake()
