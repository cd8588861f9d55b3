"""Predictors of a series of values at equal intervals. Each is a pure function of the history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Predictor(Protocol):
    """Predicts the next `steps` values. The history is never empty, and its newest value is the last one."""

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        """Returns `steps` values at or above 0."""
        ...


def constant(history: Sequence[float], steps: int) -> Sequence[float]:
    """The newest value goes on."""
    return [history[-1]] * steps


@dataclass(frozen=True, slots=True)
class MovingWindow:
    """The mean of the newest `width` values goes on."""

    width: int

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        newest = history[-self.width :]
        return [sum(newest) / len(newest)] * steps


@dataclass(frozen=True, slots=True)
class SeasonalNaive:
    """The value of one period ago returns; without a whole period of history the newest value goes on."""

    period: int

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        if len(history) < self.period:
            return constant(history, steps)
        season = history[-self.period :]
        return [season[i % self.period] for i in range(steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTrend:
    """A Kalman filter of a level and a trend, the local linear trend model.

    Source: J. Durbin and S. J. Koopman, Time Series Analysis by State Space Methods, 2nd edition 2012, sections 3.2 and 4.3. Variances are
    relative to that of the observations, which makes the filter independent of the scale. `damping` per step keeps a trend from going on for
    ever (Gardner and McKenzie 1985).
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
