"""The planner's computations on metrics."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core import Role
from kvmesh.core.planning import PlanReport
from kvmesh.discovery.base import DECODE, Health, Instance
from services.planner.observe import parse
from services.planner.plan import (
    BLOCKS_TOTAL,
    BLOCKS_USED,
    OUTPUT_TOKENS,
    REQUESTS,
    TTFT,
    Window,
    increase,
    latencies,
    pools,
    quantile,
    summed_gauges,
)
from services.planner.servicer import select_model


def instance(name: str, *, health: Health = Health.PASSING, is_draining: bool = False, model: str = "demo") -> Instance:
    return Instance(
        service=DECODE,
        instance_id=name,
        host="h",
        port=1,
        meta={"model": model, "role": "decode"},
        tags=(),
        health=health,
        is_draining=is_draining,
    )


def test_quantiles_match_prometheus():
    """Quantiles are interpolated linearly within a bucket, as in the documentation of `histogram_quantile`."""
    buckets = [(0.1, 0.0), (0.2, 50.0), (0.4, 100.0), (math.inf, 100.0)]
    assert quantile(0.5, buckets) == pytest.approx(0.2)
    assert quantile(0.75, buckets) == pytest.approx(0.3)
    assert quantile(0.25, buckets) == pytest.approx(0.15)
    assert quantile(0.99, [(0.1, 100.0), (math.inf, 100.0)]) == pytest.approx(0.099)
    assert quantile(0.99, [(0.1, 10.0), (math.inf, 100.0)]) == 0.1


def test_falling_bucket_counts_are_corrected():
    """The sum over scraped instances can fall from one bucket to the next. Like Prometheus, the quantile uses the highest count so far."""
    buckets = [(0.1, 2.0), (0.2, 6.0), (0.4, 5.0), (0.8, 10.0), (math.inf, 10.0)]
    assert quantile(0.7, buckets) == pytest.approx(0.4 + 0.4 * (7 - 6) / (10 - 6))


@pytest.mark.parametrize("buckets", [[], [(0.1, 5.0)], [(0.1, 0.0), (math.inf, 0.0)], [(math.inf, 3.0)]])
def test_no_quantile_without_observations(buckets):
    """A histogram without observations has no quantile, not a quantile of 0."""
    assert quantile(0.99, buckets) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values, q):
    """For any distribution the estimate lies in the bucket of the exact order statistic."""
    bounds = [0.5, 1.0, 2.0, 5.0, 10.0, math.inf]
    buckets = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
    exact = sorted(values)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert lower - 1e-9 <= quantile(q, buckets) <= upper + 1e-9


def test_increases_handle_restarts_and_new_instances():
    """A counter that fell restarted from zero. An instance without an older scrape, or without a newer one, is ignored."""
    older = {
        "a": {(REQUESTS, "m", "200"): 10.0},
        "b": {(REQUESTS, "m", "200"): 100.0},
        "gone": {(REQUESTS, "m", "200"): 5.0},
    }
    newer = {
        "a": {(REQUESTS, "m", "200"): 13.0},
        "b": {(REQUESTS, "m", "200"): 4.0},
        "new": {(REQUESTS, "m", "200"): 1000.0},
    }
    assert increase(older, newer) == {(REQUESTS, "m", "200"): 7.0}


def test_codes_and_instances_are_summed():
    """Unknown metrics are ignored, gauges add up over instances, and text that is not in Prometheus' format is an error."""
    text = (
        "# TYPE kvmesh_frontend_requests_total counter\n"
        'kvmesh_frontend_requests_total{model="m",code="200"} 5\n'
        'kvmesh_frontend_requests_total{model="m",code="503"} 2\n'
        'unrelated_total{model="m"} 9\n'
    )
    assert parse(text) == {(REQUESTS, "m", "200"): 5.0, (REQUESTS, "m", "503"): 2.0}
    assert summed_gauges([{(BLOCKS_USED, "m", "decode"): 1.0}, {(BLOCKS_USED, "m", "decode"): 2.0}]) == {
        (BLOCKS_USED, "m", "decode"): 3.0
    }
    with pytest.raises(ValueError):
        parse("what is this{")


def test_means_are_over_requests():
    """Means divide the increases of the window. Without requests they are absent."""
    window = Window(
        window_s=10,
        increases={
            (REQUESTS, "m", "200"): 5.0,
            (OUTPUT_TOKENS, "m"): 50.0,
            (f"{TTFT}_sum", "m"): 2.0,
            (f"{TTFT}_count", "m"): 4.0,
        },
    )
    [latency] = latencies(window)
    assert (latency.requests_per_s, latency.ttft_mean_s, latency.output_tokens_mean) == (0.5, 0.5, 10.0)
    assert (latency.itl_mean_s, latency.prompt_tokens_mean, latency.ttft_p99_s) == (None, None, None)
    [idle] = latencies(Window(window_s=10, increases={(REQUESTS, "m", "200"): 0.0, (OUTPUT_TOKENS, "m"): 0.0}))
    assert (idle.requests_per_s, idle.output_tokens_mean) == (0.0, None)


def test_pools_are_those_of_the_registry():
    """Every worker counts once: as ready, draining or critical. A pool without metrics has no usage, not a usage of 0."""
    members = [instance("a"), instance("b", is_draining=True), instance("c", health=Health.CRITICAL)]
    members.append(instance("d", health=Health.CRITICAL, is_draining=True))
    window = Window(window_s=0, gauges={(BLOCKS_TOTAL, "demo", "decode"): 200.0, (BLOCKS_USED, "demo", "decode"): 50.0})
    [pool] = pools(window, members)
    assert (pool.role, pool.workers_ready, pool.workers_draining, pool.workers_critical) == (Role.DECODE, 1, 2, 1)
    assert (pool.kv_usage, pool.prompt_tokens_per_s) == (0.25, None)
    [unseen] = pools(None, members)
    assert unseen.kv_usage is None


def test_a_plan_is_reported_for_one_model_or_all():
    """`select_model` filters the pools by model. An empty name selects all."""
    found = pools(None, [instance("a"), instance("b", model="other")])
    plan = PlanReport(mode="observe", source="scrape", pools=found)
    assert [pool.model for pool in select_model(plan, "").pools] == ["demo", "other"]
    assert [pool.model for pool in select_model(plan, "other").pools] == ["other"]
