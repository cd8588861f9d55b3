"""Learning of cost coefficients from observations, robust and bounded; transfer times by distance; credit for slower tiers."""

from random import Random

import pytest

from kvmesh.core import KvTier, LoadRecord, PerformanceProfile, Report, ReportKind
from services.router.core import RouterCore
from services.router.workers.coefficients import Coefficients, CoefficientSource
from services.router.workers.cost_settings import CostSettings
from services.router.workers.handoff_times import Distance, HandoffEstimator
from tests.unit.router_fleets import ask, core, join, store_blocks


def note(kind: str, elapsed_s: float, **options) -> Report:
    return Report(kind=ReportKind(kind), elapsed_s=elapsed_s, **options)


def learned(true_base_s: float, true_per_token_s: float, *, outliers: float = 0.0, rounds: int = 400) -> Coefficients:
    generator = Random(3)
    coefficients = Coefficients(None, itl_target_s=0.1)
    for _ in range(rounds):
        tokens = int(2 ** generator.uniform(3, 13))
        took_s = (true_base_s + true_per_token_s * tokens) * generator.uniform(0.9, 1.1)
        if generator.random() < outliers:
            took_s *= 50
        coefficients.prefill.learn(took_s, 1, tokens, 0)
    return coefficients


@pytest.mark.parametrize(("base_s", "per_token_s"), [(0.004, 0.002), (0.05, 0.0001), (0.001, 0.000002)])
def test_coefficients_adapt_to_a_worker_unlike_the_defaults(base_s, per_token_s):
    """For a worker up to fifty times slower or faster than the defaults, predictions are within 20 % after 400 requests."""
    coefficients = learned(base_s, per_token_s)
    for tokens in (100, 1000, 8000):
        assert coefficients.prefill_s(tokens, tokens) == pytest.approx(base_s + per_token_s * tokens, rel=0.2)


def test_outliers_have_little_influence():
    """If one observation in twenty takes fifty times as long, for example in a stall, predictions stay within 30 %."""
    coefficients = learned(0.004, 0.0001, outliers=0.05)
    assert coefficients.prefill_s(2000, 2000) == pytest.approx(0.204, rel=0.3)


def test_coefficients_stay_within_bounds():
    """Invalid times are ignored, and extreme times move a coefficient only to its bound."""
    coefficients = Coefficients(None, itl_target_s=0.1)
    for took_s in (0.0, -1.0, float("inf"), float("nan")):
        coefficients.prefill.learn(took_s, 1, 100, 0)
    assert coefficients.prefill.observations == [0, 0, 0]
    for _ in range(3000):
        coefficients.prefill.learn(1e9, 1, 100, 0)
    assert coefficients.prefill.values[1] <= 0.00004 * 1000.001


def test_the_source_of_a_coefficient_is_reported():
    """Each coefficient has a source (default, profile or learned) and a number of observations."""
    coefficients = Coefficients(PerformanceProfile(prefill_s_per_token=0.001), itl_target_s=0.1)
    by_name = {each.name: each for each in coefficients.all()}
    assert by_name["prefill_base_s"].source is CoefficientSource.DEFAULT
    assert (by_name["prefill_s_per_token"].source, by_name["prefill_s_per_token"].value) == (
        CoefficientSource.PROFILE,
        0.001,
    )
    coefficients.prefill.learn(0.1, 1, 100, 0)
    by_name = {each.name: each for each in coefficients.all()}
    assert (by_name["prefill_s_per_token"].source, by_name["prefill_s_per_token"].observations) == (
        CoefficientSource.LEARNED,
        1,
    )
    assert by_name["decode_step_base_s"].observations == 0


def pair(**options) -> RouterCore:
    router = core(local_prefill_tokens_max=0, prefill_congested_s=1e9, **options)
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    return router


def test_prefill_and_handoff_times_are_learned_from_reports():
    """With a prefill of 1 ms per token and a handoff of 50 ms, the predictions converge to these times."""
    router = pair()
    for number in range(1, 80):
        now, tokens = float(number * 10), 1000
        placement = router.ask("f", number, ask(f"r{number}", [number], tokens=tokens), now=now, wall=now)
        router.report("f", number, note("prefilled", 1.0, cached_tokens=0))
        router.report("f", number, note("first_token", 1.056))
        router.report("f", number, note("finished", 2.0))
    assert placement.expected_ttft_s == pytest.approx(1.056, rel=0.05)
    assert router.fleet.workers["p1"].targets[0].coefficients.prefill_s(500, 500) == pytest.approx(0.5, rel=0.1)


def test_learning_counts_only_computed_tokens():
    """If the worker had more cached tokens than the router assumed, the time is divided by the tokens that it computed."""
    router = pair()
    for number in range(1, 120):
        now = float(number * 10)
        router.ask("f", number, ask(f"r{number}", [number], tokens=2000), now=now, wall=now)
        router.report("f", number, note("prefilled", 0.1, cached_tokens=1000))
        router.report("f", number, note("finished", 2.0))
    assert router.fleet.workers["p1"].targets[0].coefficients.prefill_s(1000, 1000) == pytest.approx(0.1, rel=0.1)


