"""Corrects predicted latencies by observed ones. Pure."""

import math

from services.planner.observation import ModelObservation
from services.planner.sizing.forecast import Corrections, LatencyForecast
from services.planner.sizing.size import Sizer

SMOOTHING_S = 60.0
SMALL = 0.1
CORRECTION_MAX = 2.0
"""Largest factor, and smallest divisor, of a correction. Beyond, the worker's profile is wrong, and so are predictions for other loads."""
SETTLE_S = 60.0
"""For the length of a window after a change of the pools, observed latencies still include those of the old pools."""


class Correction:
    """Smoothed ratios of observed to predicted means, within CORRECTION_MAX.

    Source of the idea: the correction factors of Dynamo's first planner. Unlike these, they are bounded and follow only steady pools.
    """

    def __init__(self) -> None:
        self._newest_s: float | None = None
        self._settles_s = -math.inf
        self.value = Corrections()

    def restart(self, now_s: float) -> None:
        """The pools changed."""
        self._settles_s = now_s + SETTLE_S

    def update(self, observation: ModelObservation, sizer: Sizer, *, now_s: float, is_steady: bool) -> None:
        """`sizer` predicts without corrections. Overload is not corrected: there the formulas say only that it is one."""
        passed_s = 0.0 if self._newest_s is None else now_s - self._newest_s
        self._newest_s = now_s
        if (
            observation.demand is None
            or not is_steady
            or now_s < self._settles_s
            or not observation.ready.decode_workers
        ):
            return
        forecast = sizer.forecast(observation.demand, observation.ready)
        if not forecast.is_stable:
            return
        weight = 1 - math.exp(-passed_s / SMOOTHING_S)
        observed_s, predicted_s = _waits(observation.ttft_mean_s, forecast)
        self.value = Corrections(
            wait=self._blend(known=self.value.wait, observed_s=observed_s, predicted_s=predicted_s, weight=weight),
            itl=self._blend(
                known=self.value.itl, observed_s=observation.itl_mean_s, predicted_s=forecast.step_s, weight=weight
            ),
        )

    def _blend(self, *, known: float, observed_s: float | None, predicted_s: float, weight: float) -> float:
        if not observed_s or predicted_s <= 0:
            return known
        ratio = min(CORRECTION_MAX, max(1 / CORRECTION_MAX, observed_s / predicted_s))
        return known + weight * (ratio - known)


def _waits(ttft_mean_s: float | None, forecast: LatencyForecast) -> tuple[float | None, float]:
    """Observed and predicted waits, each with a small part of the time that a request takes anyway: short waits say little."""
    small_s = SMALL * forecast.own_mean_s
    observed_s = None if ttft_mean_s is None else max(0.0, ttft_mean_s - forecast.own_mean_s) + small_s
    return observed_s, forecast.wait_mean_s + small_s
