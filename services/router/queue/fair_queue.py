"""The requests of one priority in one subqueue, by tenant: next is the tenant that was served least (`accounts.py`). Pure.

A tenant is charged what its request is expected to cost when it is served, and the difference when the cost is known.

Invariants:
1. A tenant is among `queues()` exactly while it has items.
2. `tokens` is the sum over the items, per tenant and in total.
3. While two tenants have items, what each was charged, over its weight, differs by at most the largest charge over the weight of each.
4. A tenant whose virtual time is not later than the present one waits for at most one item of each other tenant.

3 and 4 hold across all subqueues of a model and priority that have room.
"""

from bisect import bisect_left, insort
from collections.abc import Collection
from itertools import islice
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from services.router.queue.accounts import Account, Accounts


class Item(Protocol):
    """Something that is queued."""

    tokens: int
    """Estimated cost, at least 1."""
    order: tuple[float, int]
    """Its place among the tenant's items, smallest first; unique."""


T = TypeVar("T", bound=Item)


class TenantQueue(Generic[T]):
    """The items of one tenant in one subqueue."""

    __slots__ = ("account", "items", "tokens")

    def __init__(self, account: Account) -> None:
        self.account = account
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


class FairQueue(Generic[T]):
    """The tenants of one priority in one subqueue."""

    def __init__(self, accounts: Accounts) -> None:
        """Shares `accounts` with the other subqueues of the model and priority."""
        self.accounts = accounts
        self._queues: dict[str, TenantQueue[T]] = {}
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def queue_of(self, tenant: str) -> TenantQueue[T]:
        """Returns the queue of a tenant's items, or the one that its first item would be added to."""
        account = self.accounts.of(tenant)
        return self._queues.get(account.tenant) or TenantQueue(account)

    def get(self, account_name: str) -> TenantQueue[T] | None:
        return self._queues.get(account_name)

    def queues(self) -> Collection[TenantQueue[T]]:
        return self._queues.values()

    def add(self, tenant: str, item: T) -> TenantQueue[T]:
        """Adds an item. Returns its queue, which `remove` and `serve` take."""
        queue = self.queue_of(tenant)
        if not queue.items:
            self._queues[queue.account.tenant] = queue
            self.accounts.join(queue.account)
        queue.add(item)
        self.tokens += item.tokens
        return queue

    def remove(self, queue: TenantQueue[T], item: T) -> None:
        """Removes an item that was not served."""
        queue.remove(item)
        self.tokens -= item.tokens
        if not queue.items:
            del self._queues[queue.account.tenant]
            self.accounts.leave(queue.account)

    def serve(self, queue: TenantQueue[T], item: T, charged_tokens: float) -> None:
        """Removes an item that was served, and charges its tenant."""
        self.accounts.serve(queue.account, charged_tokens)
        self.remove(queue, item)

    def tokens_ahead(self, queue: TenantQueue[T], item: T) -> float:
        """Returns the tokens of this queue that are served before an item that would be added to a tenant's queue now."""
        own, weight = queue.tokens_before(item.order), queue.account.weight
        # Until a tenant has received this service per weight, each other tenant receives the same per weight, or all that it has waiting.
        share = (own + item.tokens) / weight
        return own + sum(min(each.tokens, share * each.account.weight) for each in self.queues() if each is not queue)

    def head(self) -> T:
        """Returns the item to serve next: the same one until an item is added, removed or served, or a tenant is charged. There must be an
        item.
        """
        return min(self._queues.values(), key=_rank).first


def _rank(queue: TenantQueue[T]) -> tuple[float, int]:
    return queue.account.rank
