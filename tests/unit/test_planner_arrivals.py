"""The present request rate: steady where only chance varies the counts, and new within seconds where the load changed."""

from random import Random

import pytest

from kvmesh.core.planning import Load, Shape, Targets
from services.planner.arrivals import STEADY_S, Arrivals
from services.planner.decide.backlog import catch_up_rate
from services.planner.plan import STARTED, RecentStarts
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from tests.demand import demand_of


def poisson(generator: Random, mean: float) -> int:
    """Arrivals of a second."""
    at, count = generator.expovariate(mean), 0
    while at < 1:
        at, count = at + generator.expovariate(mean), count + 1
    return count


def test_a_burst_shows_within_seconds():
    """10/s, then 30/s: after two seconds the estimate is of the new rate alone."""
    arrivals = Arrivals()
    for _ in range(60):
        arrivals.add(1.0, 10.0)
    assert arrivals.rate == pytest.approx(10.0)
    for _ in range(2):
        arrivals.add(1.0, 30.0)
    assert arrivals.rate == pytest.approx(30.0)
    for _ in range(5):
        arrivals.add(1.0, 10.0)
    assert arrivals.rate == pytest.approx(10.0, rel=0.01)


def test_a_surge_shows_in_one_count():
    """10/s, then 30 in a second: that is no chance, and shows before the estimate of the rate changes. 15 in a second may be chance."""
    arrivals = Arrivals()
    for _ in range(60):
        arrivals.add(1.0, 10.0)
    arrivals.add(1.0, 15.0)
    assert arrivals.surge == 0.0
    arrivals.add(1.0, 30.0)
    assert arrivals.surge == 30.0
    arrivals.add(1.0, 2.0)
    assert arrivals.surge == 0.0


def test_groups_of_requests_are_no_surge():
    """30 requests each third second, for five minutes: such counts vary as much all the time."""
    arrivals = Arrivals()
    surges = []
    for second in range(300):
        arrivals.add(1.0, 30.0 if second % 3 == 0 else 0.0)
        surges.append(arrivals.surge)
    assert not any(surges[60:])


def test_chance_is_no_change():
    """An hour of Poisson arrivals: the estimate stays within four standard deviations of a mean over STEADY_S nearly always."""
    generator, arrivals = Random(5), Arrivals()
    far = 0
    for second in range(3600):
        arrivals.add(1.0, float(poisson(generator, 10.0)))
        assert arrivals.rate is not None
        far += second > STEADY_S and abs(arrivals.rate - 10.0) > 4 * (10.0 / STEADY_S) ** 0.5
    assert far < 72


def test_requests_in_groups_are_no_bursts():
    """Nine requests each third second are 3/s, not 9/s or 0/s, once the grouping is known."""
    arrivals = Arrivals()
    rates = []
    for second in range(300):
        arrivals.add(1.0, 9.0 if second % 3 == 0 else 0.0)
        rates.append(arrivals.rate or 0.0)
    assert min(rates[60:]) > 2.0
    assert max(rates[60:]) < 4.0


def test_a_few_requests_after_silence_are_no_burst():
    """One request in a second of its own says little; ten do."""
    arrivals = Arrivals()
    for _ in range(60):
        arrivals.add(1.0, 0.0)
    arrivals.add(1.0, 1.0)
    assert arrivals.rate == pytest.approx(1 / 61)
    arrivals.add(1.0, 10.0)
    assert arrivals.rate is not None
    assert arrivals.rate > 5


def test_models_are_counted_apart():
    """And the first scrape says nothing: its counters began at an unknown time."""
    starts = RecentStarts()
    starts.add(0.0, {(STARTED, "a"): 1000.0})
    assert starts.rates() == {}
    starts.add(2.0, {(STARTED, "a"): 10.0, (STARTED, "b"): 4.0})
    assert starts.rates() == {"a": 5.0, "b": 2.0}


TARGETS = Targets(model="m", ttft_s=2.0, itl_s=0.05)
SIZER = Sizer(speed=Speed(prefill_base_s=0.0), targets=TARGETS)
DEMAND = demand_of(Load(requests_per_s=24.0, prompt_tokens=1000, output_tokens=100), cv=0.0)
"""A worker computes 10 prompts/s."""


def catch_up(backlog: float, ready: int, wanted: int, ready_in_s: float) -> float:
    return catch_up_rate(
        SIZER,
        DEMAND,
        backlog_tokens=backlog,
        ready=Shape(prefill_workers=ready, decode_workers=2),
        wanted=Shape(prefill_workers=wanted, decode_workers=2),
        ready_in_s=ready_in_s,
        start_s=30.0,
        catch_up_s=10.0,
    )


def test_a_backlog_that_workers_on_their_way_remove_needs_no_more():
    """24/s on 20/s, 20 000 tokens wait beyond the harmless 20 000: in 30 s 120 requests more. Workers that start already count."""
    assert catch_up(40_000, 2, 2, 30.0) == pytest.approx((20 + 4 * 30) / 10)
    assert catch_up(20_000, 2, 2, 30.0) == catch_up(0, 2, 2, 30.0) == pytest.approx(4 * 30 / 10)
    # After 10 s 60 requests wait, and in 20 s four workers compute 320 requests more than come.
    assert catch_up(40_000, 2, 4, 10.0) == 0.0
    assert catch_up(400_000, 2, 4, 10.0) == pytest.approx((380 + 40 - 16 * 20) / 10)
