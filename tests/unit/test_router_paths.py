"""Breakers of the paths from frontends to workers, with a whole router core and one to three frontends."""

from itertools import count

import pytest

from kvmesh.core import Placement, Report, ReportKind, Role, WorkerRef, WorkerView
from kvmesh.errors import DeadlineError, InternalError, LostError, MeshError, UnavailableError
from kvmesh.rpc.codec.router import from_report, from_worker_view, to_worker_view
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.explain import explain
from services.router.health.breaker import BreakerSettings, BreakerState
from services.router.health.paths import FORGET_S, PAUSE_MAX_S
from tests.messages import to_report
from tests.unit.router_fleets import ask, core, description, join

BREAKER = BreakerSettings(failures_max=3, pause_min_s=1)
CUT = LostError("the worker has gone silent", reason="worker_silent")
numbers = count(1)


def fleet_of(*names: str, frontends: tuple[str, ...] = ("f1", "f2"), **settings) -> RouterCore:
    router = core(breaker=BREAKER, **settings)
    for name in names:
        join(router, name, "prefill" if name[0] == "p" else "decode")
    for frontend_id in frontends:
        router.on_stream_started(frontend_id)
    return router


def place(router: RouterCore, frontend_id: str, now: float, **options) -> tuple[int, Placement]:
    number = next(numbers)
    placement = router.ask(frontend_id, number, ask(f"r{number}", [number * 1000], **options), now=now, wall=now)
    assert isinstance(placement, Placement)
    return number, placement


def report(router: RouterCore, frontend_id: str, number: int, kind: str, now: float, **options) -> None:
    note = Report(kind=ReportKind(kind), elapsed_s=0.1, **options)
    assert router.report(frontend_id, number, note, now=now) is not None


def fail(
    router: RouterCore, frontend_id: str, worker: str, now: float, *, times: int = 3, error: MeshError = CUT
) -> None:
    """Reports that the frontend lost requests on the worker."""
    lost = []
    for _ in range(times):
        lost.append(place(router, frontend_id, now, pinned_decode_worker_id=worker if worker[0] == "d" else "")[0])
    for number in lost:
        report(router, frontend_id, number, "failed", now, error=error, failed_worker_id=worker)


def answer(router: RouterCore, frontend_id: str, worker: str, now: float) -> None:
    number, _ = place(router, frontend_id, now, pinned_decode_worker_id=worker)
    report(router, frontend_id, number, "finished", now)


def used(router: RouterCore, frontend_id: str, now: float, times: int = 20) -> set[str]:
    """Returns the decode workers of some requests, which are cancelled at once."""
    workers = set()
    for _ in range(times):
        number, placement = place(router, frontend_id, now)
        workers.add(placement.decode.worker_id)
        report(router, frontend_id, number, "cancelled", now)
    return workers


def excluded(router: RouterCore, worker: str) -> str:
    return router.fleet.workers[worker].excluded_by


def kinds(router: RouterCore, now: float) -> list[tuple[str, str, str]]:
    return [(event.kind, event.worker_id, event.frontend_id) for event in router.check_health(now=now)]


@pytest.mark.parametrize(
    "error",
    [
        CUT,
        LostError("the connection broke"),
        UnavailableError("no", reason="worker_unreachable"),
        DeadlineError("no token", reason="idle_timeout"),
    ],
)
def test_a_worker_that_one_frontend_loses_serves_other_frontends(error: MeshError) -> None:
    """Only the path from that frontend is paused. The breaker of the worker stays closed."""
    router = fleet_of("d1", "d2")
    fail(router, "f1", "d1", 0.0, error=error)
    assert used(router, "f1", 0.5) == {"d2"}
    assert used(router, "f2", 0.5) == {"d1", "d2"}
    assert excluded(router, "d1") == ""
    assert router.health.count_breakers(BreakerState.OPEN) == 0
    assert router.health.paths.count_open() == 1
    assert router.health.paths.paused_frontends("d1") == ["f1"]
    assert kinds(router, 0.5) == [("path_opened", "d1", "f1")]


def test_probes_restore_a_path_and_pauses_stay_short() -> None:
    """Two probes run at a time. However often they fail, the next ones follow within `PAUSE_MAX_S`."""
    router, now = fleet_of("d1", "d2"), 0.0
    fail(router, "f1", "d1", now)
    for _ in range(6):
        now += PAUSE_MAX_S
        probes = [
            number
            for number, placement in (place(router, "f1", now) for _ in range(30))
            if placement.decode.worker_id == "d1"
        ]
        assert len(probes) == 2
        for number in probes:
            report(router, "f1", number, "failed", now, error=CUT, failed_worker_id="d1")
    now += PAUSE_MAX_S
    probes = [
        number
        for number, placement in (place(router, "f1", now) for _ in range(30))
        if placement.decode.worker_id == "d1"
    ]
    for number in probes:
        report(router, "f1", number, "first_token", now)
    assert router.health.paths.count_open() == 0
    assert "d1" in used(router, "f1", now)
    assert kinds(router, now)[-1] == ("path_closed", "d1", "f1")


