"""The policies that the planner is compared with follow their published formulas: worked examples."""

import pytest

from bench.planner.__main__ import Case, with_hit_rate
from bench.planner.dynamo import decode_capacity, decode_change, forward_s, prefill_capacity, prefill_change, replicas
from bench.planner.optimal import (
    Planned,
    cheapest,
    cheapest_constant,
    decode_pool,
    least_missed,
    prefill_pool,
    share_within,
)
from bench.planner.others import TrueLoad, desired
from kvmesh.core.planning import Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.sizing.speed import Speed
from services.whatif.fleet import FleetTimes
from services.whatif.placers import MODEL
from services.whatif.simulation import Simulation, SimulationSettings

SPEED = Speed(
    prefill_base_s=0.01, prefill_s_per_token=1e-4, decode_step_base_s=0.01, decode_s_per_request=1e-3, running_max=64
)


def test_dynamos_prefill_capacity():
    """One prompt of 1000 tokens takes 0.11 s, two 0.21 s, and nine 0.92 s in two chunks. Within 0.5 s four prompts in 0.41 s are the best."""
    assert forward_s(SPEED, 1000) == pytest.approx(0.11)
    assert forward_s(SPEED, 9000) == pytest.approx(0.92)
    assert prefill_capacity(SPEED, isl=1000, hit_rate=0.0, ttft_s=0.5) == pytest.approx(4 / 0.41)
    # Half of each prompt is cached: nine prompts of 500 tokens.
    assert prefill_capacity(SPEED, isl=1000, hit_rate=0.5, ttft_s=0.5) == pytest.approx(9 / 0.46)
    # Hit rates above 95 % count as 95 %. That leaves 51 tokens, because 1 - 0.95 is slightly more than 0.05.
    assert prefill_capacity(SPEED, isl=1000, hit_rate=1.0, ttft_s=0.0155) == pytest.approx(1 / 0.0151)


def test_dynamos_decode_capacity():
    """A step takes 10 ms + 1 ms per request. A batch of 40 keeps 50 ms: 40 / (200 x 0.05 s). Slots limit the batch to 64."""
    assert decode_capacity(SPEED, isl=1000, osl=200, itl_s=0.05) == pytest.approx(4.0)
    assert decode_capacity(SPEED, isl=1000, osl=200, itl_s=1.0) == pytest.approx(64 / (200 * 0.074))


def test_dynamos_infeasible_target_takes_the_best_capacity():
    """If no batch meets the target, Dynamo's planner sizes for throughput."""
    assert prefill_capacity(SPEED, isl=1000, hit_rate=0.0, ttft_s=0.01) > 9
    assert decode_capacity(SPEED, isl=1000, osl=200, itl_s=0.001) == pytest.approx(64 / (200 * 0.074))


def test_dynamos_replicas():
    """The number of replicas is ceil(demand / capacity), and at least 1."""
    assert [replicas(rate, 4.0) for rate in (0.1, 4.0, 4.1, 20.0)] == [1, 1, 2, 5]


@pytest.mark.parametrize(
    ("queued", "change"),
    [
        ([20_000, 20_000], 1),
        ([20_000, 1000], 0),
        ([0, 0], -1),
        ([5000], 1),
        ([0], 0),
        ([1400, 1400], -1),
        ([1600, 2000], 0),
    ],
)
def test_dynamos_prefill_load_rule(queued: list[int], change: int):
    """Adds a worker if all workers would miss 0.5 s. Removes one if the wait without it stays below 80 % of 0.5 s - 0.11 s."""
    assert prefill_change(SPEED, queued, own_s=0.11, ttft_s=0.5) == change


@pytest.mark.parametrize(
    ("running", "change"), [([41, 41], 1), ([41, 39], 0), ([10, 10], -1), ([16, 16], 0), ([10], 0), ([14, 14], -1)]
)
def test_dynamos_decode_load_rule(running: list[int], change: int):
    """Adds a worker if the steps of all workers exceed 50 ms. Removes one if steps without it stay below 40 ms."""
    assert decode_change(SPEED, running, context=100.0, itl_s=0.05) == change


