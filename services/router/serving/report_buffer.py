"""Reports that came and are not counted yet: who asks is answered first.

A request has one ask and three or more reports. Nobody waits for what a report changes, unless there is no room without it, so
reports are counted in the next turn of the loop, when what was asked with them is answered, and some at a time. They are counted
at once where it matters: when asks wait or are about to, when a worker failed, when a stream ends, and before anybody is told
what the router knows.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from kvmesh.clock import Clock
from kvmesh.core.routing import FAILED, PROGRESS, SETTLING
from services.router.core import RouterCore
from services.router.explain import ReportNote
from services.router.metrics import RouterMetrics
from services.router.serving.queue_dispatcher import Dispatch

REPORTS_PER_TURN = 16
"""Takes a few tenths of a millisecond, for which an ask waits at most."""
REPORTS_MAX = 4096
"""Beyond, they are counted before more is read."""


class Inbox:
    """Of all streams, in the order in which the reports came."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, clock: Clock, dispatch: Dispatch) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._dispatch = dispatch
        self._reports: deque[tuple[str, int, ReportNote]] = deque()
        self._is_due = False
        core.hear_reports = self.count_all

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, frontend_id: str, reports: Sequence[tuple[int, ReportNote]]) -> None:
        """Takes in what a frontend reports; to be followed by `come_back`."""
        is_urgent = self._dispatch.is_waiting
        for ask_id, report in reports:
            self._reports.append((frontend_id, ask_id, report))
            is_urgent = is_urgent or report.kind is FAILED
        if is_urgent or len(self._reports) > REPORTS_MAX:
            self.count_all()

    def come_back(self) -> None:
        """Has counted what is left, behind all that is due in the loop already: to be called when answers are on their way."""
        if self._reports and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def count_all(self) -> bool:
        """Counts what is there. False: there was nothing."""
        is_any = bool(self._reports)
        self._count(len(self._reports))
        return is_any

    def _turn(self) -> None:
        self._is_due = False
        try:
            self._count(REPORTS_PER_TURN)
        finally:
            self.come_back()

    def _count(self, most: int) -> None:
        """Counts up to `most`, and sees to those who wait for the room that they make."""
        reports, now, makes_room = self._reports, self._clock.now(), False
        for _ in range(min(most, len(reports))):
            frontend_id, ask_id, report = reports.popleft()
            self._metrics.reported(report.kind)
            reservation = self._core.report(frontend_id, ask_id, report, now=now)
            if reservation is not None:
                self._metrics.observed(reservation, report.kind, report.elapsed_s)
            elif report.kind in SETTLING and self._core.queue.requests:
                self._core.withdraw(frontend_id, ask_id, now=now)
                self._dispatch.flush()
            makes_room = makes_room or report.kind is not PROGRESS
        if makes_room and self._dispatch.is_waiting:
            self._dispatch.wake()
