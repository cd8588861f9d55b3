"""Predictors of a series of values at equal intervals, and the choice of the one that would have been best so far. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ORIGINS_MAX = 30
ORIGINS_MIN = 5
HEADROOM_ORIGINS = 10
"""The newest tests, whose errors headroom covers. Those of a rise would be paid for long after its end."""
HEADROOM_MAX = 0.3
"""More would be paid for one step of the load long after it."""


class Predictor(Protocol):
    """Predicts the next `steps` values. The history is never empty, and its newest value is the last one."""

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        """Returns `steps` values at or above 0."""
        ...


def constant(history: Sequence[float], steps: int) -> Sequence[float]:
    """Predicts that the newest value stays."""
    return [history[-1]] * steps


@dataclass(frozen=True, slots=True)
class MovingWindow:
    """Predicts the mean of the newest `width` values."""

    width: int

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        newest = history[-self.width :]
        return [sum(newest) / len(newest)] * steps


@dataclass(frozen=True, slots=True)
class SeasonalNaive:
    """Predicts the value of one period ago; without a whole period of history, the newest value."""

    period: int

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        if len(history) < self.period:
            return constant(history, steps)
        season = history[-self.period :]
        return [season[i % self.period] for i in range(steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTrend:
    """A Kalman filter of a level and a trend, the local linear trend model.

    Source: J. Durbin and S. J. Koopman, Time Series Analysis by State Space Methods, 2nd edition 2012, sections 3.2 and 4.3. Variances
    are relative to that of the observations, which makes the filter independent of the scale. `damping` per step limits the extrapolation
    of a trend (Gardner and McKenzie 1985).
    """

    level_variance: float = 0.1
    trend_variance: float = 0.01
    damping: float = 0.98
    newest_max: int = 240

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        level, trend = self._filter(history[-self.newest_max :])
        values = []
        for _ in range(steps):
            trend *= self.damping
            level += trend
            values.append(max(0.0, level))
        return values

    def _filter(self, history: Sequence[float]) -> tuple[float, float]:
        level, trend = history[0], 0.0
        # Covariance of (level, trend); at the start the trend is hardly known.
        p_level, p_both, p_trend = 1.0, 0.0, 1.0
        phi = self.damping
        for value in history[1:]:
            level, trend = level + phi * trend, phi * trend
            p_level += 2 * phi * p_both + phi * phi * p_trend + self.level_variance
            p_both = phi * p_both + phi * phi * p_trend
            p_trend = phi * phi * p_trend + self.trend_variance
            error, total = value - level, p_level + 1.0
            k_level, k_trend = p_level / total, p_both / total
            level, trend = level + k_level * error, trend + k_trend * error
            p_level, p_both, p_trend = (1 - k_level) * p_level, (1 - k_level) * p_both, p_trend - k_trend * p_both
        return level, trend


def predictors(*, season_steps: int) -> Mapping[str, Predictor]:
    """Returns all predictors by name. `season_steps` 0: no season."""
    known: dict[str, Predictor] = {"constant": constant, "window": MovingWindow(6), "kalman": LocalTrend()}
    if season_steps:
        known["seasonal"] = SeasonalNaive(season_steps)
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Back-test of one predictor. `error`: mean absolute error over the mean value. `headroom`: what to add to a prediction, as a share.

    `headroom` is chosen so that the load was above prediction and headroom in a share of 1 - `quantile` of the newest tests.
    """

    name: str
    error: float
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrediction:
    """The peak of the next `steps` values. `upper` has headroom for the predictor's past errors. `error` None: not tested yet."""

    value: float
    upper: float
    predictor: str
    error: float | None


def backtest(name: str, predictor: Predictor, history: Sequence[float], *, steps: int, quantile: float) -> Score | None:
    """Predicts the peak of `steps` values from each of the newest origins. None: the history is too short."""
    last = len(history) - steps
    origins_max = min(ORIGINS_MAX, getattr(predictor, "origins_max", ORIGINS_MAX))
    origins = range(max(1, last - origins_max + 1), last + 1)
    if len(origins) < ORIGINS_MIN:
        return None
    mean = sum(history[origins[0] :]) / (len(history) - origins[0])
    if mean <= 0:
        return Score(name=name, error=0.0, headroom=0.0)
    missed, ratios = 0.0, []
    for origin in origins:
        predicted = max(predictor(history[:origin], steps))
        actual = max(history[origin : origin + steps])
        missed += abs(actual - predicted)
        # Without a lower bound, a prediction near 0 would make the ratio arbitrarily large.
        ratios.append((actual - predicted) / max(predicted, 0.1 * mean))
    newest = sorted(ratios[-HEADROOM_ORIGINS:])
    headroom = newest[min(len(newest) - 1, math.ceil(quantile * len(newest)) - 1)]
    return Score(name=name, error=missed / len(origins) / mean, headroom=min(HEADROOM_MAX, max(0.0, headroom)))


def predict(
    known: Mapping[str, Predictor], history: Sequence[float], *, steps: int, quantile: float = 0.8, chosen: str = ""
) -> PeakPrediction:
    """Predicts with the predictor of the smallest error, or with `chosen`. Without enough history it predicts the newest value."""
    candidates = {chosen: known[chosen]} if chosen else known
    scores = [
        score
        for name, predictor in candidates.items()
        if (score := backtest(name, predictor, history, steps=steps, quantile=quantile)) is not None
    ]
    if not scores:
        value = history[-1]
        return PeakPrediction(value=value, upper=value, predictor=chosen or "constant", error=None)
    best = min(scores, key=lambda score: score.error)
    value = max(candidates[best.name](history, steps))
    return PeakPrediction(value=value, upper=value * (1 + best.headroom), predictor=best.name, error=best.error)
