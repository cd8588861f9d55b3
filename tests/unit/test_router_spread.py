"""Requests are spread without starving a worker: single-turn load, a hot prefix, one session, busy and unequal workers."""

from collections import Counter
from random import Random

import pytest

from kvmesh.core import LoadRecord, PerformanceProfile, Report, ReportKind
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.workers.cost_settings import CostSettings
from tests.unit.router_fleets import ask, core, join, store_blocks


def note(kind: str, elapsed_s: float) -> Report:
    return Report(kind=ReportKind(kind), elapsed_s=elapsed_s)


def decodes(count: int, **options) -> RouterCore:
    router = core(**options)
    for i in range(count):
        join(router, f"d{i}", "decode")
    return router


@pytest.mark.parametrize("seed", range(5))
def test_sequential_requests_use_all_workers(seed):
    """Requests that finish before the next one starts are spread over all five decode workers."""
    router = RouterCore(CoreSettings(), router_id="r", generator=Random(seed))
    for i in range(5):
        join(router, f"d{i}", "decode")
    placed = Counter()
    for number in range(1, 101):
        now = float(number)
        placement = router.ask("f", number, ask(f"r{number}", [number * 10, number * 10 + 1]), now=now, wall=now)
        placed[placement.decode.worker_id] += 1
        router.report("f", number, note("first_token", 0.01))
        router.report("f", number, note("finished", 0.1))
    assert len(placed) == 5
    assert min(placed.values()) >= 10


def test_decode_behind_one_prefill_worker_is_used_evenly():
    """With a prefill worker in front, overlapping requests are spread over all decode workers."""
    router = decodes(5)
    join(router, "p1", "prefill")
    placed = Counter()
    for number in range(1, 101):
        placed[router.ask("f", number, ask(f"r{number}", [number]), now=number / 10, wall=0.0).decode.worker_id] += 1
        router.report("f", number, note("prefilled", 0.01))
        if number > 20:
            router.report("f", number - 20, note("finished", 2.0))
    assert len(placed) == 5
    assert min(placed.values()) >= 15


def test_a_burst_with_a_hot_prefix_is_spread():
    """Of a burst whose prefix one worker has cached, that worker gets the most requests, but the others get some."""
    router = decodes(5)
    prefix = list(range(1, 33))
    store_blocks(router.fleet.workers["d0"], prefix)
    placed = Counter(
        router.ask("f", n, ask(f"r{n}", [*prefix, 1000 + n]), now=0.0, wall=0.0).decode.worker_id for n in range(1, 41)
    )
    assert len(placed) == 5
    assert placed["d0"] == max(placed.values())
    assert placed["d0"] < 25


def test_an_idle_worker_with_the_prefix_is_preferred():
    """Sequential requests all go to the worker that has cached their prefix."""
    router = decodes(5)
    prefix = list(range(1, 33))
    store_blocks(router.fleet.workers["d3"], prefix)
    for number in range(1, 20):
        now = float(number)
        assert (
            router.ask("f", number, ask(f"r{number}", [*prefix, 1000 + number]), now=now, wall=now).decode.worker_id
            == "d3"
        )
        router.report("f", number, note("finished", 0.5))


def test_faster_workers_get_more_requests():
    """A prefill worker that is twice as fast gets about twice as many prompts."""
    router = core(prefill_congested_s=1e9)
    join(router, "d0", "decode")
    for name, per_token_s in (("p1", 0.0001), ("p2", 0.00005)):
        profile = PerformanceProfile(prefill_base_s=0.0001, prefill_s_per_token=per_token_s)
        join(router, name, "prefill", profile=profile)
    placed = Counter(
        router.ask("f", n, ask(f"r{n}", [n], tokens=1000), now=0.0, wall=0.0).prefill.worker_id for n in range(1, 91)
    )
    assert 54 <= placed["p2"] <= 66


def test_a_queue_shrinks_as_time_passes_without_reports():
    """The queue of a worker is estimated to shrink at its speed, but not to zero before the worker reports."""
    router = core()
    join(router, "d0", "decode")
    [target] = join(router, "p1", "prefill").targets
    router.ask("f", 1, ask("r1", [1], tokens=100_000), now=10.0, wall=0.0)
    assert target.queue_s(10.0) == pytest.approx(4.004)
    assert target.queue_s(12.0) == pytest.approx(2.004)
    assert target.queue_s(14.0) == pytest.approx(0.4004)
    router.report("f", 1, note("prefilled", 4.5))
    assert target.queue_s(14.5) == 0.0


def test_a_late_worker_keeps_its_queue():
    """If the first of two prompts is reported late, the second one counts in full from then on."""
    router = core()
    join(router, "d0", "decode")
    [target] = join(router, "p1", "prefill").targets
    for number in (1, 2):
        router.ask("f", number, ask(f"r{number}", [number], tokens=10_000), now=0.0, wall=0.0)
    router.report("f", 1, note("prefilled", 0.7))
    assert target.queue_s(0.7) == pytest.approx(target.prefill_s_in_flight)
    assert target.queue_s(0.7) == pytest.approx(0.404)


