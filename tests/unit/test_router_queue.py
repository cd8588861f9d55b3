"""Which requests wait in the queue, in which order and for how long, and which are refused."""

import pytest

from kvmesh.core import LoadRecord, Placement, Report, ReportKind
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.queue import charges
from services.router.queue.accounts import Accounts, read_weights
from services.router.queue.admission import PLACEMENTS_PER_DRAIN_MAX, Queued
from services.router.queue.drain_rate import DECAY_S, DrainRate
from services.router.workers import reservations
from tests.unit.router_fleets import ask, core, join, store_blocks


class Stage:
    """A router with one decode worker for `room` requests. The test sets the time."""

    def __init__(self, *, room: int = 1, **queue) -> None:
        self.router: RouterCore = core(requests_per_decode_max=room, queue=QueueSettings(**queue))
        join(self.router, "d1", "decode")
        self.now = 0.0
        self.numbers: dict[str, int] = {}

    def ask(self, name: str, *, tokens: int = 16, **options):
        self.numbers[name] = number = len(self.numbers) + 1
        what = ask(name, options.pop("hashes", ()), tokens=tokens, **options)
        return self.router.ask("f", number, what, now=self.now, wall=self.now)

    def refusal(self, name: str, **options) -> OverloadedError:
        with pytest.raises(OverloadedError) as raised:
            self.ask(name, **options)
        return raised.value

    def finish(self, name: str) -> None:
        assert self.router.report("f", self.numbers[name], Report(kind=ReportKind.FINISHED, elapsed_s=0.0))

    def drain(self) -> list[tuple[str, str]]:
        """Returns the name of each answered request with its worker or its reason."""
        names = {number: name for name, number in self.numbers.items()}
        answers = self.router.drain_queue(now=self.now, wall=self.now)
        return [(names[answer.ask_id], _word(answer.outcome)) for answer in answers]

    def served(self) -> list[str]:
        """Returns the order in which all requests are placed if each finishes at once."""
        order: list[str] = []
        while names := [name for name, _ in self.drain()]:
            for name in names:
                self.finish(name)
            order += names
        return order


def _word(outcome) -> str:
    return outcome.decode.worker_id if isinstance(outcome, Placement) else outcome.reason


def test_requests_wait_for_a_busy_worker():
    """The placement states how long the request waited. Its reservation starts when it leaves the queue."""
    stage = Stage()
    assert isinstance(stage.ask("a"), Placement)
    assert stage.ask("b") == Queued(expected_wait_s=0.0)
    assert stage.drain() == []
    assert len(stage.router.book) == 1
    stage.now = 2.5
    stage.finish("a")
    [answer] = stage.router.drain_queue(now=stage.now, wall=7.0)
    assert answer.outcome.queued_s == 2.5
    assert stage.router.history.get("b").placement == answer.outcome
    assert stage.router.history.get("b").decided_at_s == 7.0
    assert (stage.router.queue.requests, len(stage.router.book)) == (0, 1)


def test_without_a_queue_busy_workers_refuse():
    """`requests_max=0` turns the queue off."""
    stage = Stage(requests_max=0)
    stage.ask("a")
    assert stage.refusal("b").reason == "workers_full"


def test_requests_wait_only_for_capacity():
    """A request that no worker can serve is refused at once. When the last worker leaves, queued requests are refused."""
    stage = Stage()
    stage.ask("a")
    with pytest.raises(UnavailableError):
        stage.ask("x", excluded_worker_ids=("d1",))
    with pytest.raises(Exception, match="no worker serves a model named"):
        stage.ask("y", model="other")
    stage.ask("b")
    stage.router.fleet.unregister("d1")
    assert stage.drain() == [("b", "no_worker")]


def test_priorities_are_strict_and_deadlines_order_a_tenant():
    """The order is by priority, then by deadline, then by arrival."""
    stage = Stage()
    stage.ask("first")
    for name, priority, timeout_s in (
        ("low", -1, 5),
        ("late", 0, None),
        ("later", 0, None),
        ("soon", 0, 9),
        ("sooner", 0, 8),
        ("high", 3, 20),
    ):
        stage.ask(name, priority=priority, timeout_s=timeout_s)
    stage.finish("first")
    assert stage.served() == ["high", "sooner", "soon", "late", "later", "low"]


