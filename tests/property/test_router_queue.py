"""The queue, compared with slow references: fair queueing step by step, and a list of all waiting asks."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core import Ask, Placement, WorkerRef
from kvmesh.errors import DeadlineError, OverloadedError
from services.router.core_settings import CoreSettings, QueueSettings
from services.router.explain import DecisionRecord
from services.router.placement.policies import PolicyContext, make_policy
from services.router.queue.accounts import Accounts
from services.router.queue.admission import PLACEMENTS_PER_DRAIN_MAX, Admission
from services.router.queue.fair_queue import FairQueue
from services.router.queue.subqueues import QueuedAsk, SubqueueKey
from services.router.workers.cost_settings import CostSettings

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0}
TENANTS = sorted(WEIGHTS)


@dataclass(eq=False)
class Item:
    """An entry of the queue."""

    tokens: int
    order: tuple[float, int]
    tenant: str = ""


class ReferenceFairQueue:
    """Start-time fair queueing as in the paper, without limits: a virtual time for every tenant that ever had an entry."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Item]] = {}
        self.times: dict[str, float] = {}
        self.present = 0.0
        self.since: dict[str, int] = {}
        self.events = 0

    def add(self, tenant: str, item: Item) -> None:
        if tenant not in self.waiting:
            self.times[tenant] = max(self.present, self.times.get(tenant, 0.0))
            self.touch(tenant)
        self.waiting.setdefault(tenant, []).append(item)
        self.waiting[tenant].sort(key=lambda each: each.order)

    def remove(self, tenant: str, item: Item) -> None:
        self.waiting[tenant].remove(item)
        if not self.waiting[tenant]:
            del self.waiting[tenant]

    def touch(self, tenant: str) -> None:
        self.events += 1
        self.since[tenant] = self.events

    def serve(self, item: Item, charge: int) -> None:
        self.present = max(self.present, self.times[item.tenant])
        self.touch(item.tenant)
        self.times[item.tenant] += charge / WEIGHTS[item.tenant]
        self.remove(item.tenant, item)

    def head(self) -> Item:
        return self.waiting[min(self.waiting, key=lambda each: (self.times[each], self.since[each]))][0]


tokens = st.integers(1, 100)
tenants = st.sampled_from(TENANTS)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("add"), tenants, tokens, st.sampled_from([inf, 1.0, 2.0])),
        st.tuples(st.just("serve"), st.integers(1, 3), tokens, st.none()),
        st.tuples(st.just("remove"), st.integers(0, 50), st.none(), st.none()),
        st.tuples(st.just("look"), st.none(), st.none(), st.none()),
    ),
    max_size=80,
)


def fair(tenants_max: int = 100) -> FairQueue[Item]:
    return FairQueue(Accounts(weights=WEIGHTS, tenants_max=tenants_max))


@settings(max_examples=120, deadline=None)
@given(turns)
def test_the_order_is_that_of_the_paper(steps):
    """The order equals that of the reference for any additions, removals and charges."""
    fast, slow = fair(), ReferenceFairQueue()
    items: list[tuple[Item, object]] = []
    for number, (verb, first, second, third) in enumerate(steps):
        if verb == "add":
            item = Item(second, (third, number), first)
            items.append((item, fast.add(first, item)))
            slow.add(first, item)
        elif verb == "remove" and items:
            item, tenant_queue = items.pop(first % len(items))
            fast.remove(tenant_queue, item)
            slow.remove(item.tenant, item)
        elif verb == "serve":
            for _ in range(min(first, len(items))):
                head = fast.head()
                assert head is slow.head()
                [tenant_queue] = [tenant_queue for item, tenant_queue in items if item is head]
                items = [each for each in items if each[0] is not head]
                slow.serve(head, second)
                fast.serve(tenant_queue, head, second)
        elif verb == "look" and items:
            assert fast.head() is fast.head() is slow.head()
        assert fast.tokens == sum(item.tokens for item, _ in items)
        assert bool(fast) == bool(items)
        for tenant_queue in fast.queues():
            assert tenant_queue.tokens == sum(item.tokens for item, of in items if of is tenant_queue)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_shares_differ_by_at_most_a_request(data):
    """While tenants have waiting entries, each has received its share up to one request, at any time."""
    names = data.draw(st.lists(tenants, min_size=2, unique=True))
    queue = fair()
    number = 0
    largest = data.draw(st.sampled_from([1, 5, 100, 1000]))
    for _ in range(30):
        for name in names:
            number += 1
            queue.add(name, Item(data.draw(st.integers(1, largest)), (inf, number), name))
    served = Counter(dict.fromkeys(names, 0))
    while len(queue.queues()) == len(names):
        for one, two in combinations(names, 2):
            apart = abs(served[one] / WEIGHTS[one] - served[two] / WEIGHTS[two])
            assert apart <= largest / WEIGHTS[one] + largest / WEIGHTS[two]
        head = queue.head()
        served[head.tenant] += head.tokens
        queue.serve(queue.queue_of(head.tenant), head, head.tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(tenants, tokens), max_size=60), st.integers(0, 60), tokens)
