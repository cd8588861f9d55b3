"""How much each tenant has waiting, over all models and subqueues, by priority. Pure.

A tenant's load is the larger of its shares of the two limits (requests, prompt tokens), divided by its weight. So many small requests
count as much as a few long ones, and requests of many kinds as much as requests of one kind.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.router.queue.accounts import Account

TENANTS_COMPARED_MAX = 256
"""Tenants among whom a full queue looks for the heaviest: those whose requests began to wait first."""


@dataclass(slots=True, kw_only=True)
class TenantLoad:
    """What one tenant has waiting in one priority."""

    tenant: str
    weight: float
    requests: int = 0
    tokens: int = 0

    def share(self, limits: "LoadLimits", *, requests: int = 0, tokens: int = 0) -> float:
        """Returns the load, with so many requests and tokens more."""
        of_tokens = (self.tokens + tokens) / limits.tokens_max
        return max(of_tokens, (self.requests + requests) / limits.requests_max) / self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """The limits of the whole queue."""

    requests_max: int
    tokens_max: int


class Loads:
    """The loads of all tenants with requests in the queue."""

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        self._by_priority: dict[int, dict[str, TenantLoad]] = {}

    @property
    def priorities(self) -> Collection[int]:
        """Those of queued requests."""
        return self._by_priority.keys()

    def of(self, priority: int, account: Account) -> TenantLoad:
        """Returns the load of a tenant; a new one if it has nothing waiting."""
        known = self._by_priority.get(priority, {}).get(account.tenant)
        return known or TenantLoad(tenant=account.tenant, weight=account.weight)

    def add(self, priority: int, account: Account, tokens: int) -> None:
        load = self._by_priority.setdefault(priority, {}).setdefault(account.tenant, self.of(priority, account))
        load.requests += 1
        load.tokens += tokens

    def remove(self, priority: int, account: Account, tokens: int) -> None:
        loads = self._by_priority[priority]
        load = loads[account.tenant]
        load.requests -= 1
        load.tokens -= tokens
        if not load.requests:
            del loads[account.tenant]
            if not loads:
                del self._by_priority[priority]

    def heaviest(self, priority: int) -> TenantLoad:
        """There must be a request of this priority."""
        loads = list(self._by_priority[priority].values())[:TENANTS_COMPARED_MAX]
        return max(loads, key=lambda each: each.share(self._limits))

    def is_lighter(self, newcomer: TenantLoad, tokens: int, heaviest: TenantLoad, *, last_tokens: int) -> bool:
        """Returns whether a tenant with one more request stays lighter than the heaviest one without its last request."""
        grown = newcomer.share(self._limits, requests=1, tokens=tokens)
        return grown < heaviest.share(self._limits, requests=-1, tokens=-last_tokens)
