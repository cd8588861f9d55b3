"""Conversion of planners' reports."""

from kvmesh.api.planner.v1 import planner_pb2 as pb
from kvmesh.core.plan import LatencyReport, PlanReport, PoolReport
from kvmesh.rpc.codec.scalars import (
    from_timestamp,
    known_enum,
    optional_duration,
    optional_field,
    to_duration,
    to_timestamp,
)
from kvmesh.rpc.codec.worker import ROLE_NUMBERS, ROLES

MODES = {
    pb.PLANNER_MODE_OBSERVE: "observe",
    pb.PLANNER_MODE_DRY_RUN: "dry_run",
    pb.PLANNER_MODE_ACT: "act",
}
MODE_NUMBERS = {mode: number for number, mode in MODES.items()}


def to_plan(plan: PlanReport) -> pb.GetPlanResponse:
    return pb.GetPlanResponse(
        mode=MODE_NUMBERS[plan.mode],
        source=plan.source,
        observed_at=to_timestamp(plan.observed_at_s) if plan.observed_at_s is not None else None,
        pools=[_to_pool(pool) for pool in plan.pools],
        latencies=[_to_latency(latency) for latency in plan.latencies],
        problems=plan.problems,
    )


def from_plan(message: pb.GetPlanResponse) -> PlanReport:
    return PlanReport(
        mode=known_enum(message.mode, MODES, "mode"),
        source=message.source,
        observed_at_s=from_timestamp(message.observed_at) if message.HasField("observed_at") else None,
        pools=tuple(_from_pool(pool) for pool in message.pools),
        latencies=tuple(_from_latency(latency) for latency in message.latencies),
        problems=tuple(message.problems),
    )


def _to_pool(pool: PoolReport) -> pb.PoolView:
    return pb.PoolView(
        model=pool.model,
        role=ROLE_NUMBERS[pool.role],
        workers_ready=pool.workers_ready,
        workers_draining=pool.workers_draining,
        workers_critical=pool.workers_critical,
        workers_planned=pool.workers_planned,
        running_requests=pool.running_requests,
        waiting_requests=pool.waiting_requests,
        kv_usage=pool.kv_usage,
        prompt_tokens_per_s=pool.prompt_tokens_per_s,
        output_tokens_per_s=pool.output_tokens_per_s,
    )


def _from_pool(message: pb.PoolView) -> PoolReport:
    return PoolReport(
        model=message.model,
        role=known_enum(message.role, ROLES, "pool.role"),
        workers_ready=message.workers_ready,
        workers_draining=message.workers_draining,
        workers_critical=message.workers_critical,
        workers_planned=optional_field(message, "workers_planned"),
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        kv_usage=optional_field(message, "kv_usage"),
        prompt_tokens_per_s=optional_field(message, "prompt_tokens_per_s"),
        output_tokens_per_s=optional_field(message, "output_tokens_per_s"),
    )


def _to_latency(latency: LatencyReport) -> pb.LatencyView:
    message = pb.LatencyView(
        model=latency.model,
        requests_per_s=latency.requests_per_s,
        prompt_tokens_mean=latency.prompt_tokens_mean,
        output_tokens_mean=latency.output_tokens_mean,
    )
    for name in ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99"):
        seconds: float | None = getattr(latency, f"{name}_s")
        if seconds is not None:
            getattr(message, name).CopyFrom(to_duration(seconds))
    return message


def _from_latency(message: pb.LatencyView) -> LatencyReport:
    return LatencyReport(
        model=message.model,
        requests_per_s=optional_field(message, "requests_per_s"),
        ttft_mean_s=optional_duration(message, "ttft_mean"),
        ttft_p99_s=optional_duration(message, "ttft_p99"),
        itl_mean_s=optional_duration(message, "itl_mean"),
        itl_p99_s=optional_duration(message, "itl_p99"),
        prompt_tokens_mean=optional_field(message, "prompt_tokens_mean"),
        output_tokens_mean=optional_field(message, "output_tokens_mean"),
    )