def test_the_threshold_scaler_follows_kubernetes():
    """The examples of Kubernetes' documentation: 200m against 100m doubles, 50m halves, and a deviation within 10 % changes nothing."""
    assert desired(3, 0.2, target=0.1) == 6
    assert desired(4, 0.05, target=0.1) == 2
    assert desired(5, 0.109, target=0.1) == 5
    assert desired(5, 0.111, target=0.1) == 6
    assert desired(2, 0.0, target=0.1) == 1


def burst() -> list[RecordedRequest]:
    """One request per second, then 40 per second from 100 s to 140 s."""
    trace = [RecordedRequest(at_s=float(i), prompt_tokens=1000, output_tokens=10) for i in range(100)]
    return trace + [RecordedRequest(at_s=100 + i / 40, prompt_tokens=1000, output_tokens=10) for i in range(1600)]


def test_pools_for_the_true_load_are_ready_when_it_arrives():
    """Workers for a burst at 100 s start 30 s before it, which is their start time, and not earlier."""
    targets = Targets(model=MODEL, ttft_s=2.0, itl_s=0.05)
    policy = TrueLoad(burst(), targets, Speed(), start_s=30.0, hit_rate=0.0)
    assert policy.first.prefill_workers == 1
    assert policy.peak().prefill_workers >= 4
    settings = SimulationSettings(shape=policy.first, targets=targets, times=FleetTimes(start_s=30.0))
    changes = Simulation(settings, policy).run(burst()).shapes
    assert changes[1][0] == 70.0


def test_the_oracle_is_cheaper_than_any_constant_pool_and_keeps_its_share():
    """The plan has one worker before the burst and enough workers during it to keep the required share of requests within the target."""
    trace, targets = burst(), Targets(model="m", ttft_s=2.0, itl_s=0.05)
    pool = prefill_pool(trace, targets, Speed(), hit_rate=0.0, workers_max=10)
    constant = cheapest_constant(pool, share=0.95, requests=len(trace))
    plan = cheapest(pool, share=0.95, requests=len(trace), start_s=30.0)
    assert share_within(pool, plan, len(trace)) >= 0.95
    assert set(plan[:19]) == {1}
    assert 4 <= max(plan) <= constant
    assert sum(plan) < constant * len(plan)
    assert Planned(prefill=plan, decode=[1] * len(plan), start_s=30.0).first.prefill_workers == 1


def test_decode_is_faster_where_kv_limits_the_batch():
    """A worker has KV for 62 requests of 12 340 tokens. Their steps take 20 ms instead of the target's 50 ms, so one worker is enough."""
    targets = Targets(model="m", ttft_s=15.0, itl_s=0.05)
    trace = [RecordedRequest(at_s=i / 4, prompt_tokens=12_000, output_tokens=340) for i in range(400)]
    pool = decode_pool(trace, targets, Speed(), workers_max=4)
    assert cheapest_constant(pool, share=1.0, requests=len(trace)) == 1


def test_requests_missed_before_new_workers_are_ready():
    """One worker receives 40 prompts per second of 0.108 s each. It serves the first second in time and misses nearly all of the other 29 s."""
    targets = Targets(model="m", ttft_s=2.0, itl_s=0.05)
    options = {"hit_rate": 0.0, "start_s": 30.0}
    one, two = (least_missed(burst(), targets, Speed(), workers=workers, **options) for workers in (1, 2))
    assert one == pytest.approx(29.5 * 40 / 1700, rel=0.02)
    assert two < one
    assert least_missed(burst(), targets, Speed(), workers=5, **options) == 0.0


def test_policies_that_know_the_load_know_its_hit_rate():
    """Prompts of 2048 tokens share 1536 tokens. A load without shared blocks needs no simulation, and keeps its case."""
    targets = Targets(model=MODEL, ttft_s=2.0, itl_s=0.05)
    trace = [
        RecordedRequest(at_s=i / 2, prompt_tokens=2048, output_tokens=2, block_ids=(1, 2, 3, 100 + i))
        for i in range(40)
    ]
    found = with_hit_rate(Case(name="shared", trace=trace, targets=targets)).hit_rate
    assert found == pytest.approx(39 * 1536 / (40 * 2048))
    alone = Case(name="alone", trace=burst(), targets=targets)
    assert with_hit_rate(alone) is alone