def test_a_frontend_without_a_path_is_refused() -> None:
    """A frontend that has lost all decode workers gets a refusal with its own reason and a retry delay. Other frontends are served."""
    router = fleet_of("d1", "d2")
    for name in ("d1", "d2"):
        fail(router, "f1", name, 0.0)
    with pytest.raises(UnavailableError) as refusal:
        place(router, "f1", 0.25)
    assert (refusal.value.reason, refusal.value.retry_after_s) == ("paths_open", 0.75)
    assert used(router, "f2", 0.25) == {"d1", "d2"}
    assert used(router, "f1", 1.0, times=2) <= {"d1", "d2"}


def test_losses_of_several_frontends_open_the_workers_breaker() -> None:
    """Other frontends need not lose requests first. A recent answer of the worker to another frontend keeps the breaker closed."""
    router = fleet_of("d1", "d2", frontends=("f1", "f2", "f3"))
    fail(router, "f1", "d1", 0.0)
    fail(router, "f2", "d1", 0.1)
    assert excluded(router, "d1") == "breaker_open"
    assert used(router, "f3", 0.2) == {"d2"}
    assert ("breaker_opened", "d1", "") in kinds(router, 0.2)

    router = fleet_of("d1", "d2", frontends=("f1", "f2", "f3"))
    fail(router, "f1", "d1", 0.0)
    answer(router, "f3", "d1", 0.05)
    fail(router, "f2", "d1", 0.1)
    assert excluded(router, "d1") == ""
    assert used(router, "f3", 0.2) == {"d1", "d2"}


def test_frontends_of_one_host_count_as_one() -> None:
    """They lose a worker together when the link of their host fails. If all frontends run on one host, each counts."""
    hosts = {"f1-0": "10.0.0.1", "f1-1": "10.0.0.1", "f2": "10.0.0.2"}
    router = fleet_of("d1", "d2", frontends=())
    for frontend_id, host in hosts.items():
        router.on_stream_started(frontend_id, host)
    for name in ("d1", "d2"):
        fail(router, "f1-0", name, 0.0)
        fail(router, "f1-1", name, 0.1)
    assert (excluded(router, "d1"), excluded(router, "d2")) == ("", "")
    assert used(router, "f2", 0.2) == {"d1", "d2"}
    fail(router, "f2", "d1", 0.3)
    assert (excluded(router, "d1"), excluded(router, "d2")) == ("breaker_open", "")

    router = fleet_of("d1", "d2", frontends=())
    for frontend_id in ("f1-0", "f1-1"):
        router.on_stream_started(frontend_id, "127.0.0.1")
    for frontend_id in ("f1-0", "f1-1"):
        fail(router, frontend_id, "d1", 0.0)
    assert (excluded(router, "d1"), excluded(router, "d2")) == ("breaker_open", "")


def test_an_engine_failure_opens_the_workers_breaker() -> None:
    """The failure was reported over a working path, so no path is paused."""
    router = fleet_of("d1", "d2")
    fail(router, "f1", "d1", 0.0, error=InternalError("the engine failed"))
    assert excluded(router, "d1") == "breaker_open"
    assert used(router, "f2", 0.5) == {"d2"}
    assert len(router.health.paths) == 0


def test_a_mesh_with_one_frontend_has_breakers_of_workers_only() -> None:
    """A lost worker and a lost link look the same to a single frontend. The pause stays short, because the link may recover."""
    router = fleet_of("d1", "d2", frontends=("f1",))
    fail(router, "f1", "d1", 0.0)
    assert (excluded(router, "d1"), len(router.health.paths)) == ("breaker_open", 0)
    now = 0.0
    for _ in range(6):
        now += PAUSE_MAX_S
        for _ in range(30):
            number, placement = place(router, "f1", now)
            if placement.decode.worker_id == "d1":
                report(router, "f1", number, "failed", now, error=CUT, failed_worker_id="d1")
    assert "d1" in used(router, "f1", now + PAUSE_MAX_S, times=30)


