"""Whose turn it is among tenants: deficit round robin, charged in tokens. Pure.

M. Shreedhar, G. Varghese, "Efficient Fair Queueing using Deficit Round Robin" (SIGCOMM 1995), with two additions: rounds in which
nobody could be served are skipped at once, so a prompt of a million tokens costs no million turns, and what is charged is what the
request turned out to lack, which may differ from what was thought when its turn came.

Invariants:
1. A tenant is in the ring exactly while something of it waits; one that leaves it loses its deficit.
2. `tokens` is the sum over what waits, per tenant and in total.
3. While two tenants have something waiting, what they were served, each over its weight, differs by at most one quantum plus the
   largest request over the smaller weight.
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
"""The account of all tenants beyond the bound. A tenant that calls itself so is one of them."""

WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0


def read_weights(entries: Iterable[str]) -> Mapping[str, float]:
    """Weights as a setting spells them, `tenant=weight` each."""
    weights: dict[str, float] = {}
    for entry in entries:
        tenant, separator, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not separator or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            shown = f"{entry!r} is not tenant=weight with a weight of {WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            raise InvalidRequestError(f"tenant_weights: {shown}", field="tenant_weights")
        weights[tenant.strip()] = weight
    return weights


class Charged(Protocol):
    """What waits."""

    tokens: int
    """What it is thought to cost, at least 1."""
    order: tuple[float, int]
    """Its place within its tenant, smallest first; unique."""


T = TypeVar("T", bound=Charged)


class Flow(Generic[T]):
    """What waits of one tenant."""

    __slots__ = ("deficit", "is_topped", "tenant", "tokens", "waiting", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.deficit = 0.0
        self.is_topped = False
        self.tokens = 0
        self.waiting: list[tuple[tuple[float, int], T]] = []

    @property
    def first(self) -> T:
        """The one to be served next."""
        return self.waiting[0][1]

    @property
    def last(self) -> T:
        """The one to be served last."""
        return self.waiting[-1][1]

    def tokens_before(self, order: tuple[float, int]) -> int:
        """Tokens of those that are served before a place."""
        position = self._position(order)
        if position == len(self.waiting):
            return self.tokens
        return sum(item.tokens for _, item in islice(self.waiting, position))

    def add(self, item: T) -> None:
        """Puts it at its place."""
        insort(self.waiting, (item.order, item), key=itemgetter(0))
        self.tokens += item.tokens

    def remove(self, item: T) -> None:
        """Takes it out."""
        del self.waiting[self._position(item.order)]
        self.tokens -= item.tokens

    def _position(self, order: tuple[float, int]) -> int:
        return bisect_left(self.waiting, order, key=itemgetter(0))


class RoundRobin(Generic[T]):
    """The tenants of one class."""

    def __init__(self, *, quantum_tokens: int, weights: Mapping[str, float], tenants_max: int) -> None:
        self._quantum = quantum_tokens
        self._weights = weights
        self._tenants_max = tenants_max
        self._flows: dict[str, Flow[T]] = {}
        self._ring: deque[Flow[T]] = deque()
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._ring)

    def flow(self, tenant: str) -> Flow[T]:
        """The account that a tenant's asks are in, or would be in."""
        known = self._flows.get(tenant)
        if known is not None:
            return known
        if len(self._flows) >= self._tenants_max and tenant not in self._weights:
            return self._flows.get(OTHERS) or Flow(OTHERS, self._weights.get(OTHERS, 1.0))
        return Flow(tenant, self._weights.get(tenant, 1.0))

    def flows(self) -> Iterable[Flow[T]]:
        """All tenants with something waiting."""
        return self._ring

    def add(self, tenant: str, item: T) -> Flow[T]:
        """Lets it wait; gives the account, which `remove` and `served` want back."""
        flow = self.flow(tenant)
        if not flow.waiting:
            self._flows[flow.tenant] = flow
            self._ring.append(flow)
        flow.add(item)
        self.tokens += item.tokens
        return flow

    def remove(self, flow: Flow[T], item: T) -> None:
        """It waits no more and was not served."""
        flow.remove(item)
        self.tokens -= item.tokens
        if not flow.waiting:
            del self._flows[flow.tenant]
            self._ring.remove(flow)

    def served(self, flow: Flow[T], item: T, charged_tokens: int) -> None:
        """It was served and cost so much."""
        flow.deficit -= charged_tokens
        self.remove(flow, item)

    def tokens_ahead(self, flow: Flow[T], item: T) -> float:
        """Tokens of this class that are served before an item that would join a flow now, when turns go as they should."""
        own = flow.tokens_before(item.order)
        share = (own + item.tokens) / flow.weight
        return own + sum(min(other.tokens, share * other.weight) for other in self._ring if other is not flow)

    def head(self) -> T:
        """The one to be served next; the same until something enters, leaves or is served. Not to be asked when empty."""
        ring = self._ring
        first = ring[0]
        if first.is_topped and first.deficit >= first.first.tokens:
            return first.first
        if first.is_topped:
            self._pass_on()
        self._skip_rounds()
        while True:
            flow = ring[0]
            flow.deficit += self._quantum * flow.weight
            flow.is_topped = True
            if flow.deficit >= flow.first.tokens:
                return flow.first
            self._pass_on()

    def _pass_on(self) -> None:
        self._ring[0].is_topped = False
        self._ring.rotate(-1)

    def _skip_rounds(self) -> None:
        """Gives everybody the quanta of the rounds in which nobody can be served."""
        rounds = min(ceil((f.first.tokens - f.deficit) / (self._quantum * f.weight)) for f in self._ring) - 1
        if rounds > 0:
            for flow in self._ring:
                flow.deficit += rounds * self._quantum * flow.weight
