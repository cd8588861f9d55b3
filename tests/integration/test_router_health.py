"""Breakers, wedged workers and impossible overlap in a whole router on loopback, as frontends and operators see them."""

from itertools import count

import pytest

from kvmesh.core import KvStored, LoadRecord, Report, ReportKind, WorkerView
from kvmesh.errors import LostError, UnavailableError
from kvmesh.rpc.router.client import GrpcRouterClient
from services.router.health import breaker, overlap, wedge
from services.router.health.breaker import BreakerSettings
from tests.integration.test_router_service import Mesh, Router, eventually, running_mesh
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask

PAUSE_S = 60.0
BREAKER = BreakerSettings(failures_max=3, pause_min_s=PAUSE_S)


@pytest.fixture(autouse=True)
def quick_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe closes a breaker. Less evidence and time are needed to detect an impossible overlap."""
    monkeypatch.setattr(breaker, "PROBES_MAX", 1)
    monkeypatch.setattr(breaker, "PROBE_SUCCESSES", 1)
    monkeypatch.setattr(overlap, "REPEATS", 3)
    monkeypatch.setattr(overlap, "SETTLE_S", 0)


async def views(mesh: Mesh, router: Router) -> dict[str, WorkerView]:
    client = GrpcRouterClient(mesh.channels, router.server.address)
    return {view.worker.worker_id: view for view in await client.list_workers(timeout_s=PATIENCE_S)}


def event_count(router: Router, kind: str) -> float | None:
    return router.metrics.get_sample_value("kvmesh_router_health_events_total", {"kind": kind})


async def test_failures_open_a_breaker_and_a_probe_closes_it():
    """Reports open the breaker, asks are refused with a time to retry, ListWorkers shows the state, and the metrics count the changes."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        router = await mesh.router(breaker=BREAKER)
        await eventually(lambda: router.takes() == {"d1"})
        link = await mesh.link()
        for number in range(3):
            placed = await link.place(ask(f"r{number}", [number]), timeout_s=PATIENCE_S)
            lost = LostError("gone", where="d1")
            link.report_nowait(
                placed.ask_id, Report(kind=ReportKind.FAILED, elapsed_s=0.1, error=lost, failed_worker_id="d1")
            )
        with pytest.raises(UnavailableError) as refusal:
            await link.place(ask("r4", [4]), timeout_s=PATIENCE_S)
        assert refusal.value.reason == "breakers_open"
        assert 0 < refusal.value.retry_after_s <= PAUSE_S
        view = (await views(mesh, router))["d1"]
        assert (view.breaker, view.excluded_by) == ("open", "breaker_open")
        router.clock.forward_s += PAUSE_S
        await eventually(lambda: router.takes() == {"d1"})
        assert (await views(mesh, router))["d1"].breaker == "half_open"
        probe = await link.place(ask("r5", [5]), timeout_s=PATIENCE_S)
        with pytest.raises(UnavailableError):
            await link.place(ask("r6", [6]), timeout_s=PATIENCE_S)
        link.report_nowait(probe.ask_id, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.1))
        last = await link.place(ask("r7", [7]), timeout_s=PATIENCE_S)
        for placed in (probe, last):
            link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        assert (await views(mesh, router))["d1"].breaker == "closed"
        await eventually(lambda: event_count(router, "breaker_closed") == 1)
        assert event_count(router, "breaker_opened") == 1
        assert router.metrics.get_sample_value("kvmesh_router_open_breakers") == 0


@pytest.mark.parametrize(("name", "role"), [("p1", "prefill"), ("d1", "decode")])
async def test_a_worker_with_requests_that_does_not_step_is_wedged(name, role, monkeypatch):
    """The worker's load records have running requests and an unchanged step number."""
    monkeypatch.setattr(wedge, "WAIT_MIN_S", 0.3)
    monkeypatch.setattr(wedge, "WAIT_MAX_S", 0.3)
    async with running_mesh() as mesh:
        workers = {each: await mesh.worker(each, "prefill" if each[0] == "p" else "decode") for each in ("p1", "d1")}
        router = await mesh.router(breaker=BREAKER)
        await eventually(lambda: router.takes() == {"p1", "d1"})
        stuck = workers[name]
        stuck.load = LoadRecord(worker_id=name, epoch=1, step=9, running_requests=2)
        await eventually(lambda: router.core.fleet.workers[name].excluded_by == "wedged")
        assert (await views(mesh, router))[name].excluded_by == "wedged"
        assert router.metrics.get_sample_value("kvmesh_router_wedged_workers") == 1
        steps = count(10)

        def is_used() -> bool:
            # With each check a new step: otherwise it would soon be wedged again.
            stuck.load = LoadRecord(worker_id=name, epoch=1, step=next(steps), running_requests=2)
            return router.takes() == {"p1", "d1"}

        await eventually(is_used)
        await eventually(lambda: (event_count(router, "worker_recovered") or 0) >= 1)


async def test_impossible_overlap_is_reported_once(caplog):
    """A worker hashes its blocks with another seed. The log has one line, and ListWorkers and a gauge show it."""
    async with running_mesh() as mesh:
        d1 = await mesh.worker("d1", "decode")
        router = await mesh.router(breaker=BREAKER)
        await eventually(lambda: router.takes() == {"d1"})
        d1.tell(KvStored(block_hashes=[901, 902]))
        await eventually(lambda: router.core.fleet.workers["d1"].feed.blocks == 2)
        link = await mesh.link()
        for number in range(8):
            placed = await link.place(ask(f"r{number}", [1, 2]), timeout_s=PATIENCE_S)
            link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await eventually(lambda: event_count(router, "overlap_impossible") == 1)
        [line] = [record for record in caplog.records if record.message == "overlap_impossible"]
        assert (line.data["model"], line.data["cause"]) == ("demo", "hash_mismatch")
        assert (await views(mesh, router))["d1"].trust_reason == "hash_mismatch"
        assert router.metrics.get_sample_value("kvmesh_router_hash_mismatch_workers") == 1
