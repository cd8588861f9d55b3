"""Chooses the predictor that would have been best so far. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.planner.predict.predictors import Predictor

ORIGINS_MAX = 30
ORIGINS_MIN = 5
HEADROOM_ORIGINS = 10
"""The newest tests, whose errors headroom covers. Those of a rise would be paid for long after its end."""
HEADROOM_MAX = 0.3
"""More would be paid for one step of the load long after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Back-test of one predictor. `error`: mean absolute error over the mean value. `headroom`: what to add to a prediction, as a share.

    `headroom` is chosen so that the load was above prediction and headroom in a share of 1 - `quantile` of the newest tests.
    """

    name: str
    error: float
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
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
        ratios.append((actual - predicted) / max(predicted, 0.1 * mean))
    newest = sorted(ratios[-HEADROOM_ORIGINS:])
    headroom = newest[min(len(newest) - 1, math.ceil(quantile * len(newest)) - 1)]
    return Score(name=name, error=missed / len(origins) / mean, headroom=min(HEADROOM_MAX, max(0.0, headroom)))


def predict(
    known: Mapping[str, Predictor], history: Sequence[float], *, steps: int, quantile: float = 0.8, chosen: str = ""
) -> Prediction:
    """Predicts with the predictor of the smallest error, or with `chosen`. Without enough history the newest value goes on."""
    candidates = {chosen: known[chosen]} if chosen else known
    scores = [
        score
        for name, predictor in candidates.items()
        if (score := backtest(name, predictor, history, steps=steps, quantile=quantile)) is not None
    ]
    if not scores:
        value = history[-1]
        return Prediction(value=value, upper=value, predictor=chosen or "constant", error=None)
    best = min(scores, key=lambda score: score.error)
    value = max(candidates[best.name](history, steps))
    return Prediction(value=value, upper=value * (1 + best.headroom), predictor=best.name, error=best.error)
