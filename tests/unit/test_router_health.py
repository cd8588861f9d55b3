"""Health in placement, with a whole router core: breakers, wedged workers, impossible overlap."""

from itertools import count
from math import inf

import pytest

from kvmesh.core import KvBatch, KvStored, KvTier, LoadRecord, Report, ReportKind
from kvmesh.errors import DeadlineError, InvalidRequestError, KvLostError, LostError, OverloadedError, UnavailableError
from services.router.core import RouterCore
from services.router.health import overlap, wedge
from services.router.health.breaker import BreakerSettings, BreakerState
from services.router.health.monitor import is_worker_fault
from tests.unit.router_fleets import ask, core, description, join, store_blocks

BREAKER = BreakerSettings(failures_max=3, pause_min_s=1)
numbers = count(1)
DIED = LostError("the engine failed", reason="engine_died")
"""A failure of the worker and not of its link, so that pauses grow to a minute."""


@pytest.fixture(autouse=True)
def short_verdict_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the evidence and the time that are needed until a worker is wedged or an overlap impossible."""
    monkeypatch.setattr(wedge, "WAIT_MIN_S", 5)
    monkeypatch.setattr(wedge, "WAIT_MAX_S", 5)
    monkeypatch.setattr(overlap, "REPEATS", 5)
    monkeypatch.setattr(overlap, "SETTLE_S", 0)


def fleet_of(*names: str) -> RouterCore:
    router = core(breaker=BREAKER)
    for name in names:
        join(router, name, "prefill" if name[0] == "p" else "decode")
    return router


def place(router: RouterCore, now: float, **options):
    number = next(numbers)
    options.setdefault("hashes", [number * 1000])
    hashes = options.pop("hashes")
    return number, router.ask("f", number, ask(f"r{number}", hashes, **options), now=now, wall=now)


def report(router: RouterCore, number: int, kind: str, now: float, *, error=None, failed: str = "") -> None:
    note = Report(kind=ReportKind(kind), elapsed_s=0.1, error=error, failed_worker_id=failed)
    assert router.report("f", number, note, now=now) is not None


def fail(router: RouterCore, worker: str, times: int, now: float, error=None) -> None:
    for _ in range(times):
        number, _ = place(router, now, pinned_decode_worker_id=worker if worker[0] == "d" else "")
        report(router, number, "failed", now, error=error or LostError("gone"), failed=worker)


def excluded(router: RouterCore, worker: str) -> str:
    return router.fleet.workers[worker].excluded_by


def load(router: RouterCore, worker: str, now: float, *, step: int, running: int = 0) -> None:
    entry = router.fleet.workers[worker]
    record = LoadRecord(worker_id=worker, epoch=1, step=step, running_requests=running)
    router.fleet.on_load_record(entry, record)
    router.fleet.health.on_load_record(entry, record, now)


def kinds(router: RouterCore, now: float) -> list[str]:
    return [event.kind for event in router.check_health(now=now)]


def test_failures_exclude_a_worker_and_probes_restore_it():
    """The worker gets no request while its breaker is open and two at a time while it is half open. After two successful probes it is used
    normally."""
    router = fleet_of("d1", "d2")
    fail(router, "d1", 3, 0.0)
    assert excluded(router, "d1") == "breaker_open"
    assert {place(router, 0.5)[1].decode.worker_id for _ in range(10)} == {"d2"}
    placed = [place(router, 1.0) for _ in range(40)]
    probes = [number for number, placement in placed if placement.decode.worker_id == "d1"]
    assert len(probes) == 2
    assert excluded(router, "d1") == "breaker_open"
    for number in probes:
        report(router, number, "first_token", 1.5)
    assert excluded(router, "d1") == ""
    assert router.health.count_breakers(BreakerState.CLOSED) == 2
    assert kinds(router, 1.5) == ["breaker_opened", "breaker_closed"]
    assert "d1" in {place(router, 2.0)[1].decode.worker_id for _ in range(40)}


def test_only_faults_of_the_worker_count():
    """Rejections for load, invalid requests, orderly stops, failures without a worker and failures of other workers open no breaker."""
    assert is_worker_fault(LostError("x"))
    assert is_worker_fault(KvLostError("x"))
    assert is_worker_fault(DeadlineError("x", reason="idle_timeout"))
    router = fleet_of("d1", "d2")
    for error in (OverloadedError("x"), InvalidRequestError("x"), UnavailableError("x", reason="draining")):
        fail(router, "d1", 10, 0.0, error)
    for _ in range(10):
        number, _ = place(router, 0.0, pinned_decode_worker_id="d1")
        report(router, number, "failed", 0.0, error=LostError("x"))
        number, _ = place(router, 0.0, pinned_decode_worker_id="d1")
        report(router, number, "failed", 0.0, error=LostError("x"), failed="d2")
    assert (excluded(router, "d1"), excluded(router, "d2")) == ("", "")


def test_a_prefill_worker_has_a_breaker_too():
    """Failures of a prefill worker do not count against the decode worker of the pair."""
    router = fleet_of("p1", "p2", "d1")
    for _ in range(3):
        number, _ = place(router, 0.0, pinned_prefill_worker_id="p1")
        report(router, number, "failed", 0.0, error=UnavailableError("no"), failed="p1")
    assert (excluded(router, "p1"), excluded(router, "d1")) == ("breaker_open", "")
    assert {place(router, 0.5)[1].prefill.worker_id for _ in range(10)} == {"p2"}


def test_when_all_breakers_are_open_the_refusal_has_a_retry_delay():
    """The refusal has the reason `breakers_open` and the time until the next breaker is half open."""
    router = fleet_of("d1", "d2")
    fail(router, "d1", 3, 0.0)
    fail(router, "d2", 3, 0.25)
    with pytest.raises(UnavailableError) as refusal:
        place(router, 0.5)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("breakers_open", 0.5)
    with pytest.raises(UnavailableError) as refusal:
        place(router, 0.75)
    assert refusal.value.retry_after_s == 0.25
    assert place(router, 1.0)[1].decode.worker_id == "d1"


def test_when_all_workers_are_paused_one_request_probes_the_first():
    """If all workers are paused, one request at a time is placed after the shortest pause, however long the pauses have grown. Others are
    refused."""
    router = fleet_of("d1", "d2")
    now = 0.0
    for name in ("d1", "d2"):
        fail(router, name, 3, now, DIED)
    for _ in range(8):  # Both pauses grow to a minute.
        now += 60.0
        for number, placement in [place(router, now) for _ in range(4)]:
            report(router, number, "failed", now, error=DIED, failed=placement.decode.worker_id)
    with pytest.raises(UnavailableError) as refusal:
        place(router, now + 0.5)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("breakers_open", 0.5)
    first, placement = place(router, now + 1.0)
    assert placement.decode.worker_id == "d1"
    with pytest.raises(UnavailableError) as refusal:
        place(router, now + 1.0)
    assert (refusal.value.reason, refusal.value.retry_after_s) == (
        "breakers_open",
        BREAKER.pause_min_s / 10,
    )
    report(router, first, "failed", now + 1.5, error=DIED, failed="d1")
    second, placement = place(router, now + 1.5)
    assert placement.decode.worker_id == "d2", "d2's pause ends first now"
    report(router, second, "first_token", now + 2.0)
    third, placement = place(router, now + 2.0)
    assert placement.decode.worker_id == "d2"
    report(router, third, "first_token", now + 2.5)
    assert (excluded(router, "d1"), excluded(router, "d2")) == ("breaker_open", "")
    assert {place(router, now + 30.0)[1].decode.worker_id for _ in range(10)} == {"d2"}, (
        "d1 stays paused while d2 serves"
    )


def test_a_request_that_excludes_the_paused_worker_does_not_probe_it():
    """A retry that excludes the worker where it failed does not make its breaker half open."""
    router = fleet_of("d1")
    fail(router, "d1", 3, 0.0)
    with pytest.raises(UnavailableError):
        place(router, 0.5, excluded_worker_ids=["d1"])
    number, _ = place(router, 1.0)
    report(router, number, "failed", 1.0, error=LostError("gone"), failed="d1")
    with pytest.raises(UnavailableError):
        place(router, 2.5, excluded_worker_ids=["d1"])
    assert router.health.count_breakers(BreakerState.OPEN) == 1
    assert place(router, 2.5)[1].decode.worker_id == "d1"
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1


def test_a_placement_of_a_lost_frontend_is_no_evidence():
    """The frontend may never have submitted it, so it is no evidence of a wedged worker until the frontend reports again."""
    router = fleet_of("d1")
    load(router, "d1", 0.0, step=1)
    number, _ = place(router, 0.5)
    router.on_stream_ended("f", now=1.0)
    for now in range(1, 12):
        assert kinds(router, float(now)) == []
    assert excluded(router, "d1") == ""
    report(router, number, "progress", 12.0)
    for now in range(12, 17):
        assert kinds(router, float(now)) == []
    assert kinds(router, 17.5) == ["worker_wedged", "breaker_opened"]


def test_a_cancelled_probe_has_no_verdict():
    """A cancelled probe makes room for another one."""
    router = fleet_of("d1")
    fail(router, "d1", 3, 0.0)
    held = [place(router, 1.0)[0] for _ in range(2)]
    with pytest.raises(UnavailableError):
        place(router, 1.0)
    report(router, held[0], "cancelled", 1.1)
    place(router, 1.1)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1


def test_an_expired_probe_has_no_verdict():
    """A probe whose frontend left without a report makes room for another one when its reservation expires."""
    router = fleet_of("d1")
    fail(router, "d1", 3, 0.0)
    for _ in range(2):
        place(router, 1.0)
    router.on_stream_ended("f", now=1.0)
    with pytest.raises(UnavailableError):
        place(router, 10.9)
    assert len(list(router.expire(now=11.0))) == 2
    place(router, 11.0)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1


def test_a_probe_may_be_asked_for_again():
    """A frontend that gave up the router's stream before it read the placement sends the same ask again, which is a probe, too."""
    router = fleet_of("d1")
    fail(router, "d1", 3, 0.0)
    probes = [place(router, 1.0)[0] for _ in range(2)]
    router.on_stream_ended("f", now=1.5)
    for number in probes:
        assert router.ask("f", number, ask(f"r{number}", [number * 1000]), now=2.0, wall=2.0).decode.worker_id == "d1"
    with pytest.raises(UnavailableError):
        place(router, 2.0)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1