def test_a_new_tenant_waits_for_one_round(adds, before, size):
    """However many entries the others have, at most one of each is served before the new tenant's first entry."""
    queue = fair()
    waiting = {}
    for number, (tenant, cost) in enumerate(adds):
        item = Item(cost, (inf, number), tenant)
        waiting[item] = queue.add(tenant, item)
    for _ in range(min(before, len(waiting))):
        head = queue.head()
        queue.serve(waiting.pop(head), head, head.tokens)
    late = Item(size, (inf, len(adds)), "late")
    waiting[late] = queue.add("late", late)
    first = Counter()
    while (head := queue.head()) is not late:
        first[head.tenant] += 1
        queue.serve(waiting.pop(head), head, head.tokens)
    assert not first or max(first.values()) == 1


class SubqueueRig:
    """Requests of one model in several subqueues of one admission, all for the same workers. A placement is charged its tokens."""

    def __init__(self) -> None:
        limits = QueueSettings(tenant_weights=tuple(f"{tenant}={weight}" for tenant, weight in WEIGHTS.items()))
        self.admission = Admission(CoreSettings(queue=limits))
        self.number = 0
        self.room = 0

    def ask(self, tenant: str, kind: int, size: int) -> None:
        self.number += 1
        request = Ask(
            request_id=str(self.number),
            model="m",
            prompt_tokens=size,
            tenant=tenant,
            excluded_worker_ids=(f"none-{kind}",),
        )
        record = DecisionRecord(ask=request, ask_id=self.number, policy=POLICY, decided_at_s=0.0)
        entry = QueuedAsk(frontend_id="f", ask_id=self.number, ask=request, record=record, arrived_s=0.0, tokens=size)
        self.admission.enqueue(entry, 0.0)

    def serve(self) -> Ask | None:
        """Lets one request of the queue be placed, and returns it."""
        self.room = 1
        return next((each.ask for each in self.admission.drain(self._place, 0.0)), None)

    def _place(self, entry: QueuedAsk) -> tuple[Placement, float]:
        if not self.room:
            raise OverloadedError("no room")
        self.room -= 1
        return Placement(reservation_id="r", decode=REF), entry.tokens


kinds = st.integers(0, 4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(tenants, kinds, tokens), max_size=60), st.integers(0, 60), kinds, tokens)
def test_a_new_tenant_waits_for_one_round_in_all_subqueues(adds, before, kind, size):
    """A tenant without earlier requests waits for at most one request of each other tenant, whatever their kinds are."""
    rig = SubqueueRig()
    for tenant, of_kind, cost in adds:
        rig.ask(tenant, of_kind, cost)
    for _ in range(min(before, len(adds))):
        assert rig.serve() is not None
    rig.ask("late", kind, size)
    first: Counter[str] = Counter()
    while (served := rig.serve()) is not None and served.tenant != "late":
        first[served.tenant] += 1
    assert served is not None
    assert max(first.values(), default=0) <= 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_shares_do_not_depend_on_kinds(data):
    """While two tenants have waiting requests in the subqueue that is served, each gets its share of the tokens up to one request."""
    names = data.draw(st.lists(tenants, min_size=2, unique=True))
    largest = data.draw(st.sampled_from([1, 5, 100]))
    rig = SubqueueRig()
    left: Counter[str] = Counter()
    for _ in range(20):
        for name in names:
            # The first tenant spreads its requests over the kinds.
            kind = data.draw(kinds) if name == names[0] else 0
            rig.ask(name, kind, data.draw(st.integers(1, largest)))
            left[name] += 1
    served = Counter(dict.fromkeys(names, 0))
    while all(left.values()):
        for one, two in combinations(names, 2):
            apart = abs(served[one] / WEIGHTS[one] - served[two] / WEIGHTS[two])
            assert apart <= largest / WEIGHTS[one] + largest / WEIGHTS[two] + 1e-6
        ask = rig.serve()
        assert ask is not None
        served[ask.tenant] += ask.prompt_tokens
        left[ask.tenant] -= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), tokens), min_size=1, max_size=80), st.integers(1, 5))
