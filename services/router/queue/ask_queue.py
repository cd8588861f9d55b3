"""Asks that wait for room: bounded, by priority, then by tenant, then by deadline. Pure; times are arguments.

Asks that the same workers could serve wait in one lane, so nobody waits for room that would not help him. A lane has a class per
priority; a larger one goes first, always. Within a class tenants take turns (`fairness.py`); within a tenant the nearest deadline
goes first, those without one after them, in order of arrival.

Invariants:
1. `requests` and `prompt_tokens` are those of what waits, and within the limits, save that an empty queue takes any prompt.
2. Whatever enters leaves exactly once: served, removed, displaced or expired.
3. A lane exists exactly while something waits in it.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from math import inf

from kvmesh.core import Ask
from kvmesh.errors import OverloadedError
from services.router.queue.drain_rate import DrainRates
from services.router.queue.round_robin import Flow, RoundRobin
from services.router.queue.subqueues import Lane, LaneKey, QueueLimits, Waiting

FLOWS_WEIGHED_MAX = 256
"""Tenants among whom the heaviest is looked for when the queue is full."""
DISPLACED_MAX = 16
"""Asks that go for one newcomer."""


class AskQueue:
    """All lanes."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.requests = 0
        self.prompt_tokens = 0
        self._lanes: dict[LaneKey, Lane] = {}
        self._rates = DrainRates()
        self._by_frontend: dict[str, dict[int, Waiting]] = {}
        self._ends: list[tuple[float, int, Waiting]] = []
        self._entered = 0

    @property
    def lanes(self) -> Collection[Lane]:
        """Those in which somebody waits, the one that has waited longest first."""
        return self._lanes.values()

    def get(self, frontend_id: str, ask_id: int) -> Waiting | None:
        """The ask that waits under that number."""
        return self._by_frontend.get(frontend_id, {}).get(ask_id)

    def is_behind(self, ask: Ask) -> bool:
        """True when somebody waits in the ask's lane who is to be served first, whatever room there is."""
        lane = self._lanes.get(LaneKey.of(ask))
        return lane is not None and lane.priority >= ask.priority

    def expected_wait_s(self, waiting: Waiting, now: float) -> float | None:
        """Time until an ask that would enter now is served, at the rate of late; None while none is known."""
        lane = self._lanes.get(LaneKey.of(waiting.ask))
        if lane is None:
            return 0.0
        rate = lane.rate.tokens_per_s(now)
        return None if rate is None else lane.tokens_ahead(waiting) / rate

    def retry_after_s(self, wait_s: float | None) -> float:
        """What a refused caller is told, given the wait that his ask would have had."""
        limits = self.limits
        return min(limits.retry_after_s_max, max(limits.retry_after_s_min, wait_s or 0.0))

    def enter(self, waiting: Waiting, now: float) -> tuple[float | None, list[Waiting]]:
        """Lets an ask wait; gives the wait to expect and those that had to go for it. Raises OverloadedError when it cannot."""
        timeout_s = waiting.ask.timeout_s
        self._entered += 1
        waiting.order = (inf if timeout_s is None else now + timeout_s, self._entered)
        waiting.ends_s = now + min(self.limits.wait_s_max, inf if timeout_s is None else timeout_s)
        wait_s = self.expected_wait_s(waiting, now)
        if wait_s is not None and timeout_s is not None and wait_s > timeout_s:
            raise OverloadedError(
                f"the request would wait about {wait_s:.3g} s of its {timeout_s:.3g} s",
                reason="deadline_too_near",
                retry_after_s=self.retry_after_s(wait_s - timeout_s),
            )
        displaced = self._make_room(waiting, now, wait_s)
        self._insert(waiting, now)
        return wait_s, displaced

    def remove(self, waiting: Waiting, now: float) -> None:
        """It leaves without having been served."""
        lane, flow = self._forget(waiting, now)
        self._class(lane, waiting).remove(flow, waiting)
        self._tidy(lane, waiting)

    def serve(self, waiting: Waiting, now: float, *, charged_tokens: int) -> None:
        """It leaves because it was placed; its tenant is charged what it really lacked."""
        lane, flow = self._forget(waiting, now, served_tokens=waiting.tokens)
        self._class(lane, waiting).served(flow, waiting, charged_tokens)
        self._tidy(lane, waiting)

    def expire(self, now: float) -> Iterator[Waiting]:
        """Those whose time is over leave."""
        while self._ends and self._ends[0][0] <= now:
            waiting = self._ends[0][2]
            self.remove(waiting, now)
            yield waiting

    def sums(self) -> Mapping[int, tuple[int, int]]:
        """Requests and tokens that nobody holds, by priority."""
        sums: dict[int, tuple[int, int]] = {}
        for lane in self._lanes.values():
            for priority, each in lane.classes.items():
                requests, tokens = sums.get(priority, (0, 0))
                sums[priority] = (requests + sum(len(f.waiting) for f in each.flows()), tokens + each.tokens)
        return sums

    def _insert(self, waiting: Waiting, now: float) -> None:
        key, ask, limits = LaneKey.of(waiting.ask), waiting.ask, self.limits
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, self._rates.rate(key.kind))
        fresh: RoundRobin[Waiting] = RoundRobin(
            quantum_tokens=limits.quantum_tokens, weights=limits.tenant_weights, tenants_max=limits.tenants_max
        )
        waiting.lane = lane
        waiting.flow = lane.open(ask.priority, fresh).add(ask.tenant, waiting)
        lane.rate.entered(now)
        insort(self._ends, (waiting.ends_s, waiting.order[1], waiting))
        self._by_frontend.setdefault(waiting.frontend_id, {})[waiting.ask_id] = waiting
        self.requests += 1
        self.prompt_tokens += ask.prompt_tokens

    def _forget(self, waiting: Waiting, now: float, *, served_tokens: float = 0) -> tuple[Lane, Flow[Waiting]]:
        lane, flow = waiting.lane, waiting.flow
        assert lane is not None
        assert flow is not None
        waiting.lane = waiting.flow = None
        lane.rate.left(now, served_tokens=served_tokens)
        del self._ends[bisect_left(self._ends, (waiting.ends_s, waiting.order[1]))]
        of_frontend = self._by_frontend[waiting.frontend_id]
        del of_frontend[waiting.ask_id]
        if not of_frontend:
            del self._by_frontend[waiting.frontend_id]
        self.requests -= 1
        self.prompt_tokens -= waiting.ask.prompt_tokens
        return lane, flow

    def _class(self, lane: Lane, waiting: Waiting) -> RoundRobin[Waiting]:
        return lane.classes[waiting.ask.priority]

    def _tidy(self, lane: Lane, waiting: Waiting) -> None:
        if not lane.classes[waiting.ask.priority]:
            lane.close(waiting.ask.priority)
            if not lane.classes:
                del self._lanes[lane.key]

    def _make_room(self, waiting: Waiting, now: float, wait_s: float | None) -> list[Waiting]:
        """Displaces what must go for an ask; raises, with nothing changed, when that would not be right or not be enough."""
        limits, ask = self.limits, waiting.ask
        if len(self._lanes) >= limits.lanes_max and LaneKey.of(ask) not in self._lanes:
            raise self._full("too many kinds of requests wait", wait_s)
        displaced: list[Waiting] = []
        while self.requests and not self._has_room(ask):
            victim = self._victim(waiting) if len(displaced) < DISPLACED_MAX else None
            if victim is None:
                for each in displaced:
                    self._insert(each, now)
                raise self._full(f"{self.requests} requests wait, which fills the queue", wait_s)
            self.remove(victim, now)
            displaced.append(victim)
        return displaced

    def _has_room(self, ask: Ask) -> bool:
        limits = self.limits
        return (
            self.requests < limits.requests_max and self.prompt_tokens + ask.prompt_tokens <= limits.prompt_tokens_max
        )

    def _victim(self, waiting: Waiting) -> Waiting | None:
        """The last ask of the heaviest tenant of the lowest class, if that class is lower than the newcomer's, or the same
        and the tenant heavier than the newcomer's with the newcomer. One tenant's flood does not shut out the others."""
        lowest = min((min(lane.classes) for lane in self._lanes.values()), default=None)
        if lowest is None or lowest > waiting.ask.priority:
            return None
        flows = (flow for lane in self._lanes.values() if (of := lane.classes.get(lowest)) for flow in of.flows())
        heaviest = max(islice(flows, FLOWS_WEIGHED_MAX), key=lambda flow: flow.tokens / flow.weight)
        if lowest == waiting.ask.priority and not self._is_lighter(waiting, heaviest):
            return None
        return heaviest.last

    def _is_lighter(self, waiting: Waiting, heaviest: Flow[Waiting]) -> bool:
        lane = self._lanes.get(LaneKey.of(waiting.ask))
        own = lane.classes.get(waiting.ask.priority) if lane is not None else None
        if own is None:
            weight, tokens = self.limits.tenant_weights.get(waiting.ask.tenant, 1.0), 0
        else:
            flow = own.flow(waiting.ask.tenant)
            weight, tokens = flow.weight, flow.tokens
        return (tokens + waiting.tokens) / weight < (heaviest.tokens - heaviest.last.tokens) / heaviest.weight

    def _full(self, message: str, wait_s: float | None) -> OverloadedError:
        return OverloadedError(message, reason="queue_full", retry_after_s=self.retry_after_s(wait_s))
