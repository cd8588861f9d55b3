"""The load that pools must serve, with its variation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from kvmesh.core.planning import Load

LENGTH_CV = 0.8
"""Standard deviation over mean of prompt lengths that were not observed; Azure's traces of 2023 have 0.8 to 1.1."""
POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`prompt_lengths`: (tokens, share of the requests), shares add up to 1. `burstiness`: variance over mean of arrivals, 1 for Poisson."""

    requests_per_s: float
    prompt_lengths: Sequence[tuple[float, float]]
    output_tokens: float
    hit_rate: float = 0.0
    burstiness: float = 1.0

    @property
    def prompt_tokens(self) -> float:
        return sum(tokens * share for tokens, share in self.prompt_lengths)

    @property
    def load(self) -> Load:
        return Load(
            requests_per_s=self.requests_per_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            hit_rate=self.hit_rate,
        )

    def at_rate(self, requests_per_s: float) -> "Demand":
        return replace(self, requests_per_s=requests_per_s)


def log_normal(mean: float, cv: float) -> list[tuple[float, float]]:
    """POINTS equally likely values with this mean; their spread is a little below `cv`, as the tail is cut."""
    if cv <= 0:
        return [(mean, 1.0)]
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = NormalDist()
    values = [math.exp(sigma * normal.inv_cdf((i + 0.5) / POINTS)) for i in range(POINTS)]
    scale = mean * POINTS / sum(values)
    return [(value * scale, 1 / POINTS) for value in values]


def lengths_of_buckets(buckets: Iterable[tuple[float, float]], mean: float) -> list[tuple[float, float]]:
    """Lengths from (upper bound, cumulative count) of a histogram: the geometric middle of each bucket, scaled to the exact mean.

    Empty without observations. Values above the last finite bound count as twice that bound.
    """
    ordered = sorted(buckets)
    points: list[tuple[float, float]] = []
    lower, below = 1.0, 0.0
    for upper, count in ordered:
        middle = 2 * lower if math.isinf(upper) else math.sqrt(max(1.0, lower) * upper)
        if count > below:
            points.append((middle, count - below))
            below = count
        lower = upper
    total = sum(count for _, count in points)
    if not total or mean <= 0:
        return []
    scale = mean * total / sum(tokens * count for tokens, count in points)
    return [(tokens * scale, count / total) for tokens, count in points]