def test_tenants_beyond_the_limit_share_an_account(adds, tenants_max):
    """For any number of tenants, the number of accounts is limited and all entries are served."""
    queue = fair(tenants_max)
    left = {}
    for number, (tenant, size) in enumerate(adds):
        item = Item(size, (inf, number))
        left[item] = queue.add(f"tenant{tenant}", item)
        assert len(list(queue.queues())) <= tenants_max + 1
    while left:
        head = queue.head()
        queue.serve(left.pop(head), head, head.tokens)
    assert not queue
    assert queue.tokens == 0


REF = WorkerRef(worker_id="w", address="w:1", epoch=1)
MODELS = ("m", "n")
POLICY = make_policy("round_robin", PolicyContext(cost=CostSettings(), generator=Random(1)))
entering = st.tuples(
    st.just("ask"),
    st.sampled_from(MODELS),
    st.integers(-2, 2),
    tenants,
    st.integers(1, 60),
    st.sampled_from([None, None, 0.5, 3.0, 20.0]),
    st.sampled_from([False, False, True]),
)
happenings = st.lists(
    st.one_of(
        entering,
        entering,
        entering,
        entering,
        st.tuples(st.just("withdraw"), st.integers(0, 99)),
        st.tuples(st.just("lose"), st.integers(0, 99)),
        st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 7.0])),
        st.tuples(st.just("room"), st.sampled_from(MODELS), st.integers(1, 4)),
    ),
    min_size=30,
    max_size=120,
)
SETTINGS = CoreSettings(
    queue=QueueSettings(
        requests_max=4,
        prompt_tokens_max=150,
        subqueues_max=2,
        wait_s_max=10.0,
        late_share=0.5,
        tenant_weights=tuple(f"{tenant}={weight}" for tenant, weight in WEIGHTS.items()),
    )
)