def test_a_silent_stream_opens_the_breaker():
    """A worker whose stream was silent is probed after it reconnects. A broken stream alone opens no breaker."""
    router = fleet_of("d1")
    worker = router.fleet.workers["d1"]
    for reason, after in (("unreachable", ""), ("silent", "breaker_open")):
        router.fleet.disconnected(worker, reason)
        router.health.on_disconnected(worker, reason, 0.0)
        router.fleet.connected(worker)
        assert worker.excluded_by == after


def test_a_suspended_router_blames_no_worker():
    """A router that was suspended for a minute opens no breaker and marks no worker as wedged."""
    router = fleet_of("d1", "d2")
    for now in range(3):
        load(router, "d1", now, step=7, running=1)
        assert kinds(router, now) == []
    number, _ = place(router, 2.5, pinned_decode_worker_id="d2")
    worker = router.fleet.workers["d2"]
    router.health.on_disconnected(worker, "silent", 60.0)
    load(router, "d1", 60.0, step=7, running=1)
    assert kinds(router, 60.1) == []
    assert (worker.excluded_by, excluded(router, "d1")) == ("", "")
    for now in (61.0, 62.0, 63.0, 64.0, 65.0):
        load(router, "d1", now, step=7, running=1)
        assert kinds(router, now) == []
    report(router, number, "cancelled", 65.0)
    for now in (66.0, 67.0, 67.5):
        load(router, "d1", now, step=7, running=1)
        kinds(router, now)
    assert excluded(router, "d1") == "wedged"
    router.health.on_disconnected(worker, "silent", 68.0)
    assert worker.excluded_by == "breaker_open"


