"""Requests that a prefill worker answers itself: the reservations of the router, and what it learns from them."""

from itertools import count

import pytest

from kvmesh.core import Handoff, Report, ReportKind
from kvmesh.errors import LostError, OverloadedError
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.explain import explain_candidates
from services.router.health import breaker
from services.router.health.breaker import BreakerSettings, BreakerState
from services.router.queue.admission import Queued
from tests.unit.router_fleets import ask, core, join

BREAKER = BreakerSettings(failures_max=3, pause_min_s=1)
numbers = count(1)


@pytest.fixture(autouse=True)
def one_probe_closes_a_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PROBE_SUCCESSES", 1)


def pair(**options) -> RouterCore:
    router = core(breaker=BREAKER)
    join(router, "p1", "prefill", **options)
    join(router, "d1", "decode", **options)
    return router


def place(router: RouterCore, now: float = 0.0, *, tokens: int = 1) -> int:
    number = next(numbers)
    asked = ask(f"r{number}", range(1000 * number, 1000 * number + 8), expected_output_tokens=tokens)
    placement = router.ask("f", number, asked, now=now, wall=now)
    assert placement.prefill is not None
    return number


def report(
    router: RouterCore, number: int, kind: str, *, now: float = 0.0, answered: bool = False, elapsed_s=0.1, **more
) -> None:
    note = Report(kind=ReportKind(kind), elapsed_s=elapsed_s, is_answered_by_prefill=answered, **more)
    assert router.report("f", number, note, now=now) is not None


def sums(router: RouterCore, name: str) -> tuple[int, int, int]:
    (target,) = router.fleet.workers[name].targets
    return target.requests_in_flight, target.prompt_tokens_in_flight, target.kv_blocks_in_flight


@pytest.mark.parametrize(
    ("tokens", "handoff", "kept"),
    [(1, Handoff.SEQUENTIAL, (0, 0, 0)), (2, Handoff.SEQUENTIAL, (1, 0, 9)), (1, Handoff.RENDEZVOUS, (1, 0, 9))],
)
def test_a_single_token_request_reserves_no_decode_capacity(tokens, handoff, kept):
    """It reserves decode capacity only if its KV is transferred. Its prefill reservation is as usual, and all reservations are released."""
    router = pair(handoffs=(handoff,), rendezvous="p1:9")
    number = place(router, tokens=tokens)
    assert sums(router, "d1") == kept
    assert sums(router, "p1")[:2] == (1, 128)
    report(router, number, "prefilled", cached_tokens=0)
    assert sums(router, "p1")[:2] == (0, 0)
    report(router, number, "finished", answered=True, output_tokens=1)
    assert sums(router, "d1") == (0, 0, 0)
    assert len(router.book) == 0


@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_of_the_prefill_worker_is_no_success_of_decode(answered):
    """Only the decode worker's own answer closes its breaker."""
    router = pair()
    for _ in range(3):
        report(router, place(router), "failed", error=LostError("gone"), failed_worker_id="d1")
    number = place(router, 2.0)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1
    report(router, number, "prefilled", now=2.1)
    report(router, number, "finished", now=2.1, answered=answered)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == (1 if answered else 0)
    for _ in range(2):  # The breaker admits another probe.
        place(router, 2.2)


def test_an_answer_of_the_prefill_worker_closes_its_breaker():
    router = pair()
    for _ in range(3):
        report(router, place(router), "failed", error=LostError("gone"), failed_worker_id="p1")
    number = place(router, 2.0)
    report(router, number, "prefilled", now=2.1)
    report(router, number, "finished", now=2.1, answered=True)
    assert router.health.count_breakers(BreakerState.CLOSED) == 2


def test_an_answer_of_the_prefill_worker_teaches_no_handoff_time():
    """No KV was transferred, which must not count as a transfer in no time."""
    learned = {}
    for answered in (True, False):
        router = pair()
        for _ in range(50):
            number = place(router)
            report(router, number, "prefilled", cached_tokens=0)
            if not answered:
                report(router, number, "first_token", elapsed_s=0.2)
            report(router, number, "finished", answered=answered)
        learned[answered] = [count for model in router.placer.handoffs._models for count in model.observations]
        (target,) = router.fleet.workers["p1"].targets
        assert max(target.coefficients.prefill.observations) > 0
    assert not any(learned[True]) and any(learned[False])


def full(*, prompt_tokens: int = 262_144, waits: bool = False) -> RouterCore:
    """Returns a router with one pair, whose decode worker is full with one request."""
    queue = QueueSettings() if waits else QueueSettings(requests_max=0)
    router = core(requests_per_decode_max=1, prompt_tokens_per_prefill_max=prompt_tokens, queue=queue)
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    place(router, tokens=9)
    return router


def test_a_full_decode_worker_does_not_block_single_tokens():
    """Other requests are refused or wait. A single-token request is placed, even past requests that wait for decode capacity."""
    router = full()
    with pytest.raises(OverloadedError):
        place(router, tokens=2)
    for _ in range(5):
        place(router)
    waiting = full(waits=True)
    asked = ask("w", range(8), expected_output_tokens=2)
    assert isinstance(waiting.ask("f", 10**6, asked, now=0.0, wall=0.0), Queued)
    place(waiting)
    assert waiting.queue.requests == 1


def test_a_full_prefill_worker_blocks_single_tokens():
    """A decode worker does not compute such a prompt instead."""
    router = full(prompt_tokens=200)
    place(router)
    with pytest.raises(OverloadedError):
        place(router)


def test_a_rendezvous_needs_decode_capacity_for_single_tokens():
    """With a rendezvous the frontend starts both legs at once."""
    router = core(requests_per_decode_max=1, queue=QueueSettings(requests_max=0))
    join(router, "p1", "prefill", handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9")
    join(router, "d1", "decode", handoffs=(Handoff.RENDEZVOUS,), rendezvous="p1:9")
    place(router)
    with pytest.raises(OverloadedError):
        place(router)


def test_a_single_token_placement_is_explained():
    """The explanation lists the pair as a candidate even if its decode worker is full."""
    router = full()
    number = place(router)
    record = router.history.get(f"r{number}")
    assert record is not None
    (candidate,) = explain_candidates(record)
    assert candidate.removed_by == "" and candidate.cost < 60
