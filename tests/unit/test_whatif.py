"""Simulations of pools: they validate the planner's formulas and its reactions to bursts."""

from dataclasses import replace

import pytest

from bench.planner.reversals import reversals
from kvmesh.core.planning import Decision, DecisionAction, Load, Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.decide import model_planner
from services.planner.decide.settings import DecideSettings
from services.planner.observation import ModelObservation
from services.planner.sizing.forecast import LatencyForecast
from services.planner.sizing.speed import Speed
from services.router.core_settings import CoreSettings, QueueSettings
from services.whatif.engine import EngineShape
from services.whatif.fleet import ChangingFleet, FleetTimes
from services.whatif.placers import MODEL
from services.whatif.planning import PlannerPolicy
from services.whatif.result import WhatIfResult, percentile
from services.whatif.simulation import PoolPolicy, Simulation, SimulationSettings, Static
from services.whatif.traces import make_load
from tests.demand import demand_of

TARGETS = Targets(model=MODEL, ttft_s=2.0, itl_s=0.05)


def load(rate: float, seconds: float, *, prompt: float = 1000, output: float = 100) -> list[RecordedRequest]:
    return make_load(lambda at_s: rate, peak=rate, duration_s=seconds, prompt_tokens=prompt, output_tokens=output)


def simulate(trace: list[RecordedRequest], shape: Shape, policy: PoolPolicy, **options: object) -> WhatIfResult:
    return Simulation(SimulationSettings(shape=shape, targets=TARGETS, **options), policy).run(trace)


@pytest.mark.parametrize(
    ("prefill", "decode", "rate", "prompt", "output", "seconds"),
    [
        (1, 1, 5.0, 1000, 100, 900),
        (2, 1, 12.0, 1000, 100, 300),
        (4, 2, 32.0, 1000, 100, 240),
        (2, 1, 3.0, 4000, 150, 900),
    ],
)
def test_the_formulas_agree_with_the_simulation(
    prefill: int, decode: int, rate: float, prompt: int, output: int, seconds: int
):
    """The formulas of waits, steps and transfers match a simulation through the router: means within 15 %, p95 within 25 %."""
    trace = load(rate, seconds, prompt=prompt, output=output)
    shape = Shape(prefill_workers=prefill, decode_workers=decode)
    found = simulate(trace, shape, Static(), tick_s=0.0)
    lengths = [request.prompt_tokens for request in trace]
    forecast = LatencyForecast(
        speed=Speed(),
        demand=demand_of(
            Load(
                requests_per_s=len(trace) / seconds,
                prompt_tokens=sum(lengths) / len(trace),
                output_tokens=sum(request.output_tokens for request in trace) / len(trace),
            )
        ),
        shape=shape,
        targets=TARGETS,
    )
    assert sum(found.ttft_s) / len(trace) == pytest.approx(forecast.ttft_mean_s, rel=0.15)
    assert percentile(found.ttft_s, 0.95) == pytest.approx(forecast.ttft_s, rel=0.25)
    assert sum(found.itl_s) / len(trace) == pytest.approx(forecast.step_s, rel=0.10)


def test_batched_steps_are_as_exact_as_single_steps():
    """Simulating runs of steps at once gives medians within 2 % of those of single steps."""
    trace = load(12.0, 60)
    shape = Shape(prefill_workers=2, decode_workers=1)
    single, runs = (
        simulate(trace, shape, Static(), tick_s=0.0, engine=EngineShape(run_s=run_s)) for run_s in (0.0, 1.0)
    )
    assert percentile(runs.ttft_s, 0.5) == pytest.approx(percentile(single.ttft_s, 0.5), rel=0.02)
    assert percentile(runs.itl_s, 0.5) == pytest.approx(percentile(single.itl_s, 0.5), rel=0.01)
    assert runs.requests == single.requests == len(trace)


BURST_AT_S = 60.0


def burst(**changes: object) -> tuple[WhatIfResult, list[Decision]]:
    """Simulates a burst: 0.5 requests/s with prompts of 2000 tokens, then 9 requests/s, on 1 + 4 workers. New workers need two minutes to
    start."""
    trace = make_load(
        lambda at_s: 9.0 if at_s >= BURST_AT_S else 0.5,
        peak=9.0,
        duration_s=180.0,
        prompt_tokens=2000,
        output_tokens=400,
    )
    decisions: list[Decision] = []
    policy = PlannerPolicy(
        targets=TARGETS,
        speed=Speed(),
        settings=replace(DecideSettings(start_s=120.0), **changes),
        on_decision=decisions.append,
    )
    shape = Shape(prefill_workers=1, decode_workers=4)
    result = simulate(trace, shape, policy, times=FleetTimes(start_s=120.0, flip_s=2.0))
    return result, [each for each in decisions if each.action.changes_pools and each.decided_at_s >= BURST_AT_S]


