"""Pairs of workers whose KV path fails, and pairs with slow handoffs, with a whole router core."""

from itertools import count

import pytest

from kvmesh.core import FailingKvPath, LoadRecord, Placement, Report, ReportKind
from kvmesh.errors import UnavailableError
from services.router.core import RouterCore
from services.router.explain import explain
from services.router.workers.learning import HANDOFFS_MIN
from services.router.workers.slow_pairs import FACTOR_MAX, HALF_LIFE_S, PAIRS_MAX, SlowPairs
from tests.unit.router_fleets import ask, core, join

numbers = count(1)


def fleet_of(*names: str, **settings) -> RouterCore:
    router = core(**settings)
    for name in names:
        join(router, name, "prefill" if name[0] == "p" else "decode")
    return router


def load(router: RouterCore, decode: str, *failing: str, **values) -> None:
    """Applies a load record in which a decode worker cannot pull KV from some prefill workers."""
    paths = tuple(FailingKvPath(worker_id=name, reason="unreachable") for name in failing)
    record = LoadRecord(worker_id=decode, epoch=1, failing_kv_paths=paths, **values)
    router.fleet.on_load_record(router.fleet.workers[decode], record)


def place(router: RouterCore, now: float = 0.0, **options) -> tuple[int, Placement]:
    number = next(numbers)
    hashes = [number * 1000 + block for block in range(8)]
    placement = router.ask("f", number, ask(f"r{number}", hashes, **options), now=now, wall=now)
    assert isinstance(placement, Placement)
    return number, placement


def pair_of(placement: Placement) -> tuple[str, str]:
    return placement.prefill.worker_id if placement.prefill else "-", placement.decode.worker_id


def pairs(router: RouterCore, times: int = 60, now: float = 0.0, **options) -> set[tuple[str, str]]:
    """Returns the pairs of some requests, which are cancelled at once."""
    used = set()
    for _ in range(times):
        number, placement = place(router, now, **options)
        used.add(pair_of(placement))
        router.report("f", number, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1), now=now)
    return used


def test_a_pair_with_a_failing_kv_path_is_not_used() -> None:
    """Both workers are used with other partners, until the decode worker's load record no longer lists the path."""
    router = fleet_of("p1", "p2", "d1", "d2")
    load(router, "d1", "p1", "gone")
    placed = {pair_of(place(router)[1]) for _ in range(60)}
    assert {("p2", "d1"), ("p1", "d2")} <= placed <= {("p2", "d1"), ("p1", "d2"), ("p2", "d2")}
    assert router.fleet.failing_kv_pairs() == {("p1", "d1")}
    load(router, "d1")
    assert ("p1", "d1") in {pair_of(place(router)[1]) for _ in range(60)}


def test_a_decode_worker_without_a_path_computes_prompts_itself() -> None:
    """The reason is `no_kv_path`. The worker stays in use beside one that has a path."""
    router = fleet_of("p1", "p2", "d1")
    load(router, "d1", "p1", "p2")
    _, placement = place(router)
    assert (pair_of(placement), placement.reasons[0]) == (("-", "d1"), "no_kv_path")
    join(router, "d2", "decode")
    held = [pair_of(place(router)[1]) for _ in range(60)]
    assert {pair for pair in held if pair[1] == "d1"} == {("-", "d1")}
    assert {pair for pair in held if pair[1] == "d2"} <= {("p1", "d2"), ("p2", "d2")}
    assert ("-", "d1") in held


def test_a_decode_worker_without_a_path_serves_when_others_are_full() -> None:
    """If the only decode worker with a path is full, the one without a path computes the prompt."""
    router = fleet_of("p1", "d1", "d2", requests_per_decode_max=1)
    load(router, "d1", "p1")
    placed = [place(router)[1] for _ in range(2)]
    assert {pair_of(each) for each in placed} == {("p1", "d2"), ("-", "d1")}
    assert {each.reasons[0] for each in placed if each.prefill is None} == {"no_kv_path"}


def test_exclusions_count_with_failing_paths() -> None:
    """If the request excludes the only prefill worker with a path, the decode worker computes the prompt."""
    router = fleet_of("p1", "p2", "d1")
    load(router, "d1", "p1")
    _, placement = place(router, excluded_worker_ids=("p2",))
    assert (pair_of(placement), placement.reasons[0]) == (("-", "d1"), "no_kv_path")


def test_a_pinned_pair_with_a_failing_path_is_refused() -> None:
    """The refusal has the reason `kv_path_failing`."""
    router = fleet_of("p1", "p2", "d1")
    load(router, "d1", "p1")
    with pytest.raises(UnavailableError) as refusal:
        place(router, pinned_prefill_worker_id="p1")
    assert refusal.value.reason == "kv_path_failing"


@pytest.mark.parametrize("policy", ["kv", "round_robin", "random", "least_loaded", "power_of_two"])
def test_no_policy_uses_failing_pairs(policy: str) -> None:
    """Failing pairs are excluded even by policies that do not consider transfers."""
    router = fleet_of("p1", "p2", "d1", "d2", policy=policy)
    load(router, "d1", "p1")
    load(router, "d2", "p2")
    assert pairs(router) == {("p2", "d1"), ("p1", "d2")}


