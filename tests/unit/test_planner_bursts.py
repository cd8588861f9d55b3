"""Bursty arrivals: the attainment that a replay predicts, and when the planner starts workers for a rise."""

from random import Random

import pytest

from kvmesh.core.planning import Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.decide.stabiliser import Excursions
from services.planner.sizing.bursts import HISTORY_STARTS, LEFT_OUT_STARTS, BurstHistory, Bursts
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from services.whatif.placers import MODEL
from services.whatif.simulation import Simulation, SimulationSettings, Static

START_S = 10.0
PROMPT = 2000
TARGETS = Targets(model=MODEL, ttft_s=2.0, itl_s=0.05)


def bursty(seconds: int, generator: Random) -> list[RecordedRequest]:
    """Returns bursts of 20 to 60 requests within 2 s, about every 20 s."""
    requests = []
    at_s = 0.0
    while at_s < seconds:
        for _ in range(generator.randint(20, 60)):
            requests.append(at_s + generator.uniform(0, 2))
        at_s += generator.uniform(12, 28)
    return [RecordedRequest(at_s=each, prompt_tokens=PROMPT, output_tokens=10) for each in sorted(requests)]


def replay_of(trace: list[RecordedRequest]) -> Bursts:
    seconds = [0.0] * (int(trace[-1].at_s) + 1)
    for request in trace:
        seconds[int(request.at_s)] += request.prompt_tokens
    mean = sum(seconds) / len(seconds)
    return Bursts(spans=[(1.0, each / mean) for each in seconds], left_out_s=0.0)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_replay_agrees_with_the_simulation(workers: int):
    """With a replay the forecast attainment matches the simulation. Without it the formulas for Poisson arrivals expect nearly full
    attainment."""
    trace = bursty(300, Random(4))
    shape = Shape(prefill_workers=workers, decode_workers=1)
    settings = SimulationSettings(shape=shape, targets=TARGETS, tick_s=0.0)
    found = Simulation(settings, Static()).run(trace)
    demand = Demand(requests_per_s=len(trace) / trace[-1].at_s, prompt_lengths=[(PROMPT, 1.0)], output_tokens=10)
    sizer = Sizer(speed=Speed(), targets=TARGETS)
    assert sizer.forecast(demand, shape).attainment > 0.95
    expected = Sizer(speed=Speed(), targets=TARGETS, bursts=replay_of(trace)).forecast(demand, shape).attainment
    assert expected == pytest.approx(found.attainment, abs=0.06)


def history_of(rates: list[float]) -> BurstHistory:
    history = BurstHistory(START_S)
    for rate in rates:
        history.add(1.0, rate)
    return history


def test_only_recurring_bursts_need_more_workers_than_the_mean():
    """Recurring bursts need more workers than their mean rate. A constant load, a slow rise and a single step do not."""
    steady = [100.0] * 200
    bursts = ([0.0] * 16 + [500.0] * 4) * 10
    rise = [50.0 + i / 2 for i in range(200)]
    step = [50.0] * 100 + [150.0] * 100
    waits = {}
    for name, rates in (("steady", steady), ("bursts", bursts), ("rise", rise), ("step", step)):
        replay = history_of(rates).bursts()
        assert replay is not None
        waits[name] = replay.waits(1.0, 2).within(0.5)
    assert waits["bursts"] < 0.6
    assert waits["steady"] == pytest.approx(1.0)
    assert waits["rise"] == pytest.approx(1.0)
    assert waits["step"] == pytest.approx(1.0)


def test_more_workers_never_wait_longer():
    """The share of work that starts within any limit grows with the pool, and depends only on the load per worker."""
    generator = Random(2)
    replay = history_of([generator.choice([0.0, 10.0, 200.0]) for _ in range(150)]).bursts()
    assert replay is not None
    for limit_s in (0.0, 0.5, 2.0, 10.0):
        shares = [replay.waits(1.5, workers).within(limit_s) for workers in range(1, 12)]
        assert shares == sorted(shares)
        assert replay.waits(3.0, 6).within(limit_s) == replay.waits(1.5, 3).within(limit_s)


def test_a_history_is_bounded_and_needs_a_minimum():
    """A short history gives no replay. A long one covers HISTORY_STARTS start times with at most 1200 spans, however often it is sampled."""
    history = BurstHistory(START_S)
    for _ in range(10):
        history.add(1.0, 5.0)
    assert history.bursts() is None
    for _ in range(20_000):
        history.add(0.1, 5.0)
    replay = history.bursts()
    assert replay is not None
    assert len(replay.spans) <= 1200
    assert sum(span_s for span_s, _ in replay.spans) == pytest.approx(HISTORY_STARTS * START_S, rel=0.02)
    assert replay.left_out_s == LEFT_OUT_STARTS * START_S


def settled(rates: list[float]) -> list[float]:
    excursions = Excursions(START_S)
    return [excursions.settle(rate, rate, float(second)) for second, rate in enumerate(rates)]


def test_a_rise_counts_until_rises_turn_out_to_be_brief():
    """The first bursts count as a new level. After several brief bursts, a burst counts only once it lasts longer than they did."""
    burst = [2.0] * 16 + [30.0] * 4
    found = settled(burst * 6)
    assert found[18] == 30.0
    assert max(found[100:]) < 15.0
    lasting = settled(burst * 6 + [30.0] * 20)
    assert lasting[-1] == 30.0
    assert lasting[125] == 30.0


def test_steps_and_slow_changes_always_count():
    """Lasting changes count at once: the settled rate is the present rate."""
    steps = ([5.0] * 60 + [15.0] * 60) * 4
    assert settled(steps) == steps
    # The first seconds may have few or many requests by chance.
    assert settled([2.0, 30.0, 2.0, 2.0, 30.0, 2.0, *steps])[6:] == steps
    slow = [10.0 + 8 * (i % 100) / 100 for i in range(300)]
    assert settled(slow) == slow
