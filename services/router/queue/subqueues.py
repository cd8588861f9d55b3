"""What waits, and where: asks in lanes, lanes in classes. Pure."""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from kvmesh.core import Ask
from services.router.explain import Record
from services.router.placement.pools import Kind
from services.router.queue.drain_rate import DrainRate
from services.router.queue.round_robin import Flow, RoundRobin


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of the queue. `requests_max` 0: nobody waits, busy workers refuse."""

    requests_max: int = 4096
    prompt_tokens_max: int = 4_194_304
    lanes_max: int = 64
    wait_s_max: float = 30.0
    quantum_tokens: int = 4096
    tenants_max: int = 256
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    retry_after_s_min: float = 1.0
    retry_after_s_max: float = 60.0


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What asks must have in common for the room of one to be the room of all."""

    kind: Kind
    pinned: tuple[str, str]
    excluded: frozenset[str]
    is_single: bool
    """Those that want one token need no room on a decode worker."""

    @classmethod
    def of(cls, ask: Ask) -> "LaneKey":
        """The lane of an ask."""
        pinned = (ask.pinned_prefill_worker_id, ask.pinned_decode_worker_id)
        return cls(Kind.of(ask), pinned, frozenset(ask.excluded_worker_ids), ask.expected_output_tokens == 1)


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """One ask that waits. `tokens`: prompt tokens that nobody is thought to hold."""

    frontend_id: str
    ask_id: int
    ask: Ask
    record: Record
    arrived_s: float
    tokens: int
    order: tuple[float, int] = (inf, 0)
    ends_s: float = inf
    lane: "Lane | None" = None
    flow: "Flow[Waiting] | None" = None


class Lane:
    """Asks that the same workers could serve."""

    def __init__(self, key: LaneKey, rate: DrainRate) -> None:
        self.key = key
        self.rate = rate
        self.classes: dict[int, RoundRobin[Waiting]] = {}
        self._priorities: list[int] = []

    @property
    def priority(self) -> int:
        """The highest class that waits."""
        return self._priorities[-1]

    def head(self) -> Waiting:
        """Who is next."""
        return self.classes[self.priority].head()

    def open(self, priority: int, fresh: RoundRobin["Waiting"]) -> RoundRobin["Waiting"]:
        """The class of a priority; `fresh` when it has none."""
        known = self.classes.get(priority)
        if known is not None:
            return known
        self.classes[priority] = fresh
        insort(self._priorities, priority)
        return fresh

    def close(self, priority: int) -> None:
        """Forgets a class in which nothing waits any more."""
        del self.classes[priority]
        self._priorities.remove(priority)

    def tokens_ahead(self, waiting: Waiting) -> float:
        """Tokens that are served before an ask that would enter now."""
        priority = waiting.ask.priority
        ahead: float = sum(each.tokens for other, each in self.classes.items() if other > priority)
        own = self.classes.get(priority)
        if own is not None:
            ahead += own.tokens_ahead(own.flow(waiting.ask.tenant), waiting)
        return ahead
