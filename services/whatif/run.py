"""Runs a requested simulation: the pools are given or sized, and the planner may change them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmesh.core import PerformanceProfile
from kvmesh.core.planning import Alternative, Decision, DecisionAction, Shape, Targets
from kvmesh.core.whatif import RecordedRequest, SimulationOutcome, SimulationRequest
from kvmesh.errors import InvalidRequestError
from services.planner.decide.settings import DecideSettings
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed, speed_of
from services.whatif.engine import EngineShape
from services.whatif.fleet import FleetTimes
from services.whatif.planning import PlannerPolicy
from services.whatif.result import WhatIfResult, percentile
from services.whatif.simulation import PoolPolicy, Simulation, SimulationSettings, Static
from services.whatif.traces import make_load

RUN_S = 1.0
LENGTH_POINTS = 16
OnDecision = Callable[[Decision], None]


def run_request(
    request: SimulationRequest, *, decide: DecideSettings | None = None, on_decision: OnDecision = lambda decision: None
) -> tuple[SimulationOutcome, WhatIfResult]:
    """Raises InvalidRequestError if the profile lacks coefficients."""
    trace = trace_of(request)
    targets = request.targets or Targets(model=request.model)
    speed = speed_of_request(request.profile)
    demand = demand_of_trace(trace)
    sizer = Sizer(speed=speed, targets=targets)
    shape = _shape(request, sizer, demand)
    decide = decide or DecideSettings()
    settings = SimulationSettings(
        shape=shape,
        targets=targets,
        engine=EngineShape(run_s=RUN_S, speed=speed, kv_blocks=max(1, speed.kv_tokens // 512)),
        times=FleetTimes(start_s=decide.start_s),
        tick_s=1.0,
    )
    policy: PoolPolicy = (
        PlannerPolicy(targets=targets, speed=speed, settings=decide, on_decision=on_decision)
        if request.has_planner
        else Static()
    )
    result = Simulation(settings, policy).run(trace)
    return outcome_of(result, shape, expected_of(sizer, demand, shape, hit_rate=result.hit_rate)), result


def trace_of(request: SimulationRequest) -> Sequence[RecordedRequest]:
    """Returns the requests of a load, at least one."""
    if request.recorded is not None:
        return request.recorded.requests
    steady = request.steady
    if steady is None:
        raise InvalidRequestError("load is required: steady or recorded", field="load")
    trace = make_load(
        lambda at_s: steady.requests_per_s,
        peak=steady.requests_per_s,
        duration_s=steady.duration_s,
        prompt_tokens=steady.prompt_tokens,
        output_tokens=steady.output_tokens,
        prompt_cv=steady.prompt_variation,
        output_cv=steady.output_variation,
    )
    return trace or [RecordedRequest(at_s=0.0, prompt_tokens=steady.prompt_tokens, output_tokens=steady.output_tokens)]


def speed_of_request(profile: PerformanceProfile | None) -> Speed:
    if profile is None:
        return Speed()
    speed = speed_of(profile)
    if not isinstance(speed, Speed):
        raise InvalidRequestError(f"the profile lacks {', '.join(speed)}", field=f"profile.{speed[0]}")
    return speed


def demand_of_trace(trace: Sequence[RecordedRequest]) -> Demand:
    """Returns the mean load of a trace, with equally likely prompt lengths."""
    lengths = sorted(request.prompt_tokens for request in trace)
    points = min(LENGTH_POINTS, len(lengths))
    parts = [lengths[i * len(lengths) // points : (i + 1) * len(lengths) // points] for i in range(points)]
    return Demand(
        requests_per_s=len(trace) / max(1.0, trace[-1].at_s),
        prompt_lengths=[(sum(part) / len(part), len(part) / len(lengths)) for part in parts],
        output_tokens=sum(request.output_tokens for request in trace) / len(trace),
    )


def expected_of(sizer: Sizer, demand: Demand, shape: Shape, *, hit_rate: float) -> Alternative:
    """Returns what the formulas expect at the mean load, with the hit rate that was found."""
    forecast = sizer.forecast(replace(demand, hit_rate=hit_rate), shape)
    return Alternative(
        action=DecisionAction.KEEP,
        shape=shape,
        goodput_per_s=sizer.goodput_per_s(forecast.demand, shape),
        attainment=forecast.attainment,
        cost=sizer.cost(shape),
        ttft_s=forecast.ttft_s,
        itl_s=forecast.itl_s,
        limit="" if forecast.meets else sizer.limit(forecast.demand),
    )


def outcome_of(result: WhatIfResult, shape: Shape, expected: Alternative) -> SimulationOutcome:
    return SimulationOutcome(
        shape=shape,
        requests=result.requests,
        attainment=result.attainment,
        goodput_per_s=result.goodput_per_s,
        ttft_p50_s=percentile(result.ttft_s, 0.5),
        ttft_p95_s=percentile(result.ttft_s, 0.95),
        ttft_p99_s=percentile(result.ttft_s, 0.99),
        itl_p50_s=percentile(result.itl_s, 0.5),
        itl_p95_s=percentile(result.itl_s, 0.95),
        itl_p99_s=percentile(result.itl_s, 0.99),
        hit_rate=result.hit_rate,
        worker_hours=result.worker_hours_total,
        cost=result.cost,
        expected=expected,
    )


def _shape(request: SimulationRequest, sizer: Sizer, demand: Demand) -> Shape:
    sized = sizer.size(demand).shape
    return Shape(
        prefill_workers=sized.prefill_workers if request.prefill_workers is None else request.prefill_workers,
        decode_workers=sized.decode_workers if request.decode_workers is None else request.decode_workers,
    )
