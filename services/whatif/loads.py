"""Drawn loads. Arrivals are Poisson with a rate that changes in time."""

import math
from collections.abc import Callable
from random import Random

from services.whatif.traces import TraceRequest

LENGTH_MAX = 100_000


def make_load(
    rate: Callable[[float], float],
    *,
    peak: float,
    duration_s: float,
    prompt_tokens: float,
    output_tokens: float,
    prompt_cv: float = 0.8,
    output_cv: float = 0.8,
    seed: int = 1,
) -> list[TraceRequest]:
    """Draws arrivals by thinning (Lewis and Shedler 1979) and log-normal lengths. `rate` never exceeds `peak`."""
    generator = Random(seed)
    at_s, requests = 0.0, []
    while (at_s := at_s + generator.expovariate(peak)) < duration_s:
        if generator.random() * peak < rate(at_s):
            requests.append(
                TraceRequest(
                    at_s=at_s,
                    prompt_tokens=draw_length(generator, mean=prompt_tokens, cv=prompt_cv),
                    output_tokens=draw_length(generator, mean=output_tokens, cv=output_cv),
                )
            )
    return requests


def draw_length(generator: Random, mean: float, cv: float) -> int:
    """Log-normal with this mean and coefficient of variation."""
    if cv <= 0:
        return max(1, round(mean))
    sigma2 = math.log(1 + cv * cv)
    return min(LENGTH_MAX, max(1, round(generator.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2)))))
