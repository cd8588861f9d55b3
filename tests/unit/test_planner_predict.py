"""Predictors, and how one is chosen."""

import math
from random import Random

import pytest

from services.planner.predict.backtest import HEADROOM_MAX, backtest, predict
from services.planner.predict.predictors import LocalTrend, MovingWindow, SeasonalNaive, constant, predictors


def test_simple_predictors():
    """By definition."""
    assert constant([1.0, 5.0], 3) == [5.0, 5.0, 5.0]
    assert MovingWindow(2)([9.0, 1.0, 3.0], 2) == [2.0, 2.0]
    assert SeasonalNaive(3)([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 4) == [4.0, 5.0, 6.0, 4.0]
    assert SeasonalNaive(3)([1.0, 2.0], 2) == [2.0, 2.0]


def test_the_filter_follows_a_line_and_forgets_the_noise():
    """It continues a line, damped, and predicts less of the noise than the newest value does."""
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
    """A rate per minute is sixty times a rate per second."""
    history = [3.0, 4.0, 2.0, 6.0, 7.0, 5.0]
    assert LocalTrend()([60 * value for value in history], 2) == pytest.approx(
        [60 * v for v in LocalTrend()(history, 2)]
    )
    assert LocalTrend()([5.0, 3.0, 1.0, 0.0], 5)[-1] >= 0.0


def test_back_tests_choose_what_fits_the_series():
    """A season for a load that repeats, a window for noise around a constant, the filter for a ramp."""
    season = [10 + 5 * math.sin(2 * math.pi * i / 24) for i in range(96)]
    known = predictors(season_steps=24)
    assert predict(known, season, steps=3).predictor == "seasonal"
    generator = Random(2)
    noise = [10 + generator.gauss(0, 2) for _ in range(80)]
    assert predict(predictors(season_steps=0), noise, steps=1).predictor in ("window", "kalman")
    assert predict(predictors(season_steps=0), [float(i) for i in range(80)], steps=6).predictor == "kalman"
    assert predict(known, season, steps=3, chosen="constant").predictor == "constant"


def test_a_back_test_never_sees_the_future():
    """A predictor that is right by chance of what it was given would be: the error of `constant` on a line is its slope."""
    score = backtest("constant", constant, [float(i) for i in range(40)], steps=2, quantile=1.0)
    assert score is not None
    mean = sum(range(9, 40)) / 31
    assert score.error == pytest.approx(2.0 / mean, rel=0.1)


def test_headroom_covers_past_errors_within_its_limit():
    """A series that was always predicted exactly needs none; a step does not raise it without limit."""
    exact = predict({"constant": constant}, [5.0] * 30, steps=2)
    assert (exact.value, exact.upper, exact.error) == (5.0, 5.0, 0.0)
    step = predict({"constant": constant}, [1.0] * 20 + [100.0] * 10, steps=6, quantile=1.0)
    assert step.upper == pytest.approx(step.value * (1 + HEADROOM_MAX))


def test_without_history_the_newest_value_goes_on():
    """And the error is absent rather than zero."""
    first = predict(predictors(season_steps=0), [7.0, 8.0], steps=3)
    assert (first.value, first.error, first.predictor) == (8.0, None, "constant")