def test_a_restarted_worker_has_a_closed_breaker():
    router = fleet_of("d1")
    fail(router, "d1", 3, 0.0)
    worker = router.fleet.workers["d1"]
    router.fleet.describe(worker, description("d1", "decode", epoch=2))
    assert worker.excluded_by == ""
    assert router.health._next_change_at == float("inf")


@pytest.mark.parametrize(("role", "name"), [("prefill", "p1"), ("decode", "d1")])
def test_a_worker_with_work_and_no_steps_is_wedged_until_it_steps(role, name):
    """A wedged prefill or decode worker is reported once, gets no requests, and is used again after its next step."""
    router = fleet_of("p1", "d1", "p2", "d2")
    for now in range(6):
        load(router, name, now, step=7, running=1)
    assert excluded(router, name) == ""
    for now in (6, 7, 8):
        load(router, name, now, step=7, running=1)
        assert excluded(router, name) == "wedged"
    assert router.health.count_wedged() == 1
    placed = [place(router, 8.0)[1] for _ in range(10)]
    assert name not in {p.prefill.worker_id for p in placed} | {p.decode.worker_id for p in placed}
    load(router, name, 9, step=8, running=1)
    assert excluded(router, name) == ""
    assert kinds(router, 9) == ["worker_wedged", "worker_recovered"]


def test_a_wedged_worker_without_work_is_probed():
    """Without work a worker makes no steps, so a probe after a pause must show whether it works. One step of the probe is enough."""
    router = fleet_of("d1", "d2")
    load(router, "d1", 0, step=7, running=1)
    load(router, "d1", 6, step=7, running=1)
    load(router, "d1", 7, step=7, running=0)
    assert excluded(router, "d1") == "wedged"
    load(router, "d1", 8, step=7, running=0)
    assert excluded(router, "d1") == ""
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 1
    place(router, 8.0, pinned_decode_worker_id="d1")
    load(router, "d1", 9, step=8, running=1)
    assert router.health.count_breakers(BreakerState.HALF_OPEN) == 0