def test_a_new_request_overtakes_only_lower_priorities():
    """Free capacity goes to queued requests, unless the new request has a higher priority."""
    stage = Stage()
    stage.ask("a")
    stage.ask("b")
    stage.finish("a")
    assert isinstance(stage.ask("c"), Queued)
    assert isinstance(stage.ask("d", priority=1), Placement)
    stage.finish("d")
    assert stage.served() == ["b", "c"]


def test_tenants_share_by_weight():
    """Many requests of one tenant delay another tenant by no more than their share."""
    stage = Stage(tenant_weights=("heavy=2",))
    stage.ask("first")
    for number in range(30):
        stage.ask(f"flood{number}", tokens=100, tenant="flood")
    for number in range(8):
        stage.ask(f"heavy{number}", tokens=100, tenant="heavy")
    stage.ask("small", tokens=10, tenant="small")
    stage.finish("first")
    order = stage.served()
    assert len(order) == 39
    assert order.index("small") <= 3
    assert order.index("heavy7") <= 13
    assert sum(name.startswith("flood") for name in order[: order.index("heavy7")]) == 4


def test_a_tenant_is_charged_for_uncached_tokens(monkeypatch):
    """Cached blocks are looked up when a request leaves the queue, so blocks that were cached meanwhile are free."""
    monkeypatch.setattr(charges, "OUTPUT_TOKEN_WEIGHT", 0.0)
    stage = Stage()
    stage.ask("first")
    for number in range(4):
        stage.ask(f"a{number}", hashes=[1, 2, 3, 4], tokens=64, tenant="a")
        stage.ask(f"b{number}", hashes=[50 + number, 60, 70, 80], tokens=64, tenant="b")
    store_blocks(stage.router.fleet.workers["d1"], [1, 2, 3])
    stage.finish("first")
    # Tenant a was expected to cost 64 tokens per request and was charged 16. It keeps the difference as credit.
    assert stage.served() == ["a0", "b0", "a1", "a2", "a3", "b1", "b2", "b3"]
    assert stage.router.history.get("a3").placement.cached_tokens == 48


def test_a_blocked_subqueue_does_not_block_others():
    """If the first request of one model finds no capacity, requests of another model are placed."""
    stage = Stage()
    join(stage.router, "e1", "decode", model="other")
    stage.ask("a")
    stage.ask("o", model="other")
    stage.ask("b", priority=9)
    stage.ask("p", model="other", priority=-9)
    stage.finish("o")
    assert stage.drain() == [("p", "e1")]
    # Asks with pins or exclusions wait in separate subqueues.
    join(stage.router, "d2", "decode")
    stage.ask("q", pinned_decode_worker_id="d1", priority=50)
    assert stage.drain() == [("b", "d2")]


def test_subqueues_that_share_workers_keep_priorities():
    """Capacity is offered first to the subqueue whose first request has the highest priority."""
    stage = Stage()
    stage.ask("a")
    stage.ask("plain", priority=1)
    stage.ask("pinned", priority=2, pinned_decode_worker_id="d1")
    stage.ask("plain2", priority=3)
    stage.finish("a")
    assert stage.served() == ["plain2", "pinned", "plain"]


def test_the_queue_is_bounded():
    """Requests, tokens and subqueues are limited, with a retry delay. An empty queue accepts any prompt."""
    stage = Stage(requests_max=2, prompt_tokens_max=100, subqueues_max=2)
    stage.ask("a")
    stage.ask("b", tokens=60)
    assert stage.refusal("c", tokens=41).reason == "queue_full"
    stage.ask("d", tokens=40)
    assert stage.refusal("e", tokens=1).retry_after_s == 1.0
    assert (stage.router.queue.requests, stage.router.queue.prompt_tokens) == (2, 100)
    stage = Stage(prompt_tokens_max=100, subqueues_max=1)
    stage.ask("a")
    stage.ask("huge", tokens=1000)
    stage.finish("a")
    assert stage.served() == ["huge"]
    stage.ask("b")
    stage.ask("c")
    assert stage.refusal("d", pinned_decode_worker_id="d1", priority=5).reason == "queue_full"


def test_a_higher_priority_or_a_lighter_tenant_displaces():
    """In a full queue the last request of the heaviest tenant in the lowest priority is displaced."""
    stage = Stage(requests_max=3)
    stage.ask("a")
    for name in ("b", "c", "d"):
        stage.ask(name, tenant="flood")
    assert stage.refusal("e", tenant="flood").reason == "queue_full"
    stage.ask("f", tenant="other")
    assert stage.drain() == [("d", "queue_displaced")]
    stage.ask("g", priority=1)
    assert stage.drain() == [("c", "queue_displaced")]
    assert stage.refusal("h", tenant="other", priority=-1).reason == "queue_full"
    assert stage.refusal("i", tenant="flood").reason == "queue_full"
    stage.finish("a")
    assert stage.served() == ["g", "b", "f"]


