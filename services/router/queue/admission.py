"""The queue and the outcomes of queued asks. Pure; times are arguments.

A drain tries the first ask (the head) of one subqueue after another. It takes the subqueue with the highest priority that is not blocked;
among those of one model and priority, the one whose head belongs to the tenant that was served least. Models take turns. A head that
cannot be placed blocks its own subqueue until the next `drain`, and no other. A drain places at most `PLACEMENTS_PER_DRAIN_MAX` asks and
fails at most once per subqueue, so its work is bounded however many asks wait.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from kvmesh.core import Ask, Placement
from kvmesh.errors import CancelledByCallerError, DeadlineError, MeshError, OverloadedError
from services.router.core_settings import CoreSettings
from services.router.queue.ask_queue import AskQueue
from services.router.queue.subqueues import QueuedAsk, Subqueue

PLACEMENTS_PER_DRAIN_MAX = 64
"""About 10 ms of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """An ask is queued; `drain` returns its outcome. `expected_wait_s` None: not known."""

    expected_wait_s: float | None
    may_have_room: bool = False
    """True: no worker was tried, because asks of other kinds go first. The next drain may place it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOutcome:
    """What became of a queued ask."""

    frontend_id: str
    ask_id: int
    ask: Ask
    outcome: Placement | MeshError
    queued_s: float


class Admission:
    """The queue, and the outcomes of asks that another ask displaced, that were withdrawn, or that a drain ended."""

    def __init__(self, settings: CoreSettings) -> None:
        self.queue = AskQueue(settings)
        self.has_more = False
        """True when the newest drain stopped at its limit."""
        self._outcomes: list[QueueOutcome] = []

    def enqueue(self, queued: QueuedAsk, now: float, *, may_have_room: bool = False, is_late: bool = False) -> Queued:
        """Queues an ask; it may displace others. Raises OverloadedError when the queue is full."""
        expected_wait_s, displaced = self.queue.add(queued, now, is_late=is_late)
        for each in displaced:
            retry_after_s = self.queue.retry_after_s(self.queue.expected_wait_s(each, now))
            error = OverloadedError(
                "the queue is full, and other requests go first", reason="queue_displaced", retry_after_s=retry_after_s
            )
            self._refuse(each, error, now)
        return Queued(expected_wait_s=expected_wait_s, may_have_room=may_have_room)

    def take_outcomes(self) -> list[QueueOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def withdraw(self, queued: QueuedAsk, now: float) -> None:
        self.queue.remove(queued, now)
        self._refuse(queued, CancelledByCallerError("the request was withdrawn while it was queued"), now)

    def forget(self, queued: QueuedAsk, now: float) -> None:
        """Removes an ask without an outcome, because no caller would receive it."""
        self.queue.remove(queued, now)

    def drain(self, place: Callable[[QueuedAsk], tuple[Placement, float]], now: float) -> list[QueueOutcome]:
        """Places the asks for which there is room. Returns all outcomes since the previous call.

        `place` returns the placement and the tokens that its tenant is charged, or raises OverloadedError when there is no room.
        """
        for queued in self.queue.expire(now):
            self._refuse(queued, self._expired(queued, now), now)
        self.queue.end_lateness(now)
        if self.queue.requests:
            self._place_heads(place, now)
        return self.take_outcomes()

    def _place_heads(self, place: Callable[[QueuedAsk], tuple[Placement, float]], now: float) -> None:
        tried_of_model: Counter[str] = Counter()
        heads = [_ranked(subqueue, tried_of_model) for subqueue in self.queue.subqueues]
        heapify(heads)
        tried = 0
        while heads and tried < PLACEMENTS_PER_DRAIN_MAX:
            rank, subqueue = heads[0]
            # Services only add to what ranks are made of, so the first entry that is still right is the smallest of all.
            if (present := _ranked(subqueue, tried_of_model))[0] != rank:
                heapreplace(heads, present)
                continue
            queued = subqueue.head()
            try:
                placement, tokens = place(queued)
            except OverloadedError:
                heappop(heads)
                continue
            except MeshError as error:
                self.queue.remove(queued, now)
                self._refuse(queued, error, now)
            else:
                self.queue.serve(queued, now, charged_tokens=tokens)
                self._add_outcome(queued, placement, now)
            tried += 1
            tried_of_model[queued.ask.model] += 1
            if subqueue.by_priority:
                heapreplace(heads, _ranked(subqueue, tried_of_model))
            else:
                heappop(heads)
        self.has_more = bool(heads)

    def _expired(self, queued: QueuedAsk, now: float) -> MeshError:
        timeout_s, queued_s = queued.ask.timeout_s, now - queued.arrived_s
        if timeout_s is not None and queued_s >= timeout_s:
            return DeadlineError("the request timed out before a worker had capacity")
        retry_after_s = self.queue.retry_after_s(self.queue.expected_wait_s(queued, now))
        message = f"no worker had room for {queued_s:.3g} s"
        return OverloadedError(message, reason="queue_wait_over", retry_after_s=retry_after_s)

    def _refuse(self, queued: QueuedAsk, error: MeshError, now: float) -> None:
        error.request_id = queued.ask.request_id
        queued.record.error = error
        self._add_outcome(queued, error, now)

    def _add_outcome(self, queued: QueuedAsk, outcome: Placement | MeshError, now: float) -> None:
        self._outcomes.append(
            QueueOutcome(
                frontend_id=queued.frontend_id,
                ask_id=queued.ask_id,
                ask=queued.ask,
                outcome=outcome,
                queued_s=now - queued.arrived_s,
            )
        )


Rank = tuple[int, int, float, int, tuple[float, int]]


def _ranked(subqueue: Subqueue, tried_of_model: Counter[str]) -> tuple[Rank, Subqueue]:
    """Returns the subqueue after its rank.

    The highest priority is first; models in turn; then the tenant that was served least; then the order of its asks,
    which is unique.
    """
    queued = subqueue.head()
    assert queued.tenant_queue is not None
    account = queued.tenant_queue.account
    # `order` is unique, so the heap never compares two subqueues.
    rank = (-queued.priority, tried_of_model[queued.ask.model], *account.rank, queued.order)
    return rank, subqueue
