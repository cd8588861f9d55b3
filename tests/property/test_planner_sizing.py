"""Invariants of the sizing for any load, speed and targets."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.planning import Load, PoolLimits, Shape, Targets
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from tests.demand import demand_of

SPEEDS = st.builds(
    Speed,
    prefill_base_s=st.floats(0.0, 0.02),
    prefill_s_per_token=st.floats(1e-5, 5e-4),
    decode_step_base_s=st.floats(0.001, 0.02),
    decode_s_per_request=st.floats(1e-5, 1e-3),
    decode_s_per_kv_token=st.floats(0.0, 1e-7),
    kv_tokens=st.integers(20_000, 2_000_000),
)
LOADS = st.builds(
    Load,
    requests_per_s=st.floats(0.1, 60.0),
    prompt_tokens=st.floats(16.0, 8000.0),
    output_tokens=st.floats(1.0, 1000.0),
    hit_rate=st.floats(0.0, 0.9),
)
LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 40)).map(
    lambda pair: PoolLimits(workers_min=pair[0], workers_max=pair[0] + pair[1])
)
TARGETS = st.builds(
    Targets,
    model=st.just("m"),
    ttft_s=st.floats(0.05, 10.0),
    itl_s=st.floats(0.005, 0.2),
    percentile=st.sampled_from([0.5, 0.9, 0.95, 0.99]),
    prefill=LIMITS,
    decode=LIMITS,
)


@settings(max_examples=60, deadline=None)
@given(speed=SPEEDS, load=LOADS, targets=TARGETS, cost_max=st.none() | st.integers(8, 40))
def test_sizes_stay_within_the_limits(speed: Speed, load: Load, targets: Targets, cost_max: int | None) -> None:
    """Sizes stay between the minimum and the maximum, and within the budget. Unless a limit is reported, the targets are met."""
    targets = replace(targets, cost_max=cost_max)
    found = Sizer(speed=speed, targets=targets).size(demand_of(load))
    for limits, workers in (
        (targets.prefill, found.shape.prefill_workers),
        (targets.decode, found.shape.decode_workers),
    ):
        assert limits.workers_min <= workers <= (limits.workers_max or 0)
    assert cost_max is None or found.cost <= cost_max
    assert found.limit or found.forecast.meets


@settings(max_examples=60, deadline=None)
@given(speed=SPEEDS, load=LOADS, targets=TARGETS, factor=st.floats(1.0, 3.0))
def test_more_load_never_costs_less(speed: Speed, load: Load, targets: Targets, factor: float) -> None:
    """If both loads can be served within the targets, the larger load needs a fleet of at least the same cost."""
    sizer = Sizer(speed=speed, targets=targets)
    small = sizer.size(demand_of(load))
    large = sizer.size(demand_of(replace(load, requests_per_s=load.requests_per_s * factor)))
    assert small.limit or large.limit or large.cost >= small.cost
    assert large.limit or not small.limit


@settings(max_examples=60, deadline=None)
@given(speed=SPEEDS, load=LOADS, targets=TARGETS, slack=st.floats(1.0, 3.0))
def test_looser_targets_never_cost_more(speed: Speed, load: Load, targets: Targets, slack: float) -> None:
    """Looser targets have longer latencies or a smaller share of requests."""
    tight = Sizer(speed=speed, targets=targets).size(demand_of(load))
    assert targets.ttft_s is not None
    assert targets.itl_s is not None
    for loose in (
        replace(targets, ttft_s=targets.ttft_s * slack, itl_s=targets.itl_s * slack),
        replace(targets, percentile=targets.percentile * 0.9),
    ):
        found = Sizer(speed=speed, targets=loose).size(demand_of(load))
        assert tight.limit or (not found.limit and found.cost <= tight.cost)


@settings(max_examples=100, deadline=None)
@given(speed=SPEEDS, load=LOADS, targets=TARGETS, pools=st.tuples(st.integers(1, 30), st.integers(1, 30)))
def test_one_more_worker_never_hurts(speed: Speed, load: Load, targets: Targets, pools: tuple[int, int]) -> None:
    """One more worker in either pool reduces neither the share within the targets nor the goodput."""
    sizer = Sizer(speed=speed, targets=targets)
    demand = demand_of(load)
    shape = Shape(prefill_workers=pools[0], decode_workers=pools[1])
    for more in (replace(shape, prefill_workers=pools[0] + 1), replace(shape, decode_workers=pools[1] + 1)):
        assert sizer.forecast(demand, more).attainment >= sizer.forecast(demand, shape).attainment - 1e-9
        assert sizer.goodput_per_s(demand, more) >= sizer.goodput_per_s(demand, shape) - 1e-3 * load.requests_per_s