def test_the_lowest_priority_of_all_subqueues_is_displaced():
    """The displaced request may be in another subqueue."""
    stage = Stage(requests_max=2)
    join(stage.router, "e1", "decode", model="other")
    stage.ask("a")
    stage.ask("o", model="other")
    stage.ask("b", priority=1)
    stage.ask("p", model="other")
    stage.ask("c", priority=2)
    assert stage.drain() == [("p", "queue_displaced")]


def test_a_refused_request_displaces_no_other():
    """If displacement would not free enough capacity, the queue does not change."""
    stage = Stage(prompt_tokens_max=200)
    stage.ask("a")
    stage.ask("low", priority=-1, tokens=16)
    stage.ask("same", tokens=150)
    assert stage.refusal("big", tokens=180).reason == "queue_full"
    assert stage.drain() == []
    stage.finish("a")
    assert stage.served() == ["same", "low"]


def test_a_wait_ends_after_its_time():
    """A wait beyond the request's timeout is DeadlineError. A wait beyond the limit of the queue is a refusal with a retry delay."""
    stage = Stage(wait_s_max=10.0)
    stage.ask("a")
    stage.ask("b", timeout_s=3.0)
    stage.ask("c", timeout_s=60.0)
    stage.now = 2.9
    assert stage.drain() == []
    stage.now = 3.0
    assert stage.drain() == [("b", "deadline_exceeded")]
    stage.now = 10.0
    [answer] = stage.router.drain_queue(now=10.0, wall=0.0)
    assert (answer.outcome.reason, answer.outcome.retry_after_s) == ("queue_wait_over", 1.0)
    assert isinstance(stage.router.history.get("b").error, DeadlineError)


def test_a_deadline_that_cannot_be_met_is_refused_early():
    """Once the drain rate is known, a request that would wait longer than its timeout is refused at once."""
    stage = Stage(wait_s_max=100)
    stage.ask("a0", tokens=100)
    for number in range(1, 21):
        stage.ask(f"a{number}", tokens=100)
    for number in range(10):
        stage.now += 1.0
        stage.finish(f"a{number}")
        stage.drain()
    # The queue drains at 100 tokens per second, and 1000 tokens wait.
    error = stage.refusal("hurry", tokens=10, timeout_s=4.0, priority=-1)
    assert error.reason == "deadline_too_near"
    assert error.retry_after_s == pytest.approx(6.0, rel=0.1)
    queued = stage.ask("patient", tokens=10, timeout_s=15.0, priority=-1)
    assert queued.expected_wait_s == pytest.approx(10.0, rel=0.1)
    # No request is ahead of the nearest deadline of its tenant. For another tenant the wait depends on its own share.
    assert stage.ask("urgent", tokens=10, timeout_s=4.0).expected_wait_s == 0
    assert stage.ask("tenant", tokens=200, tenant="t").expected_wait_s == pytest.approx(2.0, rel=0.1)
    stage.now += 1000.0
    assert stage.refusal("stuck", tokens=10, timeout_s=9.0, priority=-1).retry_after_s == 60


def test_a_withdrawn_ask_leaves_the_queue():
    """It is answered as cancelled, unless its stream is lost, and frees its place."""
    stage = Stage()
    stage.ask("a")
    stage.ask("b")
    stage.ask("c")
    assert stage.router.withdraw("f", 2, now=1.0)
    assert not stage.router.withdraw("f", 2, now=1.0)
    assert stage.router.withdraw("f", 3, now=1.0, has_caller=False)
    [answer] = stage.router.admission.take_outcomes()
    assert isinstance(answer.outcome, CancelledByCallerError)
    assert (stage.router.queue.requests, stage.router.queue.prompt_tokens, len(stage.router.queue.subqueues)) == (
        0,
        0,
        0,
    )


def test_a_repeated_ask_waits_once():
    """A frontend that reconnects repeats its asks. Another request under a number in use is refused."""
    stage = Stage()
    stage.ask("a")
    stage.router.ask("g", 1, ask("r"), now=0.0, wall=0.0)
    stage.router.ask("g", 1, ask("r"), now=1.0, wall=1.0)
    assert stage.router.queue.requests == 1
    with pytest.raises(InvalidRequestError):
        stage.router.ask("g", 1, ask("other"), now=1.0, wall=1.0)
    assert stage.router.queue.requests == 1
    stage.finish("a")
    [answer] = stage.router.drain_queue(now=2.0, wall=2.0)
    assert answer.outcome.queued_s == 1.0


