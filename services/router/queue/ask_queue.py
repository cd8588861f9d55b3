"""The queue of asks that wait for room: bounded, by priority, then fair among tenants, then by deadline. Pure; times are arguments.

Asks that the same workers could serve share a subqueue, so no ask waits for room that it could not use. In a subqueue, a higher priority
always goes first. Within a priority, tenants share fairly across all subqueues of a model (`accounts.py`). Within a tenant, the ask with
the nearest deadline goes first; asks without a deadline follow in order of arrival.

Invariants:
1. `requests` and `prompt_tokens` are the sums over the queued asks, and within the limits, except that an empty queue accepts any prompt.
2. Every ask that is added leaves exactly once: served, removed, displaced or expired.
3. A subqueue exists exactly while it has asks, and the accounts of a model and priority while one of their asks waits.
4. A named tenant waits in at most a quarter of the subqueues.
5. Late asks (`lateness.py`) are below all priorities until `late_until_s`, which is before they would expire.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from math import inf

from kvmesh.core import Ask
from kvmesh.errors import OverloadedError
from services.router.core_settings import RETRY_AFTER_S, CoreSettings
from services.router.queue.accounts import Account, Accounts, read_weights
from services.router.queue.drain_rate import DrainRates
from services.router.queue.fair_queue import FairQueue, TenantQueue
from services.router.queue.loads import LoadLimits, Loads
from services.router.queue.subqueues import QueuedAsk, Subqueue, SubqueueKey

SUBQUEUES_PER_TENANT = 0.25
"""Share of the subqueues in which one tenant's asks may wait. Without keys, all asks are of one tenant without a name."""
DISPLACED_MAX = 16
"""Asks that one new ask may displace."""
RETRY_AFTER_S_MAX = 60.0
"""Longest retry delay sent to refused callers: the load changes within a minute, so a longer forecast means little."""


