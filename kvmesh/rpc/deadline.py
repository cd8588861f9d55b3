"""The caller's deadline. The time left at one hop is the timeout of the next."""

import math
from typing import Any

import grpc.aio

# For a call without a deadline, gRPC reports a remaining time of hundreds of years.
_NO_DEADLINE_S = 10 * 365 * 86_400.0


def remaining_s(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    """Returns the seconds until the caller's deadline, 0 when it has passed, None when it set none."""
    left: float | None = context.time_remaining()
    if left is None or math.isinf(left) or left > _NO_DEADLINE_S:
        return None
    return max(0.0, left)