def test_requests_of_other_routers_count_in_the_queue():
    """Waiting requests in the load record that this router did not place are ahead of its own requests."""
    router = core()
    join(router, "d0", "decode")
    worker = join(router, "p1", "prefill")
    record = LoadRecord(worker_id="p1", epoch=1, waiting_requests=4, waiting_prompt_tokens=40_000)
    router.fleet.on_load_record(worker, record, now=5.0)
    assert worker.targets[0].queue_s(5.0) == pytest.approx(4 * 0.004 + 40_000 * 0.00004)
    assert worker.targets[0].queue_s(6.0) == pytest.approx(0.616)
    join(router, "p2", "prefill")
    assert router.ask("f", 1, ask("r1", [1, 2]), now=5.0, wall=0.0).prefill.worker_id == "p2"


def test_a_full_batch_costs_a_wait():
    """A decode worker without a free slot costs the expected time until one is free."""
    router = decodes(2)
    record = LoadRecord(worker_id="d0", epoch=1, running_requests=8, running_requests_max=8)
    router.fleet.on_load_record(router.fleet.workers["d0"], record, now=0.0)
    [target] = router.fleet.workers["d0"].targets
    assert target.wait_s() == pytest.approx(256 * (0.006 + 8 * 0.00002) / 8)
    assert router.ask("f", 1, ask("r1", [1]), now=0.0, wall=0.0).decode.worker_id == "d1"


def test_a_worker_without_free_blocks_gets_no_requests():
    """The busy threshold applies to the blocks in the worker's load record, and is on by default."""
    router = decodes(2)
    worker = router.fleet.workers["d0"]
    router.ask("f", 1, ask("r1", [1], pinned_decode_worker_id="d0"), now=0.0, wall=0.0)
    for used, takes in ((960, False), (500, True)):
        router.fleet.on_load_record(
            worker, LoadRecord(worker_id="d0", epoch=1, kv_blocks_used=used, kv_blocks_total=1000), now=1.0
        )
        assert worker.targets[0].takes_requests is takes


def test_a_session_prefers_its_worker_until_it_expires():
    """The preference decides between equal workers, does not outweigh a long queue, and ends after `session_s`."""
    router = decodes(4, session_s=100.0, cost=CostSettings(preference_s=0.05))
    first = router.ask("f", 1, ask("r1", [1], session_id="s"), now=0.0, wall=0.0).decode.worker_id
    router.report("f", 1, note("finished", 1.0))
    for number in range(2, 10):
        placement = router.ask("f", number, ask(f"r{number}", [number], session_id="s"), now=number, wall=0.0)
        assert (placement.decode.worker_id, placement.reasons[-1]) == (first, "session")
        router.report("f", number, note("finished", 1.0))
    router.ask("f", 20, ask("r20", [20], tokens=100_000, pinned_decode_worker_id=first), now=10.0, wall=0.0)
    moved = router.ask("f", 21, ask("r21", [21], session_id="s"), now=10.0, wall=0.0)
    assert moved.decode.worker_id != first and "session" not in moved.reasons
    late = router.ask("f", 22, ask("r22", [22], session_id="s"), now=500.0, wall=0.0)
    assert "session" not in late.reasons


def test_adapters_stay_on_their_worker():
    """A worker that has recently run the adapter is preferred."""
    router = core()
    for i in range(4):
        join(router, f"d{i}", "decode", adapters=("poems", "prose"))
    first = router.ask("f", 1, ask("r1", [1], adapter="poems"), now=0.0, wall=0.0).decode.worker_id
    router.report("f", 1, note("finished", 1.0))
    for number in range(2, 12):
        assert (
            router.ask("f", number, ask(f"r{number}", [number], adapter="poems"), now=number, wall=0.0).decode.worker_id
            == first
        )
        router.report("f", number, note("finished", 0.5))


def test_a_temperature_uses_all_workers_and_the_cheapest_most():
    """The choice is a softmax over costs in seconds, drawn from the seeded generator."""

    def run() -> Counter[str]:
        router = decodes(3, cost=CostSettings(temperature=0.02, learning=False))
        store_blocks(router.fleet.workers["d1"], list(range(1, 33)))
        placed = Counter()
        for number in range(1, 301):
            now = float(number)
            placed[router.ask("f", number, ask(f"r{number}", [*range(1, 33)]), now=now, wall=now).decode.worker_id] += 1
            router.report("f", number, note("finished", 0.5))
        return placed

    placed = run()
    assert placed == run()
    # 511 of 512 cached tokens save 0.02044 s, slightly more than the temperature, so each other worker is about e times less likely.
    assert placed["d1"] / placed["d0"] == pytest.approx(2.78, rel=0.35)
    assert set(placed) == {"d0", "d1", "d2"}
