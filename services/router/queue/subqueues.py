"""The parts of the queue: queued asks, and one subqueue for asks that the same workers could serve. Pure."""

from bisect import insort
from dataclasses import dataclass
from math import inf

from kvmesh.core import Ask
from services.router.explain import DecisionRecord
from services.router.placement.pools import RequestKind
from services.router.queue.drain_rate import DrainRate
from services.router.queue.fair_queue import FairQueue, TenantQueue

LATE_PRIORITIES = 1000
"""How far late asks are below others: more than all priorities that a request may have (-100 to 100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubqueueKey:
    """The attributes that decide which workers can serve an ask. A worker with room for one ask has room for all asks with the same key."""

    kind: RequestKind
    pinned: tuple[str, str]
    excluded: frozenset[str]
    is_single_token: bool
    """Asks for one token need no room on a decode worker."""
    paused: frozenset[str]
    """Workers that the frontend had lost when the ask was queued."""

    @classmethod
    def of(cls, ask: Ask, paused: frozenset[str] = frozenset()) -> "SubqueueKey":
        return cls(
            kind=RequestKind.of(ask),
            pinned=(ask.pinned_prefill_worker_id, ask.pinned_decode_worker_id),
            excluded=frozenset(ask.excluded_worker_ids),
            is_single_token=ask.expected_output_tokens == 1,
            paused=paused,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedAsk:
    """An ask that waits for room."""

    frontend_id: str
    ask_id: int
    ask: Ask
    record: DecisionRecord
    arrived_s: float
    tokens: int
    """Prompt tokens that no worker is known to have cached."""
    paused: frozenset[str] = frozenset()
    """See `SubqueueKey`."""
    order: tuple[float, int] = (inf, 0)
    """Deadline and order of arrival: its place among the tenant's asks."""
    ends_s: float = inf
    late_until_s: float | None = None
    """Until this time the ask is late (see `lateness.py`): it goes after all others, and only if a worker has spare time. None: not late."""
    subqueue: "Subqueue | None" = None
    tenant_queue: "TenantQueue[QueuedAsk] | None" = None

    @property
    def priority(self) -> int:
        return self.ask.priority if self.late_until_s is None else self.ask.priority - LATE_PRIORITIES

    @property
    def key(self) -> SubqueueKey:
        return SubqueueKey.of(self.ask, self.paused)


class Subqueue:
    """Asks that the same workers could serve, by priority."""

    def __init__(self, key: SubqueueKey, rate: DrainRate) -> None:
        self.key = key
        self.rate = rate
        self.by_priority: dict[int, FairQueue[QueuedAsk]] = {}
        # Ascending.
        self._priorities: list[int] = []

    @property
    def priority(self) -> int:
        return self._priorities[-1]

    def head(self) -> QueuedAsk:
        return self.by_priority[self.priority].head()

    def add_priority(self, priority: int, tenants: FairQueue[QueuedAsk]) -> None:
        self.by_priority[priority] = tenants
        insort(self._priorities, priority)

    def remove_priority(self, priority: int) -> None:
        del self.by_priority[priority]
        self._priorities.remove(priority)

    def tokens_ahead(self, queued: QueuedAsk) -> float:
        """Returns the tokens that are served before an ask that would be added now."""
        priority = queued.priority
        ahead: float = sum(tenants.tokens for other, tenants in self.by_priority.items() if other > priority)
        own = self.by_priority.get(priority)
        if own is not None:
            ahead += own.tokens_ahead(own.queue_of(queued.ask.tenant), queued)
        return ahead