def test_overdue_placements_reveal_a_wedged_worker():
    """An engine that updates its load only with a step looks idle in its load records when it hangs."""
    router = fleet_of("d1", "d2")
    load(router, "d1", 0, step=7)
    load(router, "d2", 0, step=7)
    number, _ = place(router, 1.0, pinned_decode_worker_id="d1")
    for now in (2, 4, 6):
        load(router, "d1", now, step=7)
        assert kinds(router, now) == []
    assert kinds(router, 6.5) == ["worker_wedged", "breaker_opened"]
    assert excluded(router, "d1") == "wedged"
    load(router, "d1", 7, step=8)
    assert excluded(router, "d1") == ""
    assert kinds(router, 60.0) == ["worker_recovered"]
    assert excluded(router, "d1") == ""
    report(router, number, "cancelled", 61.0)


def test_a_placement_of_unknown_age_is_no_evidence():
    """A peer's placement counts as work, but is no evidence of a wedged worker until a report on it arrives at this router."""
    router = fleet_of("d1")
    load(router, "d1", 0, step=7)
    number, _ = place(router, 1.0)
    reservation = router.book.get_own("f", number)
    reservation.due_at = inf
    for now in range(30):
        assert kinds(router, now) == []
    report(router, number, "first_token", 30.0)
    assert [kind for now in range(30, 37) for kind in kinds(router, now)] == ["worker_wedged", "breaker_opened"]


def test_decode_is_not_blamed_for_a_slow_prefill():
    """A decode leg counts as overdue only after the prefill worker has finished."""
    router = fleet_of("p1", "d1")
    for name in ("p1", "d1"):
        load(router, name, 0, step=7)
    number, _ = place(router, 0.0)
    for now in range(1, 20):
        load(router, "p1", now, step=7 + now, running=1)
        load(router, "d1", now, step=7)
        assert kinds(router, now) == []
    report(router, number, "prefilled", 20.0)
    assert [kinds(router, now) for now in range(20, 26)] == [[]] * 6
    assert kinds(router, 26.0) == ["worker_wedged", "breaker_opened"]
    assert excluded(router, "d1") == "wedged"


def test_impossible_overlap_is_reported_once_with_its_cause():
    """A worker that publishes other hashes than those of repeated prompts is reported once, as a hash mismatch."""
    router = fleet_of("d1")
    store_blocks(router.fleet.workers["d1"], [900, 901, 902])
    for now in range(30):
        number, _ = place(router, float(now), hashes=[1, 2, 3])
        report(router, number, "finished", float(now))
    events = router.check_health(now=30.0)
    assert [(event.kind, event.cause, event.model) for event in events] == [
        ("overlap_impossible", "hash_mismatch", "demo")
    ]
    assert "seed" in events[0].advice


def test_a_wrong_block_size_is_reported_at_once():
    router = fleet_of("d1")
    for now in range(3):
        place(router, float(now), hashes=[1], block_size_tokens=32, tokens=64)
    assert [event.cause for event in router.check_health(now=3.0)] == ["block_size_mismatch"]


def test_matching_and_unknown_caches_are_not_reported():
    """No overlap fault is reported for a worker whose cache matches, one that is recovering, and one without events."""
    router = core(breaker=BREAKER)
    join(router, "d1", "decode")
    join(router, "d2", "decode", features=())
    join(router, "d3", "decode")
    store_blocks(router.fleet.workers["d1"], [1, 2])
    feed = router.fleet.workers["d3"].feed
    feed.apply(KvBatch(epoch=1, sequence=99))
    for now in range(30):
        for name in ("d1", "d2", "d3"):
            number, _ = place(router, float(now), hashes=[1, 2, 3], pinned_decode_worker_id=name)
            report(router, number, "finished", float(now))
    assert router.check_health(now=30.0) == []


def test_blocks_in_a_slower_tier_count_as_overlap():
    """A worker that moved its blocks to host memory is not reported."""
    router = fleet_of("d1")
    feed = router.fleet.workers["d1"].feed
    moved = KvStored(block_hashes=(1, 2), tier=KvTier.HOST)
    feed.apply(KvBatch(epoch=1, sequence=feed.resume_at[1] + 1, events=(moved,)))
    for now in range(30):
        number, _ = place(router, float(now), hashes=[1, 2, 3])
        report(router, number, "finished", float(now))
    assert router.check_health(now=30.0) == []