def test_step_and_prefill_times_are_learned_from_load_records():
    """Pure decode steps teach the step's coefficients, and a prefill queue that never empties teaches the prefill's."""
    router = pair()
    worker = router.fleet.workers["d1"]
    [target] = worker.targets
    record = {"worker_id": "d1", "epoch": 1}
    for number in range(1, 400):
        running = 1 + number % 50
        load_record = LoadRecord(
            **record, sequence=number, step=number, step_s=0.02 + 0.001 * running, running_requests=running
        )
        router.fleet.on_load_record(worker, load_record, now=number / 10)
    assert target.coefficients.step_s(40, 0) == pytest.approx(0.06, rel=0.1)
    assert target.coefficients.step_s(2, 0) == pytest.approx(0.022, rel=0.25)
    for number in range(400, 700):
        load_record = LoadRecord(
            **record,
            sequence=number,
            step=number,
            taken_at_s=number / 10,
            prompt_tokens_total=number * 100,
            waiting_requests=3,
            waiting_prompt_tokens=5000,
        )
        router.fleet.on_load_record(worker, load_record, now=number / 10)
    assert target.coefficients.prefill_s(100, 100) == pytest.approx(0.1, rel=0.2)


def test_learning_can_be_turned_off():
    """With `learning=False` the configured or profiled value is kept."""
    router = pair(cost=CostSettings(learning=False))
    router.ask("f", 1, ask("r1", [1], tokens=1000), now=0.0, wall=0.0)
    router.report("f", 1, note("prefilled", 9.0))
    assert router.fleet.workers["p1"].targets[0].coefficients.prefill.values[1] == 0.00004


def test_near_pairs_are_preferred_and_never_estimated_slower():
    """A decode worker on the prefill worker's host is preferred. Slow transfers within a host raise the estimates of longer distances, too."""
    router = core(prefill_congested_s=1e9)
    join(router, "p1", "prefill", address="h1:1", labels={"zone": "a"})
    join(router, "d1", "decode", address="h1:2", labels={"zone": "a"})
    join(router, "d2", "decode", address="h2:1", labels={"zone": "a"})
    join(router, "d3", "decode", address="h3:1", labels={"zone": "b"})
    for number in range(1, 6):
        assert (
            router.ask(
                "f", number, ask(f"r{number}", [number], tokens=50_000), now=number * 9.0, wall=0
            ).decode.worker_id
            == "d1"
        )
        router.report("f", number, note("finished", 0.0))
    links = HandoffEstimator()
    for _ in range(100):
        links.learn(Distance.HOST, transfer_bytes=1e9, observed_s=5.0)
    host, zone, far = links.times
    assert host[1] == pytest.approx(5e-9, rel=0.1)
    assert host <= zone <= far


def test_slower_tiers_count_for_their_credit():
    """By default blocks in host memory save three quarters of their computation, and blocks on the device all of it."""
    router = core()
    for name in ("d1", "d2", "d3"):
        join(router, name, "decode")
    store_blocks(router.fleet.workers["d1"], [1, 2])
    bit = router.fleet.workers["d2"].feed.bits[0]
    router.index.tiers[KvTier.HOST].store(bit, [1, 2, 3, 4])
    what = ask("r1", [1, 2, 3, 4], tokens=65)
    router.ask("f", 1, ask("r0", [], tokens=65), now=0.0, wall=0.0)
    assert router.placer.cached_tokens.of(what, router.placer.considered).decode.tolist() == [32, 48, 0]
    placement = router.ask("f", 2, what, now=0.0, wall=0.0)
    assert (placement.decode.worker_id, placement.cached_tokens) == ("d2", 48)


def test_a_block_on_several_tiers_counts_for_the_best():
    """A peer's blocks save half of their computation, those in host memory three quarters. Blocks on both count once, for host memory."""
    router = core()
    for name in ("d1", "d2"):
        join(router, name, "decode")
    for name, tier, blocks in (
        ("d1", KvTier.PEER, [1, 2, 3, 4]), ("d1", KvTier.HOST, [1, 2, 3, 4]),
        ("d2", KvTier.PEER, [1, 2, 3, 4]), ("d2", KvTier.HOST, [1, 2]),
    ):  # fmt: skip
        router.index.tiers[tier].store(router.fleet.workers[name].feed.bits[0], blocks)
    what = ask("r1", [1, 2, 3, 4], tokens=65)
    router.ask("f", 1, ask("r0", [], tokens=65), now=0.0, wall=0.0)
    assert router.placer.cached_tokens.of(what, router.placer.considered).decode.tolist() == [48, 40]


def test_a_congested_prefill_pool_is_bypassed():
    """A decode worker computes the prompt itself if the prefill wait is long and its steps have room for chunks."""
    router = core(prefill_congested_s=0.5)
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    for number in (1, 2):
        what = ask(f"r{number}", [number], tokens=10_000)
        assert router.ask("f", number, what, now=0.0, wall=0.0).prefill is not None
    placement = router.ask("f", 3, ask("r3", [3], tokens=2000), now=0.0, wall=0.0)
    assert (placement.prefill, placement.reasons[0]) == (None, "prefill_congested")


def test_the_decode_latency_limits_the_bypass_of_a_congested_pool():
    """A decode worker whose running requests would miss their inter-token latency gets no prompts of a congested prefill pool."""
    slow = PerformanceProfile(itl_target_s=0.01)
    router = core(
        prefill_congested_s=0.1,
    )
    join(router, "p1", "prefill")
    worker = join(router, "d1", "decode", profile=slow)
    router.fleet.on_load_record(worker, LoadRecord(worker_id="d1", epoch=1, running_requests=2), now=0.0)
    for number in range(1, 6):
        assert (
            router.ask("f", number, ask(f"r{number}", [number], tokens=10_000), now=0.0, wall=0.0).prefill is not None
        )


def test_a_prompt_shorter_than_a_block_has_no_handoff():
    """Without a full block to transfer, a prefill leg is not worth its cost."""
    router = core()
    join(router, "p1", "prefill")
    join(router, "d1", "decode")
    assert router.ask("f", 1, ask("r1", [], tokens=15), now=0.0, wall=0.0).reasons == ("short_prompt", "least_loaded")
    assert router.ask("f", 2, ask("r2", [1], tokens=16), now=0.0, wall=0.0).prefill is not None
