"""Plans, targets and decisions."""

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.checks import check_range
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
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.codec.worker import ROLES

WORKERS_MAX = 100_000
_STATES = enum_table(pb.ObservationState, ObservationState)
_ACTIONS = enum_table(pb.DecisionAction, DecisionAction)
_POOL = MessageCodec(pb.PoolView, PoolReport, role=ROLES)
_LATENCY = MessageCodec(pb.LatencyView, LatencyReport, state=_STATES)
_LIMITS = MessageCodec(pb.PoolLimits, PoolLimits)
_TARGETS = MessageCodec(pb.Targets, Targets, prefill=_LIMITS, decode=_LIMITS)
SHAPE = MessageCodec(pb.Shape, Shape)
_LOAD = MessageCodec(pb.Load, Load)
ALTERNATIVE = MessageCodec(pb.Alternative, Alternative, action=_ACTIONS, shape=SHAPE)
_INPUTS = MessageCodec(
    pb.DecisionInputs, DecisionInputs, state=_STATES, observed=_LOAD, predicted=_LOAD, ready=SHAPE, wanted=SHAPE
)
_DECISION = MessageCodec(
    pb.Decision,
    Decision,
    action=_ACTIONS,
    inputs=_INPUTS,
    alternatives=ALTERNATIVE,
    outcome=enum_table(pb.DecisionOutcome, DecisionOutcome),
)
_PLAN = MessageCodec(
    pb.Plan,
    PlanReport,
    mode=enum_table(pb.PlannerMode, str),
    pools=_POOL,
    latencies=_LATENCY,
    targets=_TARGETS,
    decisions=_DECISION,
)
to_plan, from_plan = _PLAN.encode, _PLAN.decode
to_targets = _TARGETS.encode


def from_targets(message: pb.Targets) -> Targets:
    """Raises InvalidRequestError, which names the field."""
    targets = _TARGETS.decode(message)
    check_targets(targets)
    return targets


def check_targets(targets: Targets) -> None:
    """Raises InvalidRequestError for a value that is out of range."""
    required_text(targets.model, field="targets.model", characters_max=256)
    for name in ("ttft_s", "itl_s", "cost_max"):
        value = getattr(targets, name)
        check_range(value, "targets." + name.removesuffix("_s"), low=0, high=1e9, above=True)
    check_range(targets.percentile, "targets.percentile", low=0, high=0.9999, above=True)
    for pool, limits in (("prefill", targets.prefill), ("decode", targets.decode)):
        check_range(limits.workers_min, f"targets.{pool}.workers_min", low=0, high=WORKERS_MAX)
        check_range(limits.workers_max, f"targets.{pool}.workers_max", low=0, high=WORKERS_MAX)
        check_range(limits.cost_per_worker, f"targets.{pool}.cost_per_worker", low=0, high=1e9, above=True)
        if limits.workers_max is not None and limits.workers_max < limits.workers_min:
            field = f"targets.{pool}.workers_max"
            raise InvalidRequestError(
                f"{field} must be at least workers_min, {limits.workers_min}, not {limits.workers_max}", field=field
            )
