"""Drains the queue when room may have appeared, and sends the outcomes to the streams that asked.

Reports make room: the queue is drained in the next iteration of the event loop, so a burst of reports costs one drain. Room that appears
otherwise (a load record, a new worker, a reservation that ends) is found within `TICK_S`. Nothing is drained while no ask is queued. After
a drain that placed nothing, the dispatcher pauses. The pause grows with the number of subqueues that it tried, so reports that make no
usable room take only a part of the router's time.
"""

import asyncio
from collections.abc import Sequence

from kvmesh.clock import Clock
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.queue.admission import QueueOutcome
from services.router.serving.response_queue import AskResponse, QueuedNotice, ResponseQueue

TICK_S = 0.05
"""Longest time until room is found that no report announced."""
NOTICE_S = 0.5
"""Time between notices of queued asks. A frontend gives up on a router that sends nothing for 2 s."""
PAUSE_PER_SUBQUEUE_S = 0.0002
"""Several times what it takes to score all candidates for one ask."""


class QueueDispatcher:
    """A running part. Without `run` queued asks get no answer."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, clock: Clock) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._streams: dict[tuple[str, int], ResponseQueue] = {}
        """The stream of every queued ask."""
        self._wakeup = asyncio.Event()

    @property
    def has_queued(self) -> bool:
        """True while asks are queued, or left the queue and are not answered yet."""
        return bool(self._streams)

    def on_queued(
        self, frontend_id: str, ask_id: int, responses: ResponseQueue, *, may_have_room: bool = False
    ) -> None:
        """An ask was queued. Its answer goes to this stream, and not to an earlier one with the same ask."""
        # `run` waits for a wakeup while no ask is queued.
        if not self._streams or may_have_room:
            self.wake()
        self.on_not_queued(frontend_id, ask_id)
        self._streams[frontend_id, ask_id] = responses
        responses.add_queued(1)
        responses.put_nowait(QueuedNotice([ask_id]))

    def on_not_queued(self, frontend_id: str, ask_id: int) -> None:
        """Called when an ask was answered. If the ask was queued before, no further notices are sent for it."""
        before = self._streams.pop((frontend_id, ask_id), None)
        if before is not None:
            before.add_queued(-1)

    def wake(self) -> None:
        self._wakeup.set()

    def on_stream_ended(self, responses: ResponseQueue) -> None:
        if not responses.asks_queued:
            return
        now = self._clock.now()
        for (frontend_id, ask_id), stream in list(self._streams.items()):
            if stream is responses:
                self.on_not_queued(frontend_id, ask_id)
                self._core.withdraw(frontend_id, ask_id, now=now, has_caller=False)

    def drain(self) -> int:
        """Drains the queue once and sends the outcomes. Returns their number."""
        outcomes = self._core.drain_queue(now=self._clock.now(), wall=self._clock.wall())
        self._send(outcomes)
        return len(outcomes)

    def flush(self) -> None:
        """Sends the outcomes of asks that were displaced or withdrawn, without a drain."""
        self._send(self._core.admission.take_outcomes())

    def _send(self, outcomes: Sequence[QueueOutcome]) -> None:
        for outcome in outcomes:
            self._metrics.count_queue_outcome(outcome)
            responses = self._streams.pop((outcome.frontend_id, outcome.ask_id), None)
            if responses is not None:
                responses.put_nowait(AskResponse(outcome.ask_id, outcome.outcome))
                responses.add_queued(-1)

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def run(self) -> None:
        notice_at = 0.0
        while True:
            if not self._streams:
                await self._wakeup.wait()
            elif not self._core.admission.has_more:
                await self._wait_tick()
            # Before the drain: a report that arrives during the sleep below must end the next wait.
            self._wakeup.clear()
            answered = self.drain()
            if self._clock.now() >= notice_at:
                self._send_notices()
                notice_at = self._clock.now() + NOTICE_S
            await self._clock.sleep(0 if answered else PAUSE_PER_SUBQUEUE_S * len(self._core.queue.subqueues))

    async def aclose(self) -> None:
        """Part of the interface; the runner cancels `run`."""

    async def _wait_tick(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self._wakeup.wait()
        except TimeoutError:
            return

    def _send_notices(self) -> None:
        """Sends a sign of life to each stream with queued asks, except to those that do not take their responses."""
        queued: dict[ResponseQueue, list[int]] = {}
        for (_, ask_id), responses in self._streams.items():
            queued.setdefault(responses, []).append(ask_id)
        for responses, ask_ids in queued.items():
            if responses.is_empty:
                responses.put_nowait(QueuedNotice(ask_ids))
