"""Sizing by thresholds: one worker at a time, with hysteresis, without targets or a profile."""

import pytest

from kvmesh.core.planning import DecisionAction, ObservationState, PoolLimits, Shape, Targets
from kvmesh.errors import InvalidRequestError
from services.planner.decide.model_planner import ModelPlanner
from services.planner.decide.settings import DecideSettings
from services.planner.decide.thresholds import Thresholds, ThresholdSettings
from services.planner.observation import ModelObservation

LIMITS = Targets(model="m", decode=PoolLimits(workers_min=2, workers_max=4))


def seen(backlog: float, kv: float, prefill: int = 2, decode: int = 2) -> ModelObservation:
    return ModelObservation(
        model="m",
        state=ObservationState.COMPLETE,
        ready=Shape(prefill_workers=prefill, decode_workers=decode),
        backlog_tokens=backlog,
        kv_usage=kv,
    )


def thresholds() -> Thresholds:
    return Thresholds(ThresholdSettings(), start_s=30.0, calm_s=60.0, workers_max=8)


def test_a_pool_grows_by_one_per_start():
    """Above 8192 waiting tokens per worker a pool grows by one worker, again only after `start_s`, and never beyond its limit."""
    policy, shape = thresholds(), Shape(prefill_workers=2, decode_workers=2)
    sizes = []
    for second in range(120):
        shape = policy.choose(seen(17_000.0, 0.9), shape, LIMITS, now_s=float(second))
        sizes.append((shape.prefill_workers, shape.decode_workers))
    assert [sizes[at] for at in (0, 29, 30, 60, 90, 119)] == [(3, 3), (3, 3), (4, 4), (5, 4), (6, 4), (6, 4)]


def test_a_pool_shrinks_after_a_calm_time_if_the_smaller_one_suffices():
    """3 workers with 40 % of their KV in use would be 2 with 60 %, above the low threshold, so the pool does not shrink. With 30 % it shrinks
    after the calm time."""
    policy, shape = thresholds(), Shape(prefill_workers=1, decode_workers=3)
    for second in range(300):
        assert policy.choose(seen(0.0, 0.4), shape, LIMITS, now_s=float(second)) == shape
    assert [policy.choose(seen(0.0, 0.3), shape, LIMITS, now_s=300.0 + at).decode_workers for at in (0, 59, 60)] == [
        3,
        3,
        2,
    ]
    # A pool at its minimum does not shrink.
    assert (
        policy.choose(seen(0.0, 0.1), Shape(prefill_workers=1, decode_workers=2), LIMITS, now_s=900.0).decode_workers
        == 2
    )


def test_noise_between_the_thresholds_changes_nothing():
    """Values that alternate between both thresholds for an hour never change the pools."""
    policy, shape = thresholds(), Shape(prefill_workers=2, decode_workers=2)
    for second in range(3600):
        assert (
            policy.choose(
                seen(3000.0 + 2000 * (second % 2), 0.6 + 0.1 * (second % 2)), shape, LIMITS, now_s=float(second)
            )
            == shape
        )


def test_thresholds_need_neither_targets_nor_a_profile():
    """The reason of the decision names the threshold. With sizing by targets, the same observation holds the plan."""
    shape = Shape(prefill_workers=2, decode_workers=2)
    planner = ModelPlanner("m", DecideSettings(sizing="thresholds", start_s=30.0))
    choice, _ = planner.tick(seen(17_000.0, 0.6), targets=None, speed=None, wanted=shape, now_s=100.0)
    assert (choice.action, choice.reason) == (DecisionAction.SCALE, "above_threshold")
    assert choice.alternatives[0].shape == Shape(prefill_workers=3, decode_workers=2)
    held, _ = ModelPlanner("m", DecideSettings()).tick(
        seen(17_000.0, 0.6), targets=None, speed=None, wanted=shape, now_s=100.0
    )
    assert held.reason == "no_targets"


def test_thresholds_without_hysteresis_are_refused():
    """A low threshold must be below the high one. The error names the setting."""
    with pytest.raises(InvalidRequestError) as refusal:
        ThresholdSettings(kv_low=0.8, kv_high=0.8)
    assert refusal.value.field == "kv_low"
