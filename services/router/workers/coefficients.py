"""How fast one worker is, as far as it is known: a value per coefficient, where it comes from, how often it was corrected.

Corrections are those of an extended Kalman filter over the logarithms of the coefficients: the logarithm of observed over expected
time is shared out by the part that each coefficient had in the expectation and by how uncertain it still is. So prompts of
unlike lengths tell the base from the seconds per token, a value that is wrong by a factor of fifty is right after some tens of
observations, and one that a worker told itself moves less. The logarithm is clipped, so an outlier moves little; uncertainty
does not fall to zero, so a worker that changes is followed. A value stays within a factor of where it began; one that began as
zero stays zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf, log
from operator import mul

from kvmesh.core import PerformanceProfile
from services.router.workers.cost_settings import CostSettings

CLIP = 1.0
"""Of the logarithm: a single observation counts as at most e times too long or too short, and moves no value further."""
NOISE = 0.1
"""Variance of the logarithm of a single observation: a third more or less is nothing unusual."""
DRIFT = 0.0002
"""Uncertainty that every observation brings back; with the noise it makes a lasting gain of about one in twenty."""
PRIOR = {"default": 5.0, "profile": 0.25}
"""Uncertainty at the beginning, a variance of logarithms: settings may be wrong by ten times, a profile by half."""
FACTOR_MAX = 1000.0


class Source(StrEnum):
    """Where a coefficient comes from."""

    DEFAULT = "default"
    PROFILE = "profile"
    LEARNED = "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One coefficient as it is told; the unit is in the name."""

    name: str
    value: float
    source: Source
    observations: int


class Linear:
    """A time as a sum of coefficients times what they count. `values` may be read at any time."""

    __slots__ = ("_bounds", "_covariance", "_names", "_priors", "_sources", "_two", "observations", "values")

    def __init__(self, starts: Sequence[tuple[str, float, Source]]) -> None:
        self._names = [name for name, _, _ in starts]
        self.values = [value for _, value, _ in starts]
        self._sources = [source for _, _, source in starts]
        self._bounds = [(value / FACTOR_MAX, value * FACTOR_MAX) for value in self.values]
        self._priors = [PRIOR[source.value] for source in self._sources]
        self._covariance = [
            [prior if i == j else 0.0 for j in range(len(starts))] for i, prior in enumerate(self._priors)
        ]
        self.observations = [0] * len(starts)
        known = [place for place, value in enumerate(self.values) if value]
        self._two = (known[0], known[1]) if len(known) == 2 else None
        """Those that are not zero, when there are two of them."""

    def learn(self, observed_s: float, *counts: float) -> None:
        """It took so long. Times that cannot be are ignored."""
        if self._two is not None:
            i, j = self._two
            if counts[i] > 0 and counts[j] > 0:
                self._learn_two(observed_s, i, j, counts[i], counts[j])
                return
        values = self.values
        parts = list(map(mul, values, counts))
        expected_s = sum(parts)
        if not (expected_s > 0 and 0 < observed_s < inf):
            return
        error = _clipped(log(observed_s / expected_s))
        shares = [part / expected_s for part in parts]
        spread = [sum(map(mul, row, shares)) for row in self._covariance]
        variance = sum(map(mul, spread, shares)) + NOISE
        for i, row in enumerate(self._covariance):
            # Without spread nothing is learned of it: one that is zero, or that this time does not count.
            if own := spread[i]:
                low, high = self._bounds[i]
                value = values[i] * exp(_clipped(own * error / variance))
                values[i] = low if value < low else high if value > high else value
                for j, other in enumerate(spread):
                    row[j] -= own * other / variance
            uncertainty, prior = row[i] + DRIFT, self._priors[i]
            row[i] = uncertainty if uncertainty < prior else prior
            if shares[i] > 0:
                self.observations[i] += 1

    def _learn_two(self, observed_s: float, i: int, j: int, first_count: float, second_count: float) -> None:
        """The same with a number for each step, in a third of the time: this is the ordinary report."""
        values = self.values
        first_s, second_s = values[i] * first_count, values[j] * second_count
        expected_s = first_s + second_s
        if not 0 < observed_s < inf:
            return
        error = _clipped(log(observed_s / expected_s))
        first, second = first_s / expected_s, second_s / expected_s
        row_i, row_j = self._covariance[i], self._covariance[j]
        of_i, of_both, of_j = row_i[i], row_i[j], row_j[j]
        own_i, own_j = of_i * first + of_both * second, of_both * first + of_j * second
        variance = own_i * first + own_j * second + NOISE
        self._move(i, own_i * error / variance)
        self._move(j, own_j * error / variance)
        row_i[j] = row_j[i] = of_both - own_i * own_j / variance
        row_i[i] = min(of_i - own_i * own_i / variance + DRIFT, self._priors[i])
        row_j[j] = min(of_j - own_j * own_j / variance + DRIFT, self._priors[j])

    def _move(self, place: int, logarithm: float) -> None:
        low, high = self._bounds[place]
        value = self.values[place] * exp(_clipped(logarithm))
        self.values[place] = low if value < low else high if value > high else value
        self.observations[place] += 1

    def told(self) -> Iterator[Coefficient]:
        """As others see it."""
        for name, value, source, seen in zip(self._names, self.values, self._sources, self.observations, strict=True):
            yield Coefficient(name=name, value=value, source=Source.LEARNED if seen else source, observations=seen)


def _clipped(logarithm: float) -> float:
    return CLIP if logarithm > CLIP else -CLIP if logarithm < -CLIP else logarithm


class Coefficients:
    """Those of one rank of a worker."""

    __slots__ = ("decode", "itl_target_s", "kv_bytes_per_token", "prefill", "transfer_bytes_per_s")

    def __init__(self, profile: PerformanceProfile | None, settings: CostSettings) -> None:
        told = profile or PerformanceProfile()

        def start(name: str) -> tuple[str, float, Source]:
            value = getattr(told, name)
            return (name, getattr(settings, name), Source.DEFAULT) if value is None else (name, value, Source.PROFILE)

        self.prefill = Linear(
            [start("prefill_base_s"), start("prefill_s_per_token"), start("prefill_s_per_token_pair")]
        )
        self.decode = Linear(
            [start("decode_step_base_s"), start("decode_s_per_request"), start("decode_s_per_kv_token")]
        )
        self.kv_bytes_per_token = told.kv_bytes_per_token or settings.kv_bytes_per_token
        self.transfer_bytes_per_s = told.transfer_bytes_per_s
        self.itl_target_s = told.itl_target_s or settings.itl_target_s

    def prefill_s(self, uncached_tokens: float, prompt_tokens: int) -> float:
        """Time to compute the last `uncached_tokens` of a prompt."""
        base, per_token, per_pair = self.prefill.values
        return base + uncached_tokens * (per_token + per_pair * (prompt_tokens - uncached_tokens / 2))

    def step_s(self, requests: float, kv_tokens: float) -> float:
        """Time of a decode step."""
        base, per_request, per_token = self.decode.values
        return base + per_request * requests + per_token * kv_tokens

    def told(self) -> Sequence[Coefficient]:
        """All of them, for ListWorkers."""
        return (*self.prefill.told(), *self.decode.told())
