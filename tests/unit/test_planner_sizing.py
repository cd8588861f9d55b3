"""Sizes of pools, and the limits that determine them."""

import math

import pytest

from kvmesh.core import PerformanceProfile
from kvmesh.core.planning import Load, PoolLimits, Shape, Targets
from services.planner.sizing.demand import lengths_of_buckets, log_normal
from services.planner.sizing.forecast import Corrections, LatencyForecast
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed, profile_of, speed_of
from tests.demand import demand_of

TARGETS = Targets(model="m", ttft_s=2.0, itl_s=0.05)


def demand(rate: float, prompt: float = 1000, output: float = 200, hit_rate: float = 0.0):
    return demand_of(Load(requests_per_s=rate, prompt_tokens=prompt, output_tokens=output, hit_rate=hit_rate))


def limit(rate: float = 100.0, *, speed: Speed | None = None, **targets: object) -> str:
    made = Targets(**{"model": "m", "ttft_s": 2.0, "itl_s": 0.05, **targets})
    return Sizer(speed=speed or Speed(), targets=made).size(demand(rate)).limit


def test_a_decode_batch_follows_from_littles_law():
    """5 requests/s of 200 tokens on one worker with steps of 8 ms + 0.2 ms per request: batch = 1000 (0.008 + 0.0002 batch), so 10."""
    forecast = LatencyForecast(
        speed=Speed(), demand=demand(5), shape=Shape(prefill_workers=1, decode_workers=1), targets=TARGETS
    )
    assert forecast.batch == pytest.approx(10.0)
    assert forecast.step_s == pytest.approx(0.010)


def test_prompts_on_decode_workers_stretch_their_steps():
    """10 prompts/s of 1000 tokens take half of the time of two workers, so the steps of their batches take twice as long."""
    shape = Shape(prefill_workers=0, decode_workers=2)
    forecast = LatencyForecast(speed=Speed(), demand=demand(10, output=1), shape=shape, targets=TARGETS)
    batch = forecast.batch
    assert forecast.step_s == pytest.approx(2 * (0.008 + 0.0002 * batch))


def test_the_cheapest_pools_keep_the_targets_and_one_worker_less_does_not():
    """For several loads the chosen pools meet the targets, and pools with one worker less do not."""
    sizer = Sizer(speed=Speed(), targets=TARGETS)
    for rate in (3.0, 20.0, 75.0):
        found = sizer.size(demand(rate))
        assert not found.limit
        assert found.forecast.meets
        for prefill, decode in ((1, 0), (0, 1)):
            less = Shape(
                prefill_workers=found.shape.prefill_workers - prefill,
                decode_workers=found.shape.decode_workers - decode,
            )
            if less.prefill_workers and less.decode_workers:
                assert not sizer.forecast(demand(rate), less).meets


def test_cached_prompts_need_fewer_prefill_workers():
    """A hit rate of one half reduces the prefill workers to at most 60 %, and does not change the decode workers."""
    sizer = Sizer(speed=Speed(), targets=TARGETS)
    cold, warm = sizer.size(demand(80)).shape, sizer.size(demand(80, hit_rate=0.5)).shape
    assert warm.prefill_workers <= 0.6 * cold.prefill_workers
    assert warm.decode_workers == cold.decode_workers


def test_an_expensive_pool_is_used_less():
    """The sum of costs decides, not the number of workers."""
    cheap = Sizer(speed=Speed(), targets=TARGETS).size(demand(50))
    targets = Targets(model="m", ttft_s=2.0, itl_s=0.05, decode=PoolLimits(cost_per_worker=8.0))
    expensive = Sizer(speed=Speed(), targets=targets).size(demand(50))
    assert expensive.shape.decode_workers <= cheap.shape.decode_workers
    assert expensive.cost == expensive.shape.prefill_workers + 8 * expensive.shape.decode_workers


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("", {}),
        ("prefill_time", {"ttft_s": 0.02}),
        ("step_time", {"itl_s": 0.007}),
        ("transfer", {"speed": Speed(transfer_bytes_per_s=5e7)}),
        ("prefill_capacity", {"prefill": PoolLimits(workers_max=2)}),
        ("decode_capacity", {"decode": PoolLimits(workers_max=2)}),
        ("kv_capacity", {"speed": Speed(kv_tokens=4000), "decode": PoolLimits(workers_max=20)}),
        ("kv_capacity", {"speed": Speed(kv_tokens=1000)}),
    ],
)
def test_the_limit_of_the_targets_is_named(named: str, options: dict[str, object]):
    """The limit is one word, or empty if the targets are met."""
    assert limit(**options) == named


def test_a_target_that_no_size_meets_does_not_cost_all_workers():
    """If no size meets a target, the pools are sized for the requests that can meet it."""
    sizer = Sizer(speed=Speed(), targets=Targets(model="m", ttft_s=0.15, itl_s=0.05))
    found = sizer.size(demand(20))
    assert found.limit == "prefill_time"
    assert found.forecast.is_stable
    assert found.cost < 20


def test_a_cost_limit_is_spent_on_the_best_split():
    """No other split of the same cost has a noticeably higher goodput."""
    targets = Targets(model="m", ttft_s=2.0, itl_s=0.05, cost_max=6)
    sizer = Sizer(speed=Speed(), targets=targets)
    found = sizer.size(demand(200))
    assert found.cost <= 6
    best = max(sizer.goodput_per_s(demand(200), Shape(prefill_workers=n, decode_workers=6 - n)) for n in range(1, 6))
    assert sizer.goodput_per_s(demand(200), found.shape) >= 0.99 * best


def test_corrections_shift_the_latencies():
    """If observed latencies are twice as long as predicted, the pools are those for targets half as long."""
    halved = Targets(model="m", ttft_s=1.0, itl_s=0.025)
    corrected = Sizer(speed=Speed(), targets=TARGETS, corrections=Corrections(wait=2.0, itl=2.0)).size(demand(40))
    assert corrected.shape == Sizer(speed=Speed(), targets=halved).size(demand(40)).shape


def test_lengths_keep_their_mean():
    """Lengths from buckets keep the exact mean of the counter, because buckets give only ranges."""
    buckets = [(16.0, 0.0), (64.0, 30.0), (256.0, 90.0), (math.inf, 100.0)]
    lengths = lengths_of_buckets(buckets, 120.0)
    assert sum(share for _, share in lengths) == pytest.approx(1.0)
    assert sum(tokens * share for tokens, share in lengths) == pytest.approx(120.0)
    assert lengths_of_buckets([(16.0, 0.0), (math.inf, 0.0)], 120.0) == []
    assert sum(tokens * share for tokens, share in log_normal(500.0, 0.8)) == pytest.approx(500.0)


def test_an_incomplete_profile_lists_missing_coefficients():
    """No coefficient is guessed. A complete profile gives the speed that it was made from."""
    assert speed_of(PerformanceProfile(decode_step_base_s=0.01)) == ["prefill_s_per_token", "decode_s_per_request"]
    speed = speed_of(profile_of(Speed(prefill_s_per_token=3e-5)), kv_tokens=1000, running_max=8)
    assert isinstance(speed, Speed)
    assert (speed.prefill_s_per_token, speed.kv_tokens, speed.running_max) == (3e-5, 1000, 8)