@dataclass
class AdmissionWithReference:
    """The admission, and a list of the asks that should be waiting."""

    admission: Admission = field(default_factory=lambda: Admission(SETTINGS))
    now: float = 0.0
    waiting: dict[int, QueuedAsk] = field(default_factory=dict)
    answered: Counter[int] = field(default_factory=Counter)
    asked: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    room: Counter[str] = field(default_factory=Counter)

    def ask(
        self, number: int, model: str, priority: int, tenant: str, size: int, timeout_s: float | None, is_late: bool
    ) -> None:
        request = Ask(
            request_id=str(number),
            model=model,
            prompt_tokens=size,
            priority=priority,
            tenant=tenant,
            timeout_s=timeout_s,
        )
        record = DecisionRecord(ask=request, ask_id=number, policy=POLICY, decided_at_s=0.0)
        entry = QueuedAsk(
            frontend_id="f", ask_id=number, ask=request, record=record, arrived_s=self.now, tokens=max(1, size // 2)
        )
        before = dict(self.waiting)
        self.asked.add(number)
        if is_late:
            self.late.add(number)
        try:
            self.admission.enqueue(entry, self.now, is_late=is_late)
        except OverloadedError as error:
            refusal = error
        else:
            refusal = None
            self.waiting[number] = entry
        if refusal is not None:
            assert 1 <= refusal.retry_after_s <= 60
            assert refusal.reason in ("queue_full", "deadline_too_near")
            self.answered[number] += 1
        for answer in self.admission.take_outcomes():
            assert answer.outcome.reason == "queue_displaced"
            # Only an ask of a lower class, or of a heavier tenant of the same class, is displaced.
            lowest = min(map(self.priority, before.values()))
            gone = before.pop(answer.ask_id)
            assert self.priority(gone) == lowest <= self.priority(entry)
            self.left(answer.ask_id)

    def priority(self, entry: QueuedAsk) -> int:
        """Late asks are below all others, but only for half of their longest wait."""
        late_until_s = entry.arrived_s + 0.5 * min(10.0, entry.ask.timeout_s or inf)
        return entry.ask.priority - (1000 if entry.ask_id in self.late and self.now < late_until_s else 0)

    def left(self, number: int) -> None:
        del self.waiting[number]
        self.answered[number] += 1

    def place(self, entry: QueuedAsk) -> tuple[Placement, int]:
        """Uses up capacity, and checks that no other waiting ask has precedence."""
        model = entry.ask.model
        if not self.room[model]:
            raise OverloadedError("no room")
        self.room[model] -= 1
        same = [each for each in self.still_waiting() if each.ask.model == model]
        assert self.priority(entry) == max(map(self.priority, same))
        own = [e for e in same if (e.ask.tenant, self.priority(e)) == (entry.ask.tenant, self.priority(entry))]
        assert entry is min(own, key=lambda each: (_deadline(each), each.ask_id))
        return Placement(reservation_id="r", decode=REF), entry.ask.prompt_tokens

    def still_waiting(self) -> list[QueuedAsk]:
        return [each for each in self.waiting.values() if each.subqueue is not None]

    def drain(self) -> None:
        for answer in self.admission.drain(self.place, self.now):
            entry = self.waiting[answer.ask_id]
            if isinstance(answer.outcome, DeadlineError):
                assert entry.arrived_s + entry.ask.timeout_s <= self.now
            self.left(answer.ask_id)
        for entry in self.waiting.values():
            assert self.now < entry.arrived_s + min(10.0, entry.ask.timeout_s or inf)
        if not self.admission.has_more:
            assert not any(self.room[each.ask.model] for each in self.waiting.values())

    def check(self) -> None:
        queue, waiting = self.admission.queue, self.waiting.values()
        assert queue.requests == len(waiting) <= SETTINGS.queue.requests_max
        assert queue.prompt_tokens == sum(each.ask.prompt_tokens for each in waiting)
        assert queue.prompt_tokens <= SETTINGS.queue.prompt_tokens_max or queue.requests == 1
        assert {each.key for each in queue.subqueues} == {SubqueueKey.of(each.ask) for each in waiting}
        sums = dict.fromkeys(map(self.priority, waiting), (0, 0))
        for each in waiting:
            requests, tokens = sums[self.priority(each)]
            sums[self.priority(each)] = (requests + 1, tokens + each.tokens)
        assert queue.sums() == sums
        assert all(queue.get("f", number) is entry for number, entry in self.waiting.items())


def _deadline(entry: QueuedAsk) -> float:
    return inf if entry.ask.timeout_s is None else entry.arrived_s + entry.ask.timeout_s


@settings(max_examples=120, deadline=None)
@given(happenings)
def test_every_ask_is_answered_once_and_in_order(steps):
    """Whatever is added, removed, displaced or withdrawn, or expires, each ask has one answer, classes are strict and sums are right."""
    rig = AdmissionWithReference()
    for number, (verb, *words) in enumerate(steps, start=1):
        if verb == "ask":
            rig.ask(number, *words)
        elif verb in ("withdraw", "lose") and rig.waiting:
            chosen = sorted(rig.waiting)[words[0] % len(rig.waiting)]
            if verb == "withdraw":
                rig.admission.withdraw(rig.waiting[chosen], rig.now)
                [answer] = rig.admission.take_outcomes()
                assert answer.ask_id == chosen
            else:
                rig.admission.forget(rig.waiting[chosen], rig.now)
            rig.left(chosen)
        elif verb == "pass":
            rig.now += words[0]
            rig.drain()
        elif verb == "room":
            rig.room[words[0]] += words[1]
            rig.drain()
            rig.room.clear()
        rig.check()
    rig.now += 1000.0
    rig.drain()
    assert rig.answered == Counter(rig.asked)
    assert (rig.admission.queue.requests, rig.admission.queue.prompt_tokens) == (0, 0)
    assert SETTINGS.queue.requests_max < PLACEMENTS_PER_DRAIN_MAX
