"""The planner's plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.core import Role
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.worker import ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """One pool; see `kvmesh.planner.v1.PoolView`."""

    model: str
    role: Role
    workers_ready: int = 0
    workers_draining: int = 0
    workers_critical: int = 0
    workers_planned: int | None = None
    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Latencies of one model's requests; see `kvmesh.planner.v1.LatencyView`."""

    model: str
    requests_per_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Observations and plan. `mode` is observe, dry_run or act."""

    mode: str
    source: str
    observed_at_s: float | None = None
    pools: Sequence[PoolReport] = ()
    latencies: Sequence[LatencyReport] = ()
    problems: Sequence[str] = ()


_POOL = MessageCodec(pb.PoolView, PoolReport, role=ROLES)
_LATENCY = MessageCodec(pb.LatencyView, LatencyReport)
_PLAN = MessageCodec(
    pb.GetPlanResponse, PlanReport, mode=enum_table(pb.PlannerMode, str), pools=_POOL, latencies=_LATENCY
)
to_plan, from_plan = _PLAN.encode, _PLAN.decode
