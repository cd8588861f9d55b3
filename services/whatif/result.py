"""What a simulation shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core import Role
from kvmesh.core.planning import Shape, Targets
from services.whatif.engine import Job
from services.whatif.fleet import ChangingFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfResult:
    """Goodput, latencies and cost. `itl_s` has the mean time per later token of each request; both lists are sorted."""

    requests: int
    attainment: float
    goodput_per_s: float
    hit_rate: float
    ttft_s: Sequence[float]
    itl_s: Sequence[float]
    worker_hours: Mapping[Role, float]
    cost: float
    flips: int
    starts: int
    stops: int
    shapes: Sequence[tuple[float, Shape]]
    within: Sequence[tuple[float, bool]]

    @property
    def worker_hours_total(self) -> float:
        return sum(self.worker_hours.values())


def make_result(
    jobs: Sequence[Job],
    targets: Targets,
    worker_s: Mapping[Role, float],
    *,
    fleet: ChangingFleet,
    shapes: Sequence[tuple[float, Shape]],
) -> WhatIfResult:
    """Computes the result. Requests that did not end count as outside the targets."""
    within = [(job.arrived_s, is_within(job, targets)) for job in jobs]
    good = sum(is_good for _, is_good in within)
    span_s = max(1e-9, jobs[-1].arrived_s) if jobs else 1e-9
    prompt = sum(job.trace.prompt_tokens for job in jobs)
    hours = {role: seconds / 3600 for role, seconds in worker_s.items() if seconds}
    return WhatIfResult(
        requests=len(jobs),
        attainment=good / len(jobs) if jobs else 0.0,
        goodput_per_s=good / span_s,
        hit_rate=sum(job.cached_tokens for job in jobs) / prompt if prompt else 0.0,
        ttft_s=sorted(job.first_token_s - job.arrived_s for job in jobs if job.first_token_s >= 0),
        itl_s=sorted(itl_of(job) for job in jobs if job.done_s >= 0),
        worker_hours=hours,
        cost=hours.get(Role.PREFILL, 0.0) * targets.prefill.cost_per_worker
        + hours.get(Role.DECODE, 0.0) * targets.decode.cost_per_worker,
        flips=fleet.flips,
        starts=fleet.starts,
        stops=fleet.stops,
        shapes=tuple(shapes),
        within=within,
    )


def itl_of(job: Job) -> float:
    """Returns the mean time per later token; 0 for one token."""
    later = job.trace.output_tokens - 1
    return (job.done_s - job.first_token_s) / later if later > 0 else 0.0


def is_within(job: Job, targets: Targets) -> bool:
    if job.done_s < 0:
        return False
    ttft_s, itl_s = job.first_token_s - job.arrived_s, itl_of(job)
    return (targets.ttft_s is None or ttft_s <= targets.ttft_s) and (targets.itl_s is None or itl_s <= targets.itl_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 without any."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0
