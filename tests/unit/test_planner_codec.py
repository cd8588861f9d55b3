"""Encoding and decoding of plans, targets and decisions."""

from dataclasses import replace

import pytest

from kvmesh.core import Role
from kvmesh.core.planning import (
    Alternative,
    Decision,
    DecisionAction,
    DecisionInputs,
    DecisionOutcome,
    LatencyReport,
    Load,
    ObservationState,
    PlanReport,
    PoolLimits,
    PoolReport,
    Shape,
    Targets,
)
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.planner import from_plan, from_targets, to_plan, to_targets

TARGETS = Targets(
    model="m",
    ttft_s=0.5,
    percentile=0.99,
    prefill=PoolLimits(workers_min=0, workers_max=4, cost_per_worker=2.5),
    cost_max=12.0,
)
DECISION = Decision(
    number=7,
    model="m",
    decided_at_s=1700000000.5,
    action=DecisionAction.FLIP,
    reason="prefill_short",
    detail="a sentence",
    inputs=DecisionInputs(
        state=ObservationState.COMPLETE,
        observed=Load(requests_per_s=3.0, prompt_tokens=100.0, output_tokens=10.0, hit_rate=0.25),
        predicted=Load(requests_per_s=4.0),
        predictor="kalman",
        predictor_error=0.0,
        ready=Shape(prefill_workers=1, decode_workers=3),
        wanted=Shape(prefill_workers=2, decode_workers=2, deflect_tokens=512),
        ttft_correction=1.25,
    ),
    alternatives=(
        Alternative(action=DecisionAction.FLIP, shape=Shape(prefill_workers=2, decode_workers=2), ttft_s=0.4),
        Alternative(action=DecisionAction.KEEP, shape=Shape(prefill_workers=1), limit="prefill_capacity"),
    ),
    outcome=DecisionOutcome.ACCEPTED,
    outcome_detail="ok",
    fencing_token=12,
)


def test_a_plan_survives_encoding():
    """A plan keeps every field through encoding and decoding. Absent values stay absent, and zeros stay zeros."""
    plan = PlanReport(
        mode="act",
        source="scrape",
        observed_at_s=1700000000.5,
        pools=(
            PoolReport(model="m", role=Role.PREFILL, workers_ready=2, kv_usage=0.0, waiting_prompt_tokens=0.0),
            PoolReport(model="m", role=Role.DECODE, workers_planned=3, output_tokens_per_s=1.5),
        ),
        latencies=(
            LatencyReport(model="m", ttft_mean_s=0.25, requests_per_s=0.0, state=ObservationState.COMPLETE),
            LatencyReport(model="n", queue_wait_mean_s=1.5, state=ObservationState.STALE),
        ),
        problems=("one", "two"),
        targets=(TARGETS,),
        decisions=(DECISION, replace(DECISION, number=6, alternatives=(), action=DecisionAction.HOLD)),
        is_leader=True,
        leader_id="planner-1",
    )
    assert from_plan(to_plan(plan)) == plan


def test_targets_survive_encoding():
    """Targets keep every field through encoding and decoding. An absent latency target stays absent."""
    assert from_targets(to_targets(TARGETS)) == TARGETS
    assert from_targets(to_targets(Targets(model="m"))) == Targets(model="m")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "targets.model"),
        ({"ttft_s": 0.0}, "targets.ttft"),
        ({"itl_s": -1.0}, "targets.itl"),
        ({"percentile": 1.0}, "targets.percentile"),
        ({"percentile": float("nan")}, "targets.percentile"),
        ({"cost_max": 0.0}, "targets.cost_max"),
        ({"prefill": PoolLimits(workers_min=3, workers_max=2)}, "targets.prefill.workers_max"),
        ({"decode": PoolLimits(cost_per_worker=0.0)}, "targets.decode.cost_per_worker"),
        ({"decode": PoolLimits(workers_min=2_000_000_000)}, "targets.decode.workers_min"),
    ],
)
def test_targets_out_of_range_are_refused_by_name(change: dict[str, object], field: str):
    """The error names the invalid field, so that the caller can correct it."""
    with pytest.raises(InvalidRequestError) as refusal:
        from_targets(to_targets(replace(TARGETS, **change)))
    assert refusal.value.field == field
