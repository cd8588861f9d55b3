"""Converts loads to demands of the planner."""

from kvmesh.core.planning import Load
from services.planner.sizing.demand import LENGTH_CV, Demand, log_normal


def demand_of(load: Load, *, cv: float = LENGTH_CV, burstiness: float = 1.0) -> Demand:
    """Returns a demand with log-normal prompt lengths."""
    return Demand(
        requests_per_s=load.requests_per_s,
        prompt_lengths=log_normal(mean=load.prompt_tokens, cv=cv),
        output_tokens=load.output_tokens,
        hit_rate=load.hit_rate,
        burstiness=burstiness,
    )
