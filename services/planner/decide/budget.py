"""One budget for the workers of several models. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from kvmesh.core.planning import Shape, Targets


def cost_of(shape: Shape, targets: Targets) -> float:
    """Cost per hour."""
    return (
        shape.prefill_workers * targets.prefill.cost_per_worker + shape.decode_workers * targets.decode.cost_per_worker
    )


def within_budget(targets: Targets, budget: float | None, costs: Mapping[str, float]) -> Targets:
    """Limits a model to what the others leave. `costs`: what each model wants at present, by its name. `budget` None: no limit.

    Together the models never want more than the budget if each of them is limited by the present wants of the others. A model that wants
    workers already keeps them, so that one model's load never stops another's workers; it gives them back when it needs them no more.
    """
    if budget is None:
        return targets
    others = sum(cost for model, cost in costs.items() if model != targets.model)
    left = max(costs.get(targets.model, 0.0), budget - others, 1e-9)
    return replace(targets, cost_max=left if targets.cost_max is None else min(left, targets.cost_max))
