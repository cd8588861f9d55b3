"""Predictors of the load, and the choice between them."""

import math
import sys
from pathlib import Path
from random import Random

import pytest

from kvmesh.errors import InvalidRequestError
from services.planner.__main__ import read_history
from services.planner.decide.history import LoadHistory
from services.planner.decide.settings import DecideSettings
from services.planner.observe import _rates
from services.planner.predict.heavy import PACKAGES, heavy_predictor
from services.planner.predict.predictors import (
    HEADROOM_MAX,
    LocalTrend,
    MovingWindow,
    SeasonalNaive,
    backtest,
    constant,
    predict,
    predictors,
)


def test_simple_predictors():
    """Each simple predictor returns the values of its definition."""
    assert constant([1.0, 5.0], 3) == [5.0, 5.0, 5.0]
    assert MovingWindow(2)([9.0, 1.0, 3.0], 2) == [2.0, 2.0]
    assert SeasonalNaive(3)([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 4) == [4.0, 5.0, 6.0, 4.0]
    assert SeasonalNaive(3)([1.0, 2.0], 2) == [2.0, 2.0]


def test_the_filter_follows_a_line_and_removes_noise():
    """The filter continues a line, damped. On noise around a constant its error is smaller than that of the newest value."""
    line = [float(i) for i in range(60)]
    first = LocalTrend()(line, 1)[0]
    assert 59 < first <= 60.5
    assert LocalTrend(damping=1.0)(line, 3)[-1] == pytest.approx(62.0, abs=0.1)
    generator = Random(1)
    noisy = [10 + generator.gauss(0, 1) for _ in range(200)]
    ends = range(100, 200)
    filtered = sum((LocalTrend()(noisy[:end], 1)[0] - 10) ** 2 for end in ends)
    assert filtered < sum((noisy[end - 1] - 10) ** 2 for end in ends)


def test_the_filter_does_not_depend_on_the_unit():
    """Scaling the history scales the prediction, and predictions are never negative."""
    history = [3.0, 4.0, 2.0, 6.0, 7.0, 5.0]
    assert LocalTrend()([60 * value for value in history], 2) == pytest.approx(
        [60 * v for v in LocalTrend()(history, 2)]
    )
    assert LocalTrend()([5.0, 3.0, 1.0, 0.0], 5)[-1] >= 0.0


def test_back_tests_choose_the_best_predictor():
    """The back test chooses the seasonal predictor for a periodic load, a window or the filter for noise, and the filter for a ramp."""
    season = [10 + 5 * math.sin(2 * math.pi * i / 24) for i in range(96)]
    known = predictors(season_steps=24)
    assert predict(known, season, steps=3).predictor == "seasonal"
    generator = Random(2)
    noise = [10 + generator.gauss(0, 2) for _ in range(80)]
    assert predict(predictors(season_steps=0), noise, steps=1).predictor in ("window", "kalman")
    assert predict(predictors(season_steps=0), [float(i) for i in range(80)], steps=6).predictor == "kalman"
    assert predict(known, season, steps=3, chosen="constant").predictor == "constant"


def test_a_back_test_uses_past_values_only():
    """The error of `constant` on a line equals the slope times the steps. It would be smaller if the back test used later values."""
    score = backtest("constant", constant, [float(i) for i in range(40)], steps=2, quantile=1.0)
    assert score is not None
    mean = sum(range(9, 40)) / 31
    assert score.error == pytest.approx(2.0 / mean, rel=0.1)


def test_headroom_covers_past_errors_within_its_limit():
    """A series that was always predicted exactly has no headroom. A step raises the headroom to its limit only."""
    exact = predict({"constant": constant}, [5.0] * 30, steps=2)
    assert (exact.value, exact.upper, exact.error) == (5.0, 5.0, 0.0)
    step = predict({"constant": constant}, [1.0] * 20 + [100.0] * 10, steps=6, quantile=1.0)
    assert step.upper == pytest.approx(step.value * (1 + HEADROOM_MAX))


def test_headroom_forgets_errors_of_a_rise_that_ended():
    """Predictions lag behind a rise. Headroom covers this during the rise, and disappears when the load has been level for a while."""
    rise = [10.0 + i for i in range(20)]
    during = predict({"constant": constant}, rise, steps=4)
    after = predict({"constant": constant}, [*rise, *[30.0] * 13], steps=4)
    assert during.upper > 1.1 * during.value
    assert after.upper == after.value


def test_without_history_the_newest_value_is_predicted():
    """The error of such a prediction is absent, not zero."""
    first = predict(predictors(season_steps=0), [7.0, 8.0], steps=3)
    assert (first.value, first.error, first.predictor) == (8.0, None, "constant")


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_libraries_predict_a_ramp(name: str):
    """On a noisy ramp each library predicts better than the newest value. Its predictions are never negative, and its error is measured as for
    the other predictors."""
    pytest.importorskip(
        PACKAGES[name], reason=f"the package {PACKAGES[name]} is not installed (pip install 'kvmesh[{name}]')"
    )
    generator = Random(4)
    ramp = [10 + 0.5 * i + generator.gauss(0, 0.5) for i in range(60)]
    predictor = heavy_predictor(name, interval_s=10.0)
    found = predict({name: predictor}, ramp, steps=4)
    assert found.predictor == name
    assert found.value == pytest.approx(10 + 0.5 * 63, rel=0.06)
    score = backtest("constant", constant, ramp, steps=4, quantile=0.8)
    assert score is not None
    assert found.error is not None
    assert found.error < score.error
    assert all(value >= 0 for value in predictor([5.0 - 0.3 * i for i in range(16)], 8))
    assert predictor([3.0, 4.0], 2) == [4.0, 4.0]


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch, name: str):
    """The error names the setting and the extra that installs the library."""
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)  # Makes the import fail.
    with pytest.raises(InvalidRequestError, match=f"kvmesh\\[{name}\\]") as refusal:
        LoadHistory(DecideSettings(predictor=name))
    assert refusal.value.field == "predictor"


def test_predictions_start_from_a_history_file(tmp_path: Path):
    """The first prediction continues a ramp from the history file. Without the file it equals the newest rate. An invalid file is refused."""
    path = tmp_path / "history.json"
    path.write_text('{"m": [' + ",".join(str(10 + i) for i in range(40)) + "]}")
    history = LoadHistory(DecideSettings(start_s=30.0))
    history.warm_up(read_history(str(path))["m"])
    assert history.predict(49.0).value > 50
    assert history.predict(49.0).predictor == "kalman"
    assert LoadHistory(DecideSettings()).predict(49.0).value == 49.0
    for text in ('{"m": [-1]}', '{"m": 3}', "no"):
        path.write_text(text)
        with pytest.raises(InvalidRequestError) as refusal:
            read_history(str(path))
        assert refusal.value.field == "history_file"
    assert read_history("") == {}


def test_gaps_of_a_range_query_are_zero():
    """Prometheus omits times without samples. Missing times and NaN count as a rate of 0."""
    assert _rates([(100, "1"), (110, "2"), (140, "3"), (150, "NaN")], 10.0) == [1.0, 2.0, 0.0, 0.0, 3.0, 0.0]
