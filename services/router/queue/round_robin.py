"""Fair queueing among tenants: deficit round robin, charged in tokens. Pure.

M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin" (SIGCOMM 1995), with two additions. Rounds in which no
tenant can be served are skipped in one step, so a prompt of a million tokens does not take a million rounds. A tenant is charged the
tokens that the request turned out to need, which may differ from the tokens that were estimated when it was queued.

Invariants:
1. A tenant is in the ring exactly while it has items; a tenant that leaves the ring loses its deficit.
2. `tokens` is the sum over the items, per tenant and in total.
3. While two tenants have items, the tokens that each was served, over its weight, differ by at most one quantum plus the largest item
   over the smaller weight.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from math import ceil
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from kvmesh.errors import InvalidRequestError

OTHERS = "\x00others"
"""The queue shared by all tenants beyond `tenants_max`. A tenant with this name shares it too."""

WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0


def read_weights(entries: Iterable[str]) -> Mapping[str, float]:
    """Reads the setting `tenant_weights`: `tenant=weight` each. Raises InvalidRequestError."""
    weights: dict[str, float] = {}
    for entry in entries:
        tenant, separator, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not separator or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            message = f"{entry!r} is not tenant=weight with a weight of {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            raise InvalidRequestError(f"tenant_weights: {message}", field="tenant_weights")
        weights[tenant.strip()] = weight
    return weights


class Item(Protocol):
    """Something that is queued."""

    tokens: int
    """Estimated cost, at least 1."""
    order: tuple[float, int]
    """Its place among the tenant's items, smallest first; unique."""


T = TypeVar("T", bound=Item)


class TenantQueue(Generic[T]):
    """The items of one tenant."""

    __slots__ = ("deficit", "has_quantum", "items", "tenant", "tokens", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.deficit = 0.0
        self.has_quantum = False
        """True when it got the quantum of the current round."""
        self.tokens = 0
        self.items: list[tuple[tuple[float, int], T]] = []

    @property
    def first(self) -> T:
        return self.items[0][1]

    @property
    def last(self) -> T:
        return self.items[-1][1]

    def tokens_before(self, order: tuple[float, int]) -> int:
        position = self._position(order)
        if position == len(self.items):
            return self.tokens
        return sum(item.tokens for _, item in islice(self.items, position))

    def add(self, item: T) -> None:
        insort(self.items, (item.order, item), key=itemgetter(0))
        self.tokens += item.tokens

    def remove(self, item: T) -> None:
        del self.items[self._position(item.order)]
        self.tokens -= item.tokens

    def _position(self, order: tuple[float, int]) -> int:
        return bisect_left(self.items, order, key=itemgetter(0))


class DeficitRoundRobin(Generic[T]):
    """The tenants of one priority."""

    def __init__(self, *, quantum_tokens: int, weights: Mapping[str, float], tenants_max: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._weights = weights
        self._tenants_max = tenants_max
        self._queues: dict[str, TenantQueue[T]] = {}
        self._ring: deque[TenantQueue[T]] = deque()
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._ring)

    def queue_of(self, tenant: str) -> TenantQueue[T]:
        """The queue of a tenant's items, or the one that its first item would be added to."""
        known = self._queues.get(tenant)
        if known is not None:
            return known
        if len(self._queues) >= self._tenants_max and tenant not in self._weights:
            return self._queues.get(OTHERS) or TenantQueue(OTHERS, self._weights.get(OTHERS, 1.0))
        return TenantQueue(tenant, self._weights.get(tenant, 1.0))

    def queues(self) -> Iterable[TenantQueue[T]]:
        return self._ring

    def add(self, tenant: str, item: T) -> TenantQueue[T]:
        """Adds an item. Returns its queue, which `remove` and `serve` take."""
        queue = self.queue_of(tenant)
        if not queue.items:
            self._queues[queue.tenant] = queue
            self._ring.append(queue)
        queue.add(item)
        self.tokens += item.tokens
        return queue

    def remove(self, queue: TenantQueue[T], item: T) -> None:
        """Removes an item that was not served."""
        queue.remove(item)
        self.tokens -= item.tokens
        if not queue.items:
            del self._queues[queue.tenant]
            self._ring.remove(queue)

    def serve(self, queue: TenantQueue[T], item: T, charged_tokens: int) -> None:
        """Removes an item that was served, and charges its tenant."""
        queue.deficit -= charged_tokens
        self.remove(queue, item)

    def tokens_ahead(self, queue: TenantQueue[T], item: T) -> float:
        """Tokens of this priority that are served before an item that would be added to a queue now."""
        own = queue.tokens_before(item.order)
        share = (own + item.tokens) / queue.weight
        return own + sum(min(other.tokens, share * other.weight) for other in self._ring if other is not queue)

    def head(self) -> T:
        """The item to serve next: the same one until an item is added, removed or served. There must be an item."""
        ring = self._ring
        current = ring[0]
        if current.has_quantum and current.deficit >= current.first.tokens:
            return current.first
        if current.has_quantum:
            self._rotate()
        self._skip_rounds()
        while True:
            queue = ring[0]
            queue.deficit += self._quantum_tokens * queue.weight
            queue.has_quantum = True
            if queue.deficit >= queue.first.tokens:
                return queue.first
            self._rotate()

    def _rotate(self) -> None:
        self._ring[0].has_quantum = False
        self._ring.rotate(-1)

    def _skip_rounds(self) -> None:
        """Gives every tenant the quanta of the rounds in which none can be served."""
        quantum = self._quantum_tokens
        rounds = min(ceil((each.first.tokens - each.deficit) / (quantum * each.weight)) for each in self._ring) - 1
        if rounds > 0:
            for queue in self._ring:
                queue.deficit += rounds * quantum * queue.weight
