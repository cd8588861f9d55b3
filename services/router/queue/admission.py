"""Who waits for room and who is answered when there is some. Pure; times are arguments.

Room is offered lane by lane, always to the head of the highest class of all lanes that are not known to be blocked. A head that
finds no room blocks its own lane until room is offered again, and nobody else. One turn places at most `PLACED_PER_TURN_MAX`
and tries each lane in vain at most once, so its work is bounded however many wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from kvmesh.core import Ask, Placement
from kvmesh.errors import CancelledByCallerError, DeadlineError, MeshError, OverloadedError
from services.router.queue.ask_queue import AskQueue
from services.router.queue.subqueues import QueueLimits, Waiting

PLACED_PER_TURN_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An ask waits; its answer comes from `drain`. `expected_wait_s` None: nobody knows."""

    expected_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of an ask that waited."""

    frontend_id: str
    ask_id: int
    ask: Ask
    outcome: Placement | MeshError
    waited_s: float


class Admission:
    """The queue, and the answers that nobody has fetched yet."""

    def __init__(self, limits: QueueLimits) -> None:
        self.queue = AskQueue(limits)
        self.has_more = False
        self._answers: list[Answer] = []

    def wait(self, waiting: Waiting, now: float) -> Queued:
        """Lets an ask wait. Raises OverloadedError when it cannot; others may have to go for it."""
        expected_wait_s, gone = self.queue.enter(waiting, now)
        for displaced in gone:
            retry_after_s = self.queue.retry_after_s(self.queue.expected_wait_s(displaced, now))
            self._refuse(
                displaced,
                OverloadedError(
                    "the queue is full and others go first", reason="queue_displaced", retry_after_s=retry_after_s
                ),
                now,
            )
        return Queued(expected_wait_s=expected_wait_s)

    def take_answers(self) -> list[Answer]:
        """Answers that are known and that nobody has fetched."""
        answers, self._answers = self._answers, []
        return answers

    def withdraw(self, waiting: Waiting, now: float) -> None:
        """Its frontend takes it back."""
        self.queue.remove(waiting, now)
        self._refuse(waiting, CancelledByCallerError("the request was withdrawn while it waited"), now)

    def forget(self, waiting: Waiting, now: float) -> None:
        """Nobody is there any more who could be answered."""
        self.queue.remove(waiting, now)

    def drain(self, place: Callable[[Waiting], tuple[Placement, int]], now: float) -> list[Answer]:
        """Offers the room there is, and gives all answers since the last time.

        `place` gives the placement and what it costs in tokens, or raises: OverloadedError when there is no room now.
        """
        for waiting in self.queue.expire(now):
            self._refuse(waiting, self._expired(waiting, now), now)
        if self.queue.requests:
            self._offer(place, now)
        return self.take_answers()

    def _offer(self, place: Callable[[Waiting], tuple[Placement, int]], now: float) -> None:
        heads = [_ranked(lane.head()) for lane in self.queue.lanes]
        heapify(heads)
        tried = 0
        while heads and tried < PLACED_PER_TURN_MAX:
            waiting = heads[0][2]
            lane = waiting.lane
            assert lane is not None
            try:
                placement, tokens = place(waiting)
            except OverloadedError:
                heappop(heads)
                continue
            except MeshError as error:
                self.queue.remove(waiting, now)
                self._refuse(waiting, error, now)
            else:
                self.queue.serve(waiting, now, charged_tokens=tokens)
                self._answer(waiting, placement, now)
            tried += 1
            if lane.classes:
                heapreplace(heads, _ranked(lane.head()))
            else:
                heappop(heads)
        self.has_more = bool(heads)

    def _expired(self, waiting: Waiting, now: float) -> MeshError:
        timeout_s = waiting.ask.timeout_s
        if timeout_s is not None and now - waiting.arrived_s >= timeout_s:
            return DeadlineError("the request's time was over before a worker had room")
        retry_after_s = self.queue.retry_after_s(self.queue.expected_wait_s(waiting, now))
        return OverloadedError(
            f"no worker had room for {now - waiting.arrived_s:.3g} s",
            reason="queue_wait_over",
            retry_after_s=retry_after_s,
        )

    def _refuse(self, waiting: Waiting, error: MeshError, now: float) -> None:
        error.request_id = waiting.ask.request_id
        waiting.record.error = error
        self._answer(waiting, error, now)

    def _answer(self, waiting: Waiting, outcome: Placement | MeshError, now: float) -> None:
        self._answers.append(
            Answer(
                frontend_id=waiting.frontend_id,
                ask_id=waiting.ask_id,
                ask=waiting.ask,
                outcome=outcome,
                waited_s=now - waiting.arrived_s,
            )
        )


def _ranked(waiting: Waiting) -> tuple[int, int, Waiting]:
    """Highest class first; among lanes, the head that came first."""
    return -waiting.ask.priority, waiting.order[1], waiting
