"""The reports of a planner."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.planning import Decision, ObservationState, Targets
from kvmesh.core.worker import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The workers of one model and role; see `kvmesh.planner.v1.PoolView`. None: nothing observed."""

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
    waiting_prompt_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """Latencies of one model as its clients see them; see `kvmesh.planner.v1.LatencyView`. None: nothing observed."""

    model: str
    requests_per_s: float | None = None
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    prompt_tokens_mean: float | None = None
    output_tokens_mean: float | None = None
    hit_rate: float | None = None
    queue_wait_mean_s: float | None = None
    queued_requests: float | None = None
    failed_rate: float | None = None
    state: ObservationState = ObservationState.MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """An observation and the decisions about it. `mode`: observe, dry_run or act. `observed_at_s`: None before the first observation."""

    mode: str
    source: str
    observed_at_s: float | None = None
    pools: Sequence[PoolReport] = ()
    latencies: Sequence[LatencyReport] = ()
    problems: Sequence[str] = ()
    targets: Sequence[Targets] = ()
    decisions: Sequence[Decision] = ()
    is_leader: bool = False
    leader_id: str = ""