def test_explain_shows_failing_pairs() -> None:
    """The explanation lists them as removed, not as candidates."""
    router = fleet_of("p1", "p2", "d1")
    load(router, "d1", "p1")
    number, _ = place(router)
    record = router.history.get(f"r{number}")
    assert record is not None
    listed = {
        (each.prefill.worker_id, each.decode.worker_id): each.removed_by
        for each in explain(record).candidates
        if each.prefill and each.decode
    }
    assert listed == {("p2", "d1"): "", ("p1", "d1"): "kv_path_failing"}


def hand_over(router: RouterCore, prefill: str, decode: str, handoff_s: float, now: float, **end) -> None:
    """Reports one request on the pair, with the given duration of the handoff."""
    number, placement = place(router, now, pinned_prefill_worker_id=prefill, pinned_decode_worker_id=decode)
    assert pair_of(placement) == (prefill, decode)
    for kind, elapsed_s in (("prefilled", 0.01), ("first_token", 0.01 + handoff_s), ("finished", 0.02 + handoff_s)):
        options = end if kind == "finished" else {}
        router.report("f", number, Report(kind=ReportKind(kind), elapsed_s=elapsed_s, **options), now=now)


def with_known_times(*names: str) -> RouterCore:
    """Returns a fleet whose handoffs took 20 ms so far."""
    router = fleet_of(*names)
    for number in range(HANDOFFS_MIN + 20):
        hand_over(router, f"p{number % 2 + 1}", "d2", 0.02, 0.0)
    return router


def test_a_slow_pair_costs_more_until_it_is_forgotten() -> None:
    """Other pairs are chosen, and the expected time to the first token of the slow pair grows. Without handoffs the factor decays."""
    router = with_known_times("p1", "p2", "d1", "d2")
    for _ in range(3):
        hand_over(router, "p1", "d1", 2.0, 1.0)
    used = pairs(router, 100, now=1.5)
    assert ("p1", "d1") not in used
    assert {("p2", "d1"), ("p1", "d2")} <= used
    pin = {"pinned_prefill_worker_id": "p1", "pinned_decode_worker_id": "d1"}
    other = {"pinned_prefill_worker_id": "p2", "pinned_decode_worker_id": "d1"}
    number, slow = place(router, 1.5, **pin)
    router.report("f", number, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1), now=1.5)
    usual_number, usual = place(router, 1.5, **other)
    router.report("f", usual_number, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1), now=1.5)
    assert slow.expected_ttft_s > usual.expected_ttft_s + 0.1
    record = router.history.get(f"r{number}")
    assert record is not None
    (candidate,) = [each for each in explain(record).candidates if each.prefill and each.decode]
    assert dict(candidate.terms)["slow_pair"] > 0.1
    assert ("p1", "d1") in pairs(router, 200, now=1.5 + 10 * HALF_LIFE_S)
    assert len(router.placer.slow_pairs) == 0


def test_a_recomputed_prompt_teaches_no_transfer_time() -> None:
    """If the decode worker recomputed the prompt, neither the pair nor the distance learns from the request."""
    router = with_known_times("p1", "p2", "d1", "d2")
    before = list(router.placer.handoffs.times)
    for _ in range(5):
        hand_over(router, "p1", "d1", 2.0, 1.0, was_recomputed=True)
    assert len(router.placer.slow_pairs) == 0
    assert list(router.placer.handoffs.times) == before


def test_factors_of_slow_pairs_follow_observations() -> None:
    """A single slow handoff gives no factor and several do. Fast handoffs remove it soon, and it is bounded."""
    slow = SlowPairs()
    slow.learn("p", "d", expected_s=0.01, observed_s=1.0, now=0.0)
    slow.advance(0.0)
    assert slow.factors == {}
    for _ in range(20):
        slow.learn("p", "d", expected_s=0.01, observed_s=1.0, now=1.0)
    slow.advance(2.0)
    assert slow.factors["d"]["p"] == pytest.approx(85, rel=0.1)
    for _ in range(30):
        slow.learn("p", "d", expected_s=0.01, observed_s=1e6, now=2.0)
    slow.advance(3.0)
    assert slow.factors["d"]["p"] <= FACTOR_MAX
    for _ in range(10):
        slow.learn("p", "d", expected_s=0.01, observed_s=0.01, now=3.0)
    slow.advance(4.0)
    assert slow.factors == {}


def test_the_state_of_pairs_is_bounded() -> None:
    """Pairs that are as fast as expected are not stored, and old factors are removed."""
    slow = SlowPairs()
    slow.learn("p", "d", expected_s=0.01, observed_s=0.011, now=0.0)
    assert len(slow) == 0
    for number in range(PAIRS_MAX + 10):
        slow.learn("p", f"d{number}", expected_s=0.01, observed_s=1.0, now=0.0)
    assert len(slow) == PAIRS_MAX
    slow.advance(100 * HALF_LIFE_S)
    assert len(slow) == 0
