"""How fast a worker or a link is: coefficients, learned from observed times.

A time is modelled as the sum of coefficients times counts, such as base + s_per_token * tokens. An extended Kalman filter over the
logarithms of the coefficients corrects them: the error of an observation, log(observed / expected), is divided among the coefficients
by their part in the expected time and by how uncertain each still is. Prompts of different lengths therefore separate the base from
the time per token, a value that is wrong by a factor of fifty is right after some tens of observations, and a value from a worker's
profile moves less than a default. The error is clipped, so an outlier moves little. Uncertainty never falls to zero, so a worker that
changes is followed. A coefficient that starts at zero stays zero.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import exp, inf, log
from operator import mul

from kvmesh.core import Coefficient, PerformanceProfile

CLIP = 1.0
"""Bound of the error, and of the change of a logarithm: one observation moves a value by a factor of e at most."""
NOISE = 0.1
"""Variance of the logarithm of one observation: times vary by a third."""
DRIFT = 0.0002
"""Variance that each observation adds; with NOISE this gives a lasting gain of about one in twenty."""
PRIOR = {"default": 5.0, "profile": 0.25}
"""Variance of the logarithms at the start: defaults may be wrong by ten times, a profile by half."""
FACTOR_MAX = 1000.0
"""A value stays within this factor of its start."""
DEFAULTS = PerformanceProfile(
    prefill_base_s=0.004,
    prefill_s_per_token=0.00004,
    prefill_s_per_token_pair=0.0,
    decode_step_base_s=0.006,
    decode_s_per_request=0.00002,
    decode_s_per_kv_token=0.00000004,
)
"""Of workers whose profile lacks a coefficient: an 8-billion-parameter model on one current datacentre GPU.

After some requests they do not matter, since the coefficients of each worker are learned. docs/understand/routing-cost.md gives the reason
of each.
"""
KV_BYTES_PER_TOKEN = 131_072
"""Of workers that do not say it: 32 layers, 8 heads of 128, 2 bytes, keys and values."""


class CoefficientSource(StrEnum):
    """Where the value of a coefficient comes from."""

    DEFAULT = "default"
    PROFILE = "profile"
    LEARNED = "learned"


class LinearModel:
    """A time as a sum of coefficients times counts. `values` is current at any time."""

    __slots__ = ("_bounds", "_covariance", "_names", "_priors", "_sources", "observations", "values")

    def __init__(self, starts: Sequence[tuple[str, float, CoefficientSource]]) -> None:
        self._names = [name for name, _, _ in starts]
        self.values = [value for _, value, _ in starts]
        self._sources = [source for _, _, source in starts]
        self._bounds = [(value / FACTOR_MAX, value * FACTOR_MAX) for value in self.values]
        self._priors = [PRIOR[source.value] for source in self._sources]
        self._covariance = [
            [prior if i == j else 0.0 for j in range(len(starts))] for i, prior in enumerate(self._priors)
        ]
        self.observations = [0] * len(starts)

    def learn(self, observed_s: float, *counts: float) -> None:
        """Corrects the coefficients by one observed time. Ignores times that cannot be real."""
        values = self.values
        parts = list(map(mul, values, counts))
        expected_s = sum(parts)
        if not (expected_s > 0 and 0 < observed_s < inf):
            return
        error = _clip(log(observed_s / expected_s))
        # The derivative of log(expected) with respect to the logarithm of a coefficient is the share of its part. So `shares` is the filter's
        # observation matrix H, `spread` is P Hᵀ, and `variance` is H P Hᵀ + R.
        shares = [part / expected_s for part in parts]
        spread = [sum(map(mul, row, shares)) for row in self._covariance]
        variance = sum(map(mul, spread, shares)) + NOISE
        for i, row in enumerate(self._covariance):
            # A coefficient without spread is zero, or this time does not depend on it.
            if own := spread[i]:
                low, high = self._bounds[i]
                value = values[i] * exp(_clip(own * error / variance))
                values[i] = low if value < low else high if value > high else value
                for j, other in enumerate(spread):
                    # P - K H P, with the gain K = `spread` / `variance`.
                    row[j] -= own * other / variance
            # Bounded by the start: a coefficient that no observation depends on would otherwise become ever less certain.
            uncertainty, prior = row[i] + DRIFT, self._priors[i]
            row[i] = uncertainty if uncertainty < prior else prior
            if shares[i] > 0:
                self.observations[i] += 1

    def coefficients(self) -> Iterator[Coefficient]:
        for name, value, source, observations in zip(
            self._names, self.values, self._sources, self.observations, strict=True
        ):
            yield Coefficient(
                name=name,
                value=value,
                source=CoefficientSource.LEARNED if observations else source,
                observations=observations,
            )


def _clip(logarithm: float) -> float:
    return CLIP if logarithm > CLIP else -CLIP if logarithm < -CLIP else logarithm


class Coefficients:
    """The coefficients of one rank of a worker."""

    __slots__ = ("decode", "itl_target_s", "kv_bytes_per_token", "prefill")

    def __init__(self, profile: PerformanceProfile | None, *, itl_target_s: float) -> None:
        profile = profile or PerformanceProfile()

        def start(name: str) -> tuple[str, float, CoefficientSource]:
            value = getattr(profile, name)
            return (
                (name, getattr(DEFAULTS, name), CoefficientSource.DEFAULT)
                if value is None
                else (name, value, CoefficientSource.PROFILE)
            )

        self.prefill = LinearModel(
            [start("prefill_base_s"), start("prefill_s_per_token"), start("prefill_s_per_token_pair")]
        )
        self.decode = LinearModel(
            [start("decode_step_base_s"), start("decode_s_per_request"), start("decode_s_per_kv_token")]
        )
        self.kv_bytes_per_token = profile.kv_bytes_per_token or KV_BYTES_PER_TOKEN
        self.itl_target_s = profile.itl_target_s or itl_target_s

    def prefill_s(self, uncached_tokens: float, prompt_tokens: int) -> float:
        """Time to compute the last `uncached_tokens` of a prompt."""
        base, per_token, per_pair = self.prefill.values
        return base + uncached_tokens * (per_token + per_pair * (prompt_tokens - uncached_tokens / 2))

    def step_s(self, requests: float, kv_tokens: float) -> float:
        base, per_request, per_token = self.decode.values
        return base + per_request * requests + per_token * kv_tokens

    def all(self) -> Sequence[Coefficient]:
        return (*self.prefill.coefficients(), *self.decode.coefficients())
