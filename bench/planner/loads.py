"""Loads of known shapes (constant, step, ramp, spike, diurnal), and traces at another speed."""

import math
from collections.abc import Callable, Mapping, Sequence

from kvmesh.core.whatif import RecordedRequest


def shapes(duration_s: float, low: float, high: float) -> Mapping[str, Callable[[float], float]]:
    """Returns the load shapes by name. Rates vary from `low` to `high` requests per second over `duration_s`."""
    third = duration_s / 3
    return {
        "constant": lambda at_s: high,
        "step": lambda at_s: high if third <= at_s < 2 * third else low,
        "ramp": lambda at_s: low + (high - low) * min(1.0, at_s / (2 * third)),
        "spike": lambda at_s: high if third <= at_s % (2 * third) < third + duration_s / 20 else low,
        "diurnal": lambda at_s: low + (high - low) * (1 - math.cos(2 * math.pi * at_s / (duration_s / 2))) / 2,
    }


def scaled(trace: Sequence[RecordedRequest], speed: float, duration_s: float = math.inf) -> list[RecordedRequest]:
    """Returns the trace `speed` times as fast, up to `duration_s`."""
    return [
        RecordedRequest(
            at_s=request.at_s / speed,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            block_ids=request.block_ids,
        )
        for request in trace
        if request.at_s / speed < duration_s
    ]