def test_a_drain_is_bounded():
    """Many queued requests are placed in several drains of limited length."""
    stage = Stage(room=200)
    for number in range(350):
        stage.ask(f"r{number}")
    for number in range(200):
        stage.finish(f"r{number}")
    assert len(stage.drain()) == PLACEMENTS_PER_DRAIN_MAX
    assert stage.router.admission.has_more
    assert len(stage.drain()) == PLACEMENTS_PER_DRAIN_MAX
    assert len(stage.drain()) == 150 - 2 * PLACEMENTS_PER_DRAIN_MAX
    assert not stage.router.admission.has_more


def test_the_timeout_of_a_request_includes_its_wait():
    """The reservation of a request that waited expires when its timeout, counted from its arrival, ends."""
    stage = Stage()
    stage.ask("a")
    stage.ask("b", timeout_s=10.0)
    stage.now = 6.0
    stage.finish("a")
    assert stage.drain() == [("b", "d1")]
    assert not list(stage.router.expire(now=9.9))
    assert [r.request_id for r in stage.router.expire(now=10.0)] == ["b"]


def test_queued_asks_respect_the_bound_of_reservations(monkeypatch):
    """Even if new workers have capacity for all queued requests, the router keeps at most RESERVATIONS_MAX reservations."""
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", 2)
    stage = Stage()
    for name in "abcd":
        stage.ask(name)
    for worker in ("d2", "d3", "d4"):
        join(stage.router, worker, "decode")
    assert [name for name, _ in stage.drain()] == ["b"]
    assert (len(stage.router.book), stage.router.queue.requests) == (2, 2)
    stage.finish("a")
    assert [name for name, _ in stage.drain()] == ["c"]
    assert (len(stage.router.book), stage.router.queue.requests) == (2, 1)


def test_the_drain_rate_decays_and_ignores_idle_time():
    """The rate counts tokens per second while requests wait, and recent ones count more."""
    rate = DrainRate()
    assert rate.tokens_per_s(0.0) is None
    for _ in range(200):
        rate.on_added(0.0)
    for second in range(1, 101):
        rate.on_removed(float(second), served_tokens=50)
    assert rate.tokens_per_s(100.0) == pytest.approx(50, rel=0.06)
    assert rate.tokens_per_s(100.0 + DECAY_S) < 25
    for _ in range(100):
        rate.on_removed(110.0, served_tokens=0)
    steady = rate.tokens_per_s(110.0)
    assert rate.tokens_per_s(1000.0) == steady


def test_tenant_weights_are_parsed():
    """Weights are pairs of a tenant and a positive number. Others are refused."""
    assert read_weights(("a=2", "=0.5", "b=c=1")) == {"a": 2.0, "": 0.5, "b=c": 1.0}
    for wrong in ("a", "a=", "a=x", "a=0", "a=-1", "a=nan", "a=inf"):
        with pytest.raises(InvalidRequestError):
            read_weights((wrong,))


def test_the_order_of_the_queue_does_not_depend_on_the_seed():
    """Two routers with the same history and different seeds place requests in the same order."""

    def order(seed: int) -> list[str]:
        stage = Stage()
        stage.router = core(seed=seed, requests_per_decode_max=1, queue=QueueSettings())
        join(stage.router, "d1", "decode")
        for number in range(20):
            stage.ask(f"r{number}", tenant=f"t{number % 3}", tokens=10 * number + 1, priority=number % 2)
        stage.router.fleet.on_load_record(
            stage.router.fleet.workers["d1"], LoadRecord(worker_id="d1", epoch=1, running_requests=1)
        )
        stage.finish("r0")
        return stage.served()

    assert order(1) == order(2)


def test_an_idle_tenant_saves_up_no_service():
    """A tenant whose first request comes late continues at the present virtual time: it is served next, and then takes turns."""
    accounts = Accounts(weights={})
    busy, late = accounts.of("busy"), accounts.of("late")
    accounts.join(busy)
    for _ in range(10):
        accounts.serve(busy, 100.0)
    accounts.join(late)
    assert late.rank < busy.rank
    accounts.serve(late, 100.0)
    assert busy.rank < late.rank