def test_a_burst_is_deflected_within_seconds_then_flipped_then_scaled():
    """The planner deflects at the first tick of the burst and flips within 5 s. Without flips far more requests miss their targets."""
    result, decisions = burst()
    first = {action: next((d.decided_at_s for d in decisions if d.action is action), 1e9) for action in DecisionAction}
    assert first[DecisionAction.DEFLECT] - BURST_AT_S <= 1.0
    assert first[DecisionAction.FLIP] - BURST_AT_S <= 5.0
    assert first[DecisionAction.DEFLECT] <= first[DecisionAction.FLIP]
    assert first[DecisionAction.SCALE] < 1e9
    without, _ = burst(flips=False)
    assert result.attainment > 0.9
    assert without.attainment < result.attainment - 0.2


def test_waiting_late_requests_reduce_missed_targets():
    """For 20 s one worker gets twice the load that it can serve. In order of arrival nearly all of these requests miss the target.

    If late requests wait, far fewer miss it. All requests finish, and none much later than in order of arrival.
    """
    rate = lambda at_s: 10.0 if 20 <= at_s < 40 else 1.0  # noqa: E731
    trace = make_load(rate, peak=10.0, duration_s=100.0, prompt_tokens=1200, output_tokens=50)
    found = {}
    for late_share in (0.0, 0.67):
        router = CoreSettings(prefill_congested_s=1e9, queue=QueueSettings(late_share=late_share))
        settings = SimulationSettings(shape=Shape(prefill_workers=1, decode_workers=1), targets=TARGETS, router=router)
        simulation = Simulation(settings, Static())
        simulation.fleet.set_ttft(2.0)
        found[late_share] = simulation.run(trace)
    plain, waits = found.values()
    assert plain.requests == waits.requests == len(trace)
    assert len(waits.itl_s) == len(trace)
    missed_plain, missed = (1 - result.attainment for result in (plain, waits))
    assert missed < 0.6 * missed_plain
    assert max(waits.ttft_s) < max(plain.ttft_s) + 25


def test_no_request_is_lost_while_pools_change(monkeypatch):
    """While the load triples and falls five times, all requests finish, and the worker hours are plausible."""
    rate = lambda at_s: 24.0 if at_s % 60 < 30 else 8.0  # noqa: E731
    trace = make_load(rate, peak=24.0, duration_s=300.0, prompt_tokens=800, output_tokens=60)
    monkeypatch.setattr(model_planner, "FLIP_DWELL_S", 10.0)
    settings = DecideSettings(start_s=5.0, calm_s=10.0, interval_s=2.0)
    result = simulate(
        trace,
        Shape(prefill_workers=1, decode_workers=1),
        PlannerPolicy(targets=TARGETS, speed=Speed(), settings=settings),
        times=FleetTimes(start_s=5.0, flip_s=1.0),
    )
    assert result.requests == len(trace)
    assert len(result.itl_s) == len(trace)
    assert result.starts >= 4
    assert result.stops >= 4
    least, most = 2 * 300 / 3600, 16 * 300 / 3600
    assert least <= result.worker_hours_total <= most


class FlipsThenShrinks:
    """A policy that flips a busy prefill worker to decode, and a second later shrinks the decode pool to one worker."""

    def __init__(self) -> None:
        self.ready: list[int] = []

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        if now_s == 10.0:
            fleet.flip(-1)
        elif now_s == 11.0:
            assert fleet.wanted() == Shape(prefill_workers=1, decode_workers=2)
            fleet.scale(Shape(prefill_workers=1, decode_workers=1))
        self.ready.append(fleet.ready().decode_workers)


def test_a_flipping_worker_stops_before_a_serving_one():
    """A prompt of 100 000 tokens takes 10 s, so the flip is still in progress when the pool shrinks. The serving worker stays."""
    trace = [RecordedRequest(at_s=float(i), prompt_tokens=100_000, output_tokens=2) for i in range(30)]
    policy = FlipsThenShrinks()
    result = simulate(trace, Shape(prefill_workers=2, decode_workers=1), policy)
    assert set(policy.ready) == {1}
    assert (result.flips, result.stops) == (1, 1)
    assert len(result.itl_s) == len(trace)


def test_a_constant_load_with_poisson_noise_settles():
    """In five minutes of 20 requests/s the pools reverse at most twice, and nearly all requests meet the targets."""
    result = simulate(
        load(20.0, 300.0),
        Shape(prefill_workers=3, decode_workers=2),
        PlannerPolicy(targets=TARGETS, speed=Speed(), settings=DecideSettings(start_s=30.0)),
        times=FleetTimes(start_s=30.0),
    )
    assert reversals(result) <= 2
    assert result.attainment >= 0.97


def test_shared_prefixes_are_found_in_caches():
    """Requests with the same block ids compute them once per worker."""
    trace = [
        RecordedRequest(at_s=float(i), prompt_tokens=2048, output_tokens=2, block_ids=(1, 2, 3, 100 + i))
        for i in range(20)
    ]
    result = simulate(trace, Shape(prefill_workers=1, decode_workers=1), Static(), tick_s=0.0)
    assert result.hit_rate == pytest.approx(19 * 3 * 512 / (20 * 2048))
