"""Predictors from libraries that the planner does not need otherwise: ARIMA (statsmodels) and Prophet. Pure.

They take 0.1 s to seconds per fit, so they run only if `decide.predictor` names them, and are back-tested from few origins.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from kvmesh.errors import InvalidRequestError
from services.planner.predict.predictors import Predictor, constant

PACKAGES = {"arima": "statsmodels", "prophet": "prophet"}
HISTORY_MAX = 360
"""A fit over an hour of intervals of 10 s takes about 0.1 s."""
POINTS_MIN = 12
ORIGINS_MAX = 5


def heavy_predictor(name: str, *, interval_s: float) -> Predictor:
    """Raises InvalidRequestError if its package is not installed."""
    package = PACKAGES[name]
    if find_spec(package) is None:
        raise InvalidRequestError(
            f"the predictor {name} needs the package {package}: pip install 'kvmesh[{name}]'", field="predictor"
        )
    return Arima() if name == "arima" else ProphetTrend(interval_s=interval_s)


@dataclass(frozen=True, slots=True)
class Arima:
    """ARIMA(1, 1, 1): a random walk whose changes are correlated. Source: Box and Jenkins, Time Series Analysis, 1970."""

    origins_max: int = ORIGINS_MAX

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        if len(history) < POINTS_MIN or len(set(history)) == 1:
            return constant(history, steps)
        from statsmodels.tsa.arima.model import ARIMA

        with warnings.catch_warnings():
            # It warns of starting values and of convergence; the back-test shows whether the result is any good.
            warnings.simplefilter("ignore")
            fitted = ARIMA(list(history[-HISTORY_MAX:]), order=(1, 1, 1)).fit()
            return [max(0.0, float(value)) for value in fitted.forecast(steps)]


@dataclass(frozen=True, slots=True)
class ProphetTrend:
    """Prophet with its defaults: a piecewise linear trend, and seasons of a day and a week once the history has them.

    Source: Taylor and Letham, Forecasting at Scale, 2018.
    """

    interval_s: float
    origins_max: int = ORIGINS_MAX

    def __call__(self, history: Sequence[float], steps: int) -> Sequence[float]:
        if len(history) < POINTS_MIN:
            return constant(history, steps)
        import pandas
        from prophet import Prophet

        logging.getLogger("cmdstanpy").setLevel(logging.ERROR)
        frequency = pandas.Timedelta(seconds=self.interval_s)
        times = pandas.date_range("2000-01-01", periods=len(history), freq=frequency)
        model = Prophet(uncertainty_samples=0)
        model.fit(pandas.DataFrame({"ds": times, "y": list(history)}))
        coming = model.make_future_dataframe(periods=steps, freq=frequency, include_history=False)
        return [max(0.0, float(value)) for value in model.predict(coming)["yhat"]]
