"""The prompts that wait beyond what the targets allow, and the rate that serves them in time. Pure."""

from dataclasses import replace

from kvmesh.core.planning import Shape, Targets
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer

NO_TARGET_S = 10.0
"""Wait that is harmless where there is no TTFT target."""


def harmless_tokens(shape: Shape, targets: Targets, s_per_token: float) -> float:
    """Returns the backlog that a pool computes within half of the TTFT target."""
    workers = max(1, shape.prefill_workers or shape.decode_workers)
    return workers * (targets.ttft_s or 2 * NO_TARGET_S) / 2 / s_per_token


def catch_up_rate(
    sizer: Sizer,
    demand: Demand,
    *,
    backlog_tokens: float,
    ready: Shape,
    wanted: Shape,
    ready_in_s: float,
    start_s: float,
    catch_up_s: float,
) -> float:
    """Returns the requests per second beyond the load that workers which start now must serve to remove the backlog within `catch_up_s`.

    A fluid model of the prefill pool. Until `ready_in_s`, when the workers that start already are ready, the backlog changes by the load
    minus the capacity of the ready pool; from then until `start_s` by the load minus that of the wanted pool.
    """
    if not ready.prefill_workers or not demand.prompt_tokens:
        return 0.0
    excess_tokens = backlog_tokens - harmless_tokens(ready, sizer.targets, sizer.speed.prefill_s_per_token)
    # At the start of an overload nothing waits yet, but it will before new workers are ready.
    waiting = max(0.0, excess_tokens) / demand.prompt_tokens
    waiting += (demand.requests_per_s - capacity(sizer, demand, ready)) * ready_in_s
    waiting = max(0.0, waiting) + (demand.requests_per_s - capacity(sizer, demand, wanted)) * (start_s - ready_in_s)
    return max(0.0, waiting) / catch_up_s


def capacity(sizer: Sizer, demand: Demand, shape: Shape) -> float:
    """Returns the requests per second that a prefill pool computes when it is never idle."""
    full = sizer.forecast(demand, replace(shape, deflect_tokens=0))
    return shape.prefill_workers * full.prefill_rate / full.prefill_load if full.prefill_load else float("inf")
