"""The estimated request rate is steady while only chance varies the counts, and follows a change of the load within seconds."""

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
    """Returns the arrivals of one second."""
    at, count = generator.expovariate(mean), 0
    while at < 1:
        at, count = at + generator.expovariate(mean), count + 1
    return count


def test_a_burst_shows_within_seconds():
    """After two seconds of 30/s following 10/s the estimate is 30/s."""
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
    """After 10/s, 30 arrivals in one second are a surge, before the estimated rate changes. 15 arrivals may be chance."""
    arrivals = Arrivals()
    for _ in range(60):
        arrivals.add(1.0, 10.0)
    arrivals.add(1.0, 15.0)
    assert arrivals.surge == 0.0
    arrivals.add(1.0, 30.0)
    assert arrivals.surge == 30.0
    arrivals.add(1.0, 2.0)
    assert arrivals.surge == 0.0


def test_groups_of_requests_are_not_a_surge():
    """Groups of 30 requests every third second are not surges, because these counts always vary as much."""
    arrivals = Arrivals()
    surges = []
    for second in range(300):
        arrivals.add(1.0, 30.0 if second % 3 == 0 else 0.0)
        surges.append(arrivals.surge)
    assert not any(surges[60:])


def test_random_arrivals_do_not_change_the_rate():
    """In an hour of Poisson arrivals the estimate is nearly always within four standard deviations of a mean over STEADY_S."""
    generator, arrivals = Random(5), Arrivals()
    far = 0
    for second in range(3600):
        arrivals.add(1.0, float(poisson(generator, 10.0)))
        assert arrivals.rate is not None
        far += second > STEADY_S and abs(arrivals.rate - 10.0) > 4 * (10.0 / STEADY_S) ** 0.5
    assert far < 72


def test_groups_of_requests_are_not_bursts():
    """Nine requests every third second count as 3/s, not as 9/s or 0/s, once the estimator has seen some groups."""
    arrivals = Arrivals()
    rates = []
    for second in range(300):
        arrivals.add(1.0, 9.0 if second % 3 == 0 else 0.0)
        rates.append(arrivals.rate or 0.0)
    assert min(rates[60:]) > 2.0
    assert max(rates[60:]) < 4.0


def test_a_few_requests_after_silence_are_not_a_burst():
    """One request after a minute without requests does not change the rate. Ten in the next second do."""
    arrivals = Arrivals()
    for _ in range(60):
        arrivals.add(1.0, 0.0)
    arrivals.add(1.0, 1.0)
    assert arrivals.rate == pytest.approx(1 / 61)
    arrivals.add(1.0, 10.0)
    assert arrivals.rate is not None
    assert arrivals.rate > 5


def test_models_are_counted_separately():
    """Each model has its own rate. The first scrape is ignored, because its counters started at an unknown time."""
    starts = RecentStarts()
    starts.add(0.0, {(STARTED, "a"): 1000.0})
    assert starts.rates() == {}
    starts.add(2.0, {(STARTED, "a"): 10.0, (STARTED, "b"): 4.0})
    assert starts.rates() == {"a": 5.0, "b": 2.0}


TARGETS = Targets(model="m", ttft_s=2.0, itl_s=0.05)
SIZER = Sizer(speed=Speed(prefill_base_s=0.0), targets=TARGETS)
DEMAND = demand_of(Load(requests_per_s=24.0, prompt_tokens=1000, output_tokens=100), cv=0.0)
"""One worker computes 10 prompts/s."""


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


def test_a_backlog_counts_workers_that_are_starting():
    """The catch-up rate covers the backlog beyond the harmless 20 000 tokens and the growth until new workers serve, less what starting workers
    will compute."""
    assert catch_up(40_000, 2, 2, 30.0) == pytest.approx((20 + 4 * 30) / 10)
    assert catch_up(20_000, 2, 2, 30.0) == catch_up(0, 2, 2, 30.0) == pytest.approx(4 * 30 / 10)
    # After 10 s 60 requests wait. In the next 20 s four workers compute 320 requests more than arrive.
    assert catch_up(40_000, 2, 4, 10.0) == 0.0
    assert catch_up(400_000, 2, 4, 10.0) == pytest.approx((380 + 40 - 16 * 20) / 10)
