"""Whether an observation can be acted on, and what it says."""

from dataclasses import replace

import pytest

from kvmesh.core import Role
from kvmesh.core.planning import ObservationState, PoolReport
from services.planner.observation import ObservationLimits, observe_model
from services.planner.plan import (
    BLOCKS_TOTAL,
    BLOCKS_USED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    REQUESTS,
    RUNNING,
    STARTED,
    WAITING_TOKENS,
    WORKER_OUTPUT_TOKENS,
    Window,
    WindowKeeper,
    latencies,
)

POOLS = [
    PoolReport(model="m", role=Role.PREFILL, workers_ready=1),
    PoolReport(model="m", role=Role.DECODE, workers_ready=2),
]
WINDOW = Window(
    window_s=60.0,
    increases={
        (REQUESTS, "m", "200"): 100.0,
        (REQUESTS, "m", "503"): 20.0,
        (STARTED, "m"): 120.0,
        (PROMPT_TOKENS, "m"): 120_000.0,
        (OUTPUT_TOKENS, "m"): 24_000.0,
        (WORKER_OUTPUT_TOKENS, "m", "decode"): 24_000.0,
    },
    gauges={
        (BLOCKS_TOTAL, "m", "decode"): 100.0,
        (BLOCKS_USED, "m", "decode"): 50.0,
        (WAITING_TOKENS, "m", "prefill"): 700.0,
        (QUEUED_TOKENS, "normal"): 200.0,
        (QUEUED_TOKENS, "low"): 100.0,
        (QUEUED_TOKENS, "late"): 5000.0,
    },
    workers={("m", "prefill"): 1, ("m", "decode"): 2},
)


def observe(window: Window | None):
    found = latencies(window) if window is not None else []
    return observe_model("m", window, POOLS, latency=found[0] if found else None, limits=ObservationLimits())


def test_a_whole_observation_gives_the_load():
    """Rate by the requests that started, lengths by tokens, and the backlog on workers and in routers, without late requests."""
    seen = observe(WINDOW)
    assert seen.state is ObservationState.COMPLETE
    assert seen.demand is not None
    assert (seen.demand.requests_per_s, seen.recent_rate) == (2.0, 2.0)
    assert seen.demand.prompt_tokens == pytest.approx(1000.0)
    assert 235 < seen.demand.output_tokens < 245
    assert (seen.ready.prefill_workers, seen.ready.decode_workers, seen.backlog_tokens) == (1, 2, 1000.0)
    assert latencies(WINDOW)[0].failed_rate == pytest.approx(20 / 120)


@pytest.mark.parametrize(
    ("window", "state", "word"),
    [
        (None, ObservationState.MISSING, "no metrics"),
        (replace(WINDOW, window_s=0.2), ObservationState.MISSING, "too short"),
        (replace(WINDOW, age_s=31.0), ObservationState.STALE, "31 s old"),
        (replace(WINDOW, workers={("m", "prefill"): 1, ("m", "decode"): 1}), ObservationState.MISSING, "only 1 of 2"),
        (
            replace(WINDOW, gauges={**WINDOW.gauges, (BLOCKS_USED, "m", "decode"): 101.0}),
            ObservationState.CONTRADICTORY,
            "101 KV blocks of 100",
        ),
        (
            replace(WINDOW, gauges={**WINDOW.gauges, (RUNNING, "m", "decode"): -1.0}),
            ObservationState.CONTRADICTORY,
            "negative",
        ),
        (
            replace(WINDOW, increases={**WINDOW.increases, (WORKER_OUTPUT_TOKENS, "m", "decode"): 1000.0}),
            ObservationState.CONTRADICTORY,
            "workers report 1000",
        ),
    ],
)
def test_what_cannot_be_acted_on_has_a_name_and_no_load(window: Window | None, state: ObservationState, word: str):
    """Never a guess: the demand is absent, and the problem is a sentence."""
    seen = observe(window)
    assert seen.state is state
    assert word in seen.problems[0]
    assert seen.demand is None


def test_tokens_of_workers_that_came_or_went_contradict_nothing():
    """Frontends received them, and the increases of the workers lack them."""
    increases = {**WINDOW.increases, (WORKER_OUTPUT_TOKENS, "m", "decode"): 1000.0}
    assert observe(replace(WINDOW, increases=increases, has_changed_fleet=True)).state is ObservationState.COMPLETE


def test_running_answers_count_when_their_length_is_estimated():
    """After a rise of the load short answers have ended and long ones run: 100 that ended had 50 tokens, and 40 000 tokens were generated."""
    increases = {
        **WINDOW.increases,
        (REQUESTS, "m", "200"): 100.0,
        (OUTPUT_TOKENS, "m"): 5000.0,
        (WORKER_OUTPUT_TOKENS, "m", "decode"): 40_000.0,
    }
    demand = observe(replace(WINDOW, increases=increases)).demand
    assert demand is not None
    assert 350 < demand.output_tokens < 400


def test_windows_know_whether_the_fleet_changed():
    """Within the window, not before it."""
    keeper = WindowKeeper(60.0)
    one = {"a": {(RUNNING, "m", "decode"): 1.0}}
    two = {**one, "b": {(RUNNING, "m", "decode"): 1.0}}
    assert not keeper.add(0.0, one).has_changed_fleet
    assert keeper.add(10.0, two).has_changed_fleet
    assert keeper.add(20.0, two).workers == {("m", "decode"): 2}
    for second in range(30, 90, 10):
        window = keeper.add(float(second), two)
    assert not window.has_changed_fleet
