"""Brings the queue's answers to the streams that asked, and keeps the queue's time.

Reports make room: after each of them the queue is drained in the next turn of the loop, so a burst of reports costs one drain. Room
that comes otherwise (a load record, a worker that joins, a reservation that ends) is found within `tick_s`. Both only while
somebody waits. A drain in vain is followed by a pause, longer the more lanes it tried: reports that make no room that anybody
could use take no more than a part of the router's time.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.clock import Clock
from kvmesh.core import Placement
from kvmesh.errors import MeshError
from services.router.core import RouterCore
from services.router.metrics import RouterMetrics
from services.router.queue.admission import Answer
from services.router.serving.response_queue import Outbox


class Reply(NamedTuple):
    """The answer to an ask."""

    ask_id: int
    outcome: Placement | MeshError


class Notice(NamedTuple):
    """Asks that wait."""

    ask_ids: Sequence[int]


PAUSE_PER_LANE_S = 0.0002
"""Several times what it takes to weigh all candidates for one ask."""

Replies = Outbox[Reply | Notice]


class Dispatch:
    """A running part. Without `run` nobody who waits is answered."""

    def __init__(
        self, core: RouterCore, metrics: RouterMetrics, clock: Clock, *, tick_s: float = 0.05, notice_s: float = 0.5
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._tick_s = tick_s
        self._notice_s = notice_s
        self._homes: dict[tuple[str, int], Replies] = {}
        self._wakeup = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """True while anybody waits, or is to be told that he does not any more."""
        return bool(self._homes)

    def queued(self, frontend_id: str, ask_id: int, outbox: Replies) -> None:
        """An ask waits; its answer goes to this stream, and not to the one that asked it before."""
        if not self._homes:
            self.wake()
        self.not_queued(frontend_id, ask_id)
        self._homes[frontend_id, ask_id] = outbox
        outbox.expect(1)
        outbox.put_nowait(Notice([ask_id]))

    def not_queued(self, frontend_id: str, ask_id: int) -> None:
        """An ask that may have waited before is answered already."""
        before = self._homes.pop((frontend_id, ask_id), None)
        if before is not None:
            before.expect(-1)

    def wake(self) -> None:
        """There may be room, or somebody to answer."""
        self._wakeup.set()

    def stream_ended(self, outbox: Replies) -> None:
        """What the stream asked is given up at once."""
        if not outbox.awaited:
            return
        now = self._clock.now()
        for (frontend_id, ask_id), home in list(self._homes.items()):
            if home is outbox:
                self.not_queued(frontend_id, ask_id)
                self._core.withdraw(frontend_id, ask_id, now=now, is_answerable=False)

    def deliver(self) -> int:
        """Drains the queue once and says what came of it; gives how many that were."""
        answers = self._core.drain_queue(now=self._clock.now(), wall=self._clock.wall())
        self._say(answers)
        return len(answers)

    def flush(self) -> None:
        """Says what is known without a drain: who was displaced or withdrawn."""
        self._say(self._core.take_answers())

    def _say(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._metrics.waited(answer)
            outbox = self._homes.pop((answer.frontend_id, answer.ask_id), None)
            if outbox is not None:
                outbox.put_nowait(Reply(answer.ask_id, answer.outcome))
                outbox.expect(-1)

    async def start(self) -> None:
        """Nothing to begin."""

    async def run(self) -> None:
        """Goes on until cancelled."""
        notice_at = 0.0
        while True:
            if not self._homes:
                await self._wakeup.wait()
            elif not self._core.is_drain_unfinished:
                await self._tick()
            self._wakeup.clear()
            answered = self.deliver()
            if self._clock.now() >= notice_at:
                self._notify()
                notice_at = self._clock.now() + self._notice_s
            await self._clock.sleep(0 if answered else PAUSE_PER_LANE_S * len(self._core.queue.lanes))

    async def aclose(self) -> None:
        """Nothing to free; the runner cancels `run`."""

    async def _tick(self) -> None:
        try:
            async with asyncio.timeout(self._tick_s):
                await self._wakeup.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        """A sign of life for each stream that waits. One that is not read gets no more of them."""
        waiting: dict[Replies, list[int]] = {}
        for (_, ask_id), outbox in self._homes.items():
            waiting.setdefault(outbox, []).append(ask_id)
        for outbox, ask_ids in waiting.items():
            if outbox.is_idle:
                outbox.put_nowait(Notice(ask_ids))
