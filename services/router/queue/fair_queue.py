"""Fair queueing among tenants: start-time fair queueing, charged in tokens. Pure.

P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Each tenant has a virtual time: what it was served, over its
weight. The tenant with the smallest one is served next. A tenant that had nothing waiting continues at the present virtual time, which is
that of the newest service, unless its own is later. So a tenant that asks for less than its share is served next, whatever others have
waiting, and one that asks for more waits for the others.

A tenant is charged what its request is expected to cost when it is served, and the difference when the cost is known.

Invariants:
1. A tenant is among `queues()` exactly while it has items.
2. `tokens` is the sum over the items, per tenant and in total.
3. While two tenants have items, what each was charged, over its weight, differs by at most the largest charge over the weight of each.
4. A tenant whose virtual time is not later than the present one waits for at most one item of each other tenant.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
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
    """The items of one tenant, and its virtual time."""

    __slots__ = ("items", "joined", "tenant", "tokens", "virtual_time", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.virtual_time = 0.0
        self.joined = 0
        """Breaks ties: the tenant that has waited longer goes first."""
        self.tokens = 0
        self.items: list[tuple[tuple[float, int], T]] = []

    @property
    def first(self) -> T:
        return self.items[0][1]

    @property
    def last(self) -> T:
        return self.items[-1][1]

    @property
    def rank(self) -> tuple[float, int]:
        """The tenant with the smallest rank is served next."""
        return self.virtual_time, self.joined

    def charge(self, tokens: float) -> None:
        """Charges the tenant; a negative number returns a part of an earlier charge."""
        self.virtual_time += tokens / self.weight

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


class FairQueue(Generic[T]):
    """The tenants of one priority."""

    def __init__(self, *, weights: Mapping[str, float], tenants_max: int) -> None:
        self._weights = weights
        self._tenants_max = tenants_max
        self._queues: dict[str, TenantQueue[T]] = {}
        self._idle: dict[str, TenantQueue[T]] = {}
        """Tenants without items that were charged more than others were until now."""
        self._now = 0.0
        self._joined = 0
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def queue_of(self, tenant: str) -> TenantQueue[T]:
        """The queue of a tenant's items, or the one that its first item would be added to."""
        known = self._queues.get(tenant)
        if known is not None:
            return known
        if len(self._queues) >= self._tenants_max and tenant not in self._weights:
            tenant = OTHERS
            if (others := self._queues.get(OTHERS)) is not None:
                return others
        return self._idle.get(tenant) or TenantQueue(tenant, self._weights.get(tenant, 1.0))

    def queues(self) -> Collection[TenantQueue[T]]:
        return self._queues.values()

    def add(self, tenant: str, item: T) -> TenantQueue[T]:
        """Adds an item. Returns its queue, which `remove` and `serve` take."""
        queue = self.queue_of(tenant)
        if not queue.items:
            self._idle.pop(queue.tenant, None)
            self._queues[queue.tenant] = queue
            self._joined += 1
            queue.joined = self._joined
            queue.virtual_time = max(self._now, queue.virtual_time)
        queue.add(item)
        self.tokens += item.tokens
        return queue

    def remove(self, queue: TenantQueue[T], item: T) -> None:
        """Removes an item that was not served."""
        queue.remove(item)
        self.tokens -= item.tokens
        if not queue.items:
            del self._queues[queue.tenant]
            self._keep_idle(queue)

    def serve(self, queue: TenantQueue[T], item: T, charged_tokens: float) -> None:
        """Removes an item that was served, and charges its tenant."""
        self._now = max(self._now, queue.virtual_time)
        self._joined += 1
        queue.joined = self._joined
        queue.charge(charged_tokens)
        self.remove(queue, item)

    def tokens_ahead(self, queue: TenantQueue[T], item: T) -> float:
        """Tokens of this priority that are served before an item that would be added to a queue now."""
        own = queue.tokens_before(item.order)
        share = (own + item.tokens) / queue.weight
        return own + sum(min(other.tokens, share * other.weight) for other in self.queues() if other is not queue)

    def head(self) -> T:
        """The item to serve next: the same one until an item is added, removed or served, or a tenant is charged. There must be an item."""
        return min(self._queues.values(), key=_rank).first

    def _keep_idle(self, queue: TenantQueue[T]) -> None:
        self._idle[queue.tenant] = queue
        if len(self._idle) <= self._tenants_max:
            return
        self._idle = {name: each for name, each in self._idle.items() if each.virtual_time > self._now}
        while len(self._idle) > self._tenants_max:
            # The one that loses least: it is hardly ahead of the others.
            del self._idle[min(self._idle.values(), key=_rank).tenant]


def _rank(queue: TenantQueue[T]) -> tuple[float, int]:
    return queue.rank