def test_a_lost_prefill_worker_is_excluded_for_that_frontend() -> None:
    """Without another prefill worker the decode worker computes the prompt. Other frontends still use the prefill worker."""
    router = fleet_of("p1", "d1")
    number, _ = place(router, "f1", 0.0)
    for _ in range(3):
        number, placement = place(router, "f1", 0.0)
        assert placement.prefill is not None
        report(router, "f1", number, "failed", 0.0, error=CUT, failed_worker_id="p1")
    alone = place(router, "f1", 0.5)[1]
    assert (alone.prefill, alone.decode.worker_id) == (None, "d1")
    assert place(router, "f2", 0.5)[1].prefill is not None


def test_explain_shows_the_paused_paths() -> None:
    """The explanations of a placement and of a refusal list `path_open`."""
    router = fleet_of("d1", "d2")
    fail(router, "f1", "d1", 0.0)
    number, _ = place(router, "f1", 0.5)
    record = router.history.get(f"r{number}")
    assert record is not None
    assert {each.decode.worker_id: each.removed_by for each in explain(record).candidates if each.decode} == {
        "d1": "path_open",
        "d2": "",
    }
    fail(router, "f1", "d2", 0.5)
    with pytest.raises(UnavailableError):
        router.ask("f1", 10**6, ask("refused", [7]), now=0.6, wall=0.6)
    record = router.history.get("refused")
    assert record is not None
    assert {each.removed_by for each in explain(record).candidates} == {"path_open"}


def test_the_state_of_paths_is_removed() -> None:
    """It is removed with the frontend's stream, with the worker's process, and some time after the last failure."""
    router = fleet_of("d1", "d2")
    fail(router, "f1", "d1", 0.0)
    router.on_stream_ended("f1", now=1.0)
    assert len(router.health.paths) == 0
    router.on_stream_started("f1")
    fail(router, "f1", "d1", 2.0)
    router.fleet.describe(router.fleet.workers["d1"], description("d1", "decode", epoch=2))
    assert len(router.health.paths) == 0
    fail(router, "f1", "d2", 3.0, times=1)
    router.check_health(now=3.0 + FORGET_S - 1)
    assert len(router.health.paths) == 1
    router.check_health(now=3.0 + FORGET_S)
    assert len(router.health.paths) == 0


def test_failures_of_an_earlier_process_do_not_count() -> None:
    """Reports that arrive after a worker has restarted do not count against the new process."""
    router = fleet_of("d1", "d2")
    lost = [place(router, "f1", 0.0, pinned_decode_worker_id="d1")[0] for _ in range(5)]
    router.fleet.describe(router.fleet.workers["d1"], description("d1", "decode", epoch=2))
    for number in lost:
        report(router, "f1", number, "failed", 0.1, error=CUT, failed_worker_id="d1")
    assert used(router, "f1", 0.2) == {"d1", "d2"}


def test_a_queued_request_of_a_cut_frontend_blocks_no_other() -> None:
    """It waits for capacity on the workers that its frontend reaches. Capacity of other workers goes to other frontends."""
    router = fleet_of("d1", "d2", requests_per_decode_max=1, queue=QueueSettings(requests_max=10))
    for _ in range(3):
        number, _ = place(router, "f1", 0.0, pinned_decode_worker_id="d1")
        report(router, "f1", number, "failed", 0.0, error=CUT, failed_worker_id="d1")
    running = {place(router, "f2", 0.1)[1].decode.worker_id for _ in range(2)}
    assert running == {"d1", "d2"}
    router.ask("f1", 10**6, ask("of-f1", [1]), now=0.2, wall=0.2)
    router.ask("f2", 10**6, ask("of-f2", [2]), now=0.2, wall=0.2)
    assert router.queue.requests == 2
    for reservation in list(router.book):
        if reservation.decode.ref.worker_id == "d1":
            router.settle(reservation)
    outcomes = {each.ask.request_id: each.outcome for each in router.drain_queue(now=0.3, wall=0.3)}
    assert set(outcomes) == {"of-f2"}


def test_paused_frontends_and_recomputation_survive_encoding() -> None:
    """A worker's view keeps the frontends that lost it, and a report keeps whether the prompt was recomputed."""
    view = WorkerView(
        worker=WorkerRef(worker_id="d1", address="h:1"),
        role=Role.DECODE,
        model="m",
        trust="exact",
        paused_frontend_ids=("f1", "f2"),
    )
    assert from_worker_view(to_worker_view(view)) == view
    finished = Report(kind=ReportKind.FINISHED, elapsed_s=0.5, was_recomputed=True)
    assert from_report(to_report(1, finished)) == finished
