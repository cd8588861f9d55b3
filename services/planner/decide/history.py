"""The history of a model's load, and what it predicts. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from services.planner.decide.settings import DecideSettings
from services.planner.predict.heavy import PACKAGES, heavy_predictor
from services.planner.predict.predictors import PeakPrediction, predict, predictors
from services.planner.sizing.demand import Demand

GROWTH_MAX = 1.5
"""A filter mistakes a step for a trend, and would extrapolate it."""


class LoadHistory:
    """Request rates at equal intervals. Each value is the mean of those that were observed within its interval."""

    def __init__(self, settings: DecideSettings) -> None:
        self._settings = settings
        self._rates: deque[float] = deque(maxlen=settings.history_max)
        self._ends_s: float | None = None
        self._sum = 0.0
        self._count = 0
        self._prediction: PeakPrediction | None = None
        self._predictors = dict(predictors(season_steps=round(settings.season_s / settings.interval_s)))
        if settings.predictor in PACKAGES:
            self._predictors[settings.predictor] = heavy_predictor(settings.predictor, interval_s=settings.interval_s)

    def warm_up(self, rates: Sequence[float]) -> None:
        """Adds rates of the past, oldest first, at the settings' interval."""
        self._rates.extend(rates)

    def add(self, rate: float, now_s: float) -> None:
        if self._ends_s is None:
            self._ends_s = now_s + self._settings.interval_s
        self._sum += rate
        self._count += 1
        if now_s >= self._ends_s:
            self._rates.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
            self._ends_s = now_s + self._settings.interval_s
            self._prediction = None

    def predict(self, rate: float) -> PeakPrediction:
        """Predicts the peak rate until workers that start now are ready, plus one interval. `rate`: the newest rate."""
        if not self._rates:
            return PeakPrediction(value=rate, upper=rate, predictor="constant", error=None)
        if self._prediction is None:
            steps = max(1, round(self._settings.start_s / self._settings.interval_s) + 1)
            self._prediction = predict(
                self._predictors,
                tuple(self._rates),
                steps=steps,
                quantile=self._settings.headroom_quantile,
                chosen=self._settings.predictor,
            )
        return self._prediction

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(self._rates)


def coming_demand(demand: Demand, prediction: PeakPrediction, recent_rate: float) -> Demand:
    """Returns the largest load within the horizon: never below the present one, and at most GROWTH_MAX times it."""
    return replace(demand, requests_per_s=max(recent_rate, min(prediction.upper, GROWTH_MAX * recent_rate)))
