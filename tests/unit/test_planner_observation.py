"""Whether the planner can act on an observation, and the values in it."""

from dataclasses import replace

import pytest
from aiohttp import ClientSession

from kvmesh.clock import SystemClock
from kvmesh.core import Role
from kvmesh.core.planning import ObservationState, PoolReport
from kvmesh.discovery.base import DECODE, Health, Instance
from services.planner.observation import ObservationLimits, observe_model
from services.planner.observe import Fetcher, ScrapeSource
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


def test_a_complete_observation_gives_the_load():
    """The rate counts started requests, the lengths come from token counters, and the backlog includes workers and routers but not late
    requests."""
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
def test_an_unusable_observation_has_a_state_and_no_demand(window: Window | None, state: ObservationState, word: str):
    """A missing, stale or contradictory observation has no demand, and its problem is a sentence."""
    seen = observe(window)
    assert seen.state is state
    assert word in seen.problems[0]
    assert seen.demand is None


def test_a_changed_fleet_is_not_contradictory():
    """If workers joined or left, the increases of the workers may lack tokens that frontends received."""
    increases = {**WINDOW.increases, (WORKER_OUTPUT_TOKENS, "m", "decode"): 1000.0}
    assert observe(replace(WINDOW, increases=increases, has_changed_fleet=True)).state is ObservationState.COMPLETE


def test_running_answers_count_in_the_output_length():
    """When the load rises, short answers end first. The estimate also counts the tokens of running answers, here 40 000 against 5000 of ended
    ones."""
    increases = {
        **WINDOW.increases,
        (REQUESTS, "m", "200"): 100.0,
        (OUTPUT_TOKENS, "m"): 5000.0,
        (WORKER_OUTPUT_TOKENS, "m", "decode"): 40_000.0,
    }
    demand = observe(replace(WINDOW, increases=increases)).demand
    assert demand is not None
    assert 350 < demand.output_tokens < 400


def test_a_window_knows_whether_the_fleet_changed():
    """A change within the window counts. A change before it does not."""
    keeper = WindowKeeper(60.0)
    one = {"a": {(RUNNING, "m", "decode"): 1.0}}
    two = {**one, "b": {(RUNNING, "m", "decode"): 1.0}}
    assert not keeper.add(0.0, one).has_changed_fleet
    assert keeper.add(10.0, two).has_changed_fleet
    assert keeper.add(20.0, two).workers == {("m", "decode"): 2}
    for second in range(30, 90, 10):
        window = keeper.add(float(second), two)
    assert not window.has_changed_fleet


@pytest.mark.parametrize("port", ["²", "", "-1"])
async def test_a_metrics_port_that_is_no_number_is_a_problem(port: str) -> None:
    """The registry's meta is not trusted: such a value does not end the observation of the other instances."""
    instance = Instance(
        service=DECODE, instance_id="d0", host="127.0.0.1", port=1, meta={"metrics_port": port}, tags=(),
        health=Health.PASSING, is_draining=False,
    )  # fmt: skip
    async with ClientSession() as session:
        source = ScrapeSource(Fetcher(session, timeout_s=2), SystemClock(), window_s=60)
        assert (await source.observe([instance])).problems == [f"{DECODE} d0 has no metrics port"]