class AskQueue:
    """All subqueues."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings.queue
        self._tenant_weights = read_weights(settings.queue.tenant_weights)
        self.requests = 0
        self.prompt_tokens = 0
        self._subqueues: dict[SubqueueKey, Subqueue] = {}
        self._accounts: dict[str, dict[int, Accounts]] = {}
        """By model and priority."""
        limits = LoadLimits(requests_max=settings.queue.requests_max or 1, tokens_max=settings.queue.prompt_tokens_max)
        self._loads = Loads(limits)
        self._rates = DrainRates()
        self._by_frontend: dict[str, dict[int, QueuedAsk]] = {}
        # Sorted: (end, order of arrival, ask). The order of arrival is unique, so asks are never compared. `_late` is alike.
        self._ends: list[tuple[float, int, QueuedAsk]] = []
        self._late: list[tuple[float, int, QueuedAsk]] = []
        """Late asks, in the order in which they stop waiting for spare time."""
        self._added = 0

    @property
    def subqueues(self) -> Collection[Subqueue]:
        return self._subqueues.values()

    def __iter__(self) -> Iterator[QueuedAsk]:
        """The queued asks. The queue must not change meanwhile."""
        for of_frontend in self._by_frontend.values():
            yield from of_frontend.values()

    def get(self, frontend_id: str, ask_id: int) -> QueuedAsk | None:
        return self._by_frontend.get(frontend_id, {}).get(ask_id)

    def is_behind(self, ask: Ask, paused: frozenset[str] = frozenset()) -> bool:
        """Returns True when a queued ask goes before this one, whatever room there is. `paused`: see `SubqueueKey`."""
        subqueue = self._subqueues.get(SubqueueKey.of(ask, paused))
        return subqueue is not None and subqueue.priority >= ask.priority

    def must_take_turn(self, ask: Ask) -> bool:
        """Returns True when asks of the model wait in other subqueues that go before this one if the same workers could serve them.

        It then joins the queue, too, even if there is room for it: the next drain offers the room in the right order.
        """
        of_model = self._accounts.get(ask.model, {})
        if any(priority > ask.priority for priority in of_model):
            return True
        accounts = of_model.get(ask.priority)
        return accounts is not None and accounts.has_more_than_its_share(ask.tenant)

    def accounts_of(self, ask: Ask) -> Accounts | None:
        """Returns the accounts of the ask's model and priority. None: no such ask waits, so nobody is charged."""
        return self._accounts.get(ask.model, {}).get(ask.priority)

    def charge_peer(self, model: str, priority: int, tenant: str, *, tokens: float) -> None:
        """Charges the tenant for what another router served, while asks of the tenant wait here too."""
        accounts = self._accounts.get(model, {}).get(priority)
        if accounts is not None:
            accounts.charge_waiting(tenant, tokens)

    def expected_wait_s(self, queued: QueuedAsk, now: float) -> float | None:
        """Time until an ask that would be added now is served, at the measured rate. None: no rate is known."""
        subqueue = self._subqueues.get(queued.key)
        if subqueue is None:
            return 0.0
        rate = subqueue.rate.tokens_per_s(now)
        return None if rate is None else subqueue.tokens_ahead(queued) / rate

    def retry_after_s(self, wait_s: float | None) -> float:
        """Returns the time after which a refused caller should retry, given the wait that its ask would have had."""
        return max(RETRY_AFTER_S, min(RETRY_AFTER_S_MAX, wait_s or 0.0))

    def add(self, queued: QueuedAsk, now: float, *, is_late: bool = False) -> tuple[float | None, list[QueuedAsk]]:
        """Adds an ask. Returns the expected wait and the asks that it displaced. Raises OverloadedError when it cannot be added."""
        timeout_s = queued.ask.timeout_s
        self._added += 1
        queued.order = (inf if timeout_s is None else now + timeout_s, self._added)
        queued.ends_s = now + min(self._settings.wait_s_max, inf if timeout_s is None else timeout_s)
        if is_late:
            queued.late_until_s = now + self._settings.late_share * (queued.ends_s - now)
        wait_s = self.expected_wait_s(queued, now)
        if not is_late and wait_s is not None and timeout_s is not None and wait_s > timeout_s:
            raise OverloadedError(
                f"the request would wait about {wait_s:.3g} s, and its timeout is {timeout_s:.3g} s",
                reason="deadline_too_near",
                # By then the queue is shorter by as much as the wait exceeds the timeout.
                retry_after_s=self.retry_after_s(wait_s - timeout_s),
            )
        displaced = self._make_room(queued, now, wait_s=wait_s)
        self._insert(queued, now)
        return wait_s, displaced

    def remove(self, queued: QueuedAsk, now: float) -> None:
        subqueue, tenant_queue = self._detach(queued, now, served_tokens=0)
        subqueue.by_priority[queued.priority].remove(tenant_queue, queued)
        self._remove_if_empty(subqueue, queued.priority)

    def serve(self, queued: QueuedAsk, now: float, *, charged_tokens: float) -> None:
        """Removes an ask that was placed, and charges its tenant."""
        subqueue, tenant_queue = self._detach(queued, now, served_tokens=queued.tokens)
        subqueue.by_priority[queued.priority].serve(tenant_queue, queued, charged_tokens)
        self._remove_if_empty(subqueue, queued.priority)

    def expire(self, now: float) -> Iterator[QueuedAsk]:
        while self._ends and self._ends[0][0] <= now:
            queued = self._ends[0][2]
            self.remove(queued, now)
            yield queued

    def end_lateness(self, now: float) -> None:
        """Gives late asks that have waited for long the place in the queue that they would have otherwise."""
        while self._late and self._late[0][0] <= now:
            queued = self._late[0][2]
            # Removed before the change: `late_until_s` determines the priority, and so the place from which the ask is removed.
            self.remove(queued, now)
            queued.late_until_s = None
            self._insert(queued, now)

    def sums(self) -> Mapping[int, tuple[int, int]]:
        sums: dict[int, tuple[int, int]] = {}
        for subqueue in self._subqueues.values():
            for priority, tenants in subqueue.by_priority.items():
                requests, tokens = sums.get(priority, (0, 0))
                sums[priority] = (requests + sum(len(each.items) for each in tenants.queues()), tokens + tenants.tokens)
        return sums

    def _insert(self, queued: QueuedAsk, now: float) -> None:
        key, ask, priority = queued.key, queued.ask, queued.priority
        subqueue = self._subqueues.get(key)
        if subqueue is None:
            subqueue = self._subqueues[key] = Subqueue(key, self._rates.rate(key.kind))
        if priority not in subqueue.by_priority:
            subqueue.add_priority(priority, FairQueue(self._accounts_for(ask.model, priority)))
        queued.subqueue = subqueue
        queued.tenant_queue = subqueue.by_priority[priority].add(ask.tenant, queued)
        self._loads.add(priority, queued.tenant_queue.account, queued.tokens)
        subqueue.rate.on_added(now)
        insort(self._ends, (queued.ends_s, queued.order[1], queued))
        if queued.late_until_s is not None:
            insort(self._late, (queued.late_until_s, queued.order[1], queued))
        self._by_frontend.setdefault(queued.frontend_id, {})[queued.ask_id] = queued
        self.requests += 1
        self.prompt_tokens += ask.prompt_tokens

    def _accounts_for(self, model: str, priority: int) -> Accounts:
        of_model = self._accounts.setdefault(model, {})
        known = of_model.get(priority)
        if known is None:
            known = of_model[priority] = Accounts(weights=self._tenant_weights)
        return known

    def _detach(self, queued: QueuedAsk, now: float, *, served_tokens: int) -> tuple[Subqueue, TenantQueue[QueuedAsk]]:
        """Removes an ask from everything but its subqueue."""
        subqueue, tenant_queue = queued.subqueue, queued.tenant_queue
        assert subqueue is not None
        assert tenant_queue is not None
        queued.subqueue = queued.tenant_queue = None
        self._loads.remove(queued.priority, tenant_queue.account, queued.tokens)
        subqueue.rate.on_removed(now, served_tokens=served_tokens)
        # A tuple sorts before the longer one that it is the start of, so the position is that of the ask itself.
        del self._ends[bisect_left(self._ends, (queued.ends_s, queued.order[1]))]
        if queued.late_until_s is not None:
            del self._late[bisect_left(self._late, (queued.late_until_s, queued.order[1]))]
        of_frontend = self._by_frontend[queued.frontend_id]
        del of_frontend[queued.ask_id]
        if not of_frontend:
            del self._by_frontend[queued.frontend_id]
        self.requests -= 1
        self.prompt_tokens -= queued.ask.prompt_tokens
        return subqueue, tenant_queue

    def _remove_if_empty(self, subqueue: Subqueue, priority: int) -> None:
        if not subqueue.by_priority[priority]:
            subqueue.remove_priority(priority)
            self._remove_accounts_if_idle(subqueue.key.kind.model, priority)
            if not subqueue.by_priority:
                del self._subqueues[subqueue.key]

    def _remove_accounts_if_idle(self, model: str, priority: int) -> None:
        if not self._accounts[model][priority]:
            del self._accounts[model][priority]
            if not self._accounts[model]:
                del self._accounts[model]

    def _make_room(self, queued: QueuedAsk, now: float, wait_s: float | None) -> list[QueuedAsk]:
        """Displaces asks to make room for a new one. Raises OverloadedError, and displaces none, when that is not allowed or not enough."""
        ask = queued.ask
        if queued.key not in self._subqueues and not self._may_add_subqueue(ask.tenant):
            raise self._full("requests of too many kinds are queued", wait_s)
        displaced: list[QueuedAsk] = []
        while self.requests and not self._has_room(ask):
            victim = self._victim(queued) if len(displaced) < DISPLACED_MAX else None
            if victim is None:
                # Displacing as many as allowed does not make enough room, so all of them stay. They keep their place, since `order` is
                # unchanged.
                for each in displaced:
                    self._insert(each, now)
                raise self._full(f"the queue is full with {self.requests} requests", wait_s)
            self.remove(victim, now)
            displaced.append(victim)
        return displaced

    def _has_room(self, ask: Ask) -> bool:
        prompt_tokens = self.prompt_tokens + ask.prompt_tokens
        return self.requests < self._settings.requests_max and prompt_tokens <= self._settings.prompt_tokens_max

    def _may_add_subqueue(self, tenant: str) -> bool:
        if len(self._subqueues) >= self._settings.subqueues_max:
            return False
        own_max = max(1, int(SUBQUEUES_PER_TENANT * self._settings.subqueues_max))
        if not tenant or len(self._subqueues) < own_max:
            return True
        own = sum(
            any(tenants.queue_of(tenant).items for tenants in subqueue.by_priority.values())
            for subqueue in self._subqueues.values()
        )
        return own < own_max

    def _victim(self, queued: QueuedAsk) -> QueuedAsk | None:
        """Returns the last ask of the heaviest tenant of the lowest priority. None: no ask may be displaced.

        It may be when its priority is lower than that of the new ask; or equal, and its tenant is heavier than the new ask's tenant
        with the new ask. So one tenant's flood does not shut out the others.
        """
        lowest = min(self._loads.priorities, default=None)
        if lowest is None or lowest > queued.priority:
            return None
        heaviest = self._loads.heaviest(lowest)
        tenant_queues = (
            tenant_queue
            for subqueue in self._subqueues.values()
            if (tenants := subqueue.by_priority.get(lowest)) and (tenant_queue := tenants.get(heaviest.tenant))
        )
        last = max((each.last for each in tenant_queues), key=lambda each: each.order)
        if lowest == queued.priority:
            newcomer = self._loads.of(lowest, self._account_of(queued))
            if not self._loads.is_lighter(newcomer, queued.tokens, heaviest, last_tokens=last.tokens):
                return None
        return last

    def _account_of(self, queued: QueuedAsk) -> Account:
        """Returns the account that the ask would be charged to if it was added now."""
        tenant, accounts = queued.ask.tenant, self._accounts.get(queued.ask.model, {}).get(queued.priority)
        if accounts is None:
            return Account(tenant, self._tenant_weights.get(tenant, 1.0))
        return accounts.of(tenant)

    def _full(self, message: str, wait_s: float | None) -> OverloadedError:
        return OverloadedError(message, reason="queue_full", retry_after_s=self.retry_after_s(wait_s))
