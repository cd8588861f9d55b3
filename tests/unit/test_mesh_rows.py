"""Rows of workers and pools, joined from the registry, the router and the planner, and requests of several routers."""

from kvmesh.core import LoadRecord, RequestList, RequestState, RequestView, Role, WorkerRef, WorkerView
from kvmesh.core.planning import PlanReport, PoolReport
from kvmesh.discovery.base import DECODE, PREFILL, Health, Instance
from kvmesh.rpc.mesh.rows import pool_rows, worker_rows
from kvmesh.rpc.mesh.view import MeshView, merge_requests


def instance(
    name: str, *, health: Health = Health.PASSING, is_draining: bool = False, service: str = DECODE
) -> Instance:
    meta = {"model": "demo", "engine": "simulated"}
    return Instance(
        service=service, instance_id=name, host="h", port=1, meta=meta, tags=(), health=health, is_draining=is_draining,
        notes="a reason",
    )  # fmt: skip


def worker_view(name: str, **options: object) -> WorkerView:
    worker = WorkerRef(worker_id=name, address="h:1", epoch=1)
    load = LoadRecord(running_requests=2, kv_blocks_used=10, kv_blocks_total=100)
    return WorkerView(worker=worker, role=Role.DECODE, model="demo", trust="exact", **{"load": load, **options})  # type: ignore[arg-type]


def test_the_state_is_the_first_reason_for_exclusion() -> None:
    """A worker's state is the registry's reason for its exclusion, or else the router's. Workers that only one of them knows are listed too."""
    instances = [
        instance("d1"),
        instance("d2", health=Health.CRITICAL),
        instance("d3", is_draining=True),
        instance("d4"),
        instance("d5"),
        instance("new"),
    ]
    views = [
        worker_view("d1"),
        worker_view("d2", excluded_by="silent"),
        worker_view("d3", excluded_by="draining"),
        worker_view("d4", excluded_by="breaker_open"),
        worker_view("d5", paused_frontend_ids=("f",)),
        worker_view("gone"),
    ]
    rows = {row.name: row for row in worker_rows(MeshView(instances={DECODE: instances}, workers=views))}
    assert {name: row.state for name, row in rows.items()} == {
        "d1": "ok", "d2": "critical", "d3": "draining", "d4": "breaker_open", "d5": "paths lost", "gone": "ok", "new": "joining",
    }  # fmt: skip
    assert (rows["d3"].note, rows["d1"].note) == ("a reason", "")
    assert (rows["new"].engine, rows["new"].load, rows["new"].kv_usage) == ("simulated", None, None)


def test_pools_have_sums_and_planned_sizes() -> None:
    """Excluded workers are not ready. A planned pool without workers has a row, and so has a pool without a plan."""
    view = MeshView(
        instances={
            PREFILL: [instance("p1", service=PREFILL)],
            DECODE: [instance("d1"), instance("d2", is_draining=True)],
        },
        workers=[worker_view("d1"), worker_view("d2")],
    )
    pools = [
        PoolReport(model="demo", role=Role.DECODE, workers_planned=3),
        PoolReport(model="other", role=Role.DECODE, workers_planned=1),
    ]
    plan = PlanReport(mode="act", source="scrape", pools=[*pools, PoolReport(model="none", role=Role.DECODE)])
    rows = pool_rows(worker_rows(view), plan)
    assert [(row.model, row.role, row.workers_ready, row.workers, row.workers_planned) for row in rows] == [
        ("demo", "decode", 1, 2, 3),
        ("demo", "prefill", 0, 1, None),
        ("other", "decode", 0, 0, 1),
    ]
    assert (rows[0].running_requests, rows[0].kv_blocks_used, rows[0].kv_blocks_total) == (4, 20, 200)


def test_the_newest_placement_of_a_request_counts() -> None:
    """A router whose frontend has left never learns the end of a request. A later attempt is newer, whatever the clocks say."""

    def request(name: str, state: RequestState, at: float, attempt: int = 0) -> RequestView:
        return RequestView(request_id=name, model="demo", state=state, decided_at_s=at, attempt=attempt)

    first = [
        request("a", RequestState.FAILED, 9.0),
        request("b", RequestState.UNKNOWN, 8.0),
        request("c", RequestState.DECODING, 1.0),
    ]
    second = [request("a", RequestState.DECODING, 2.0, attempt=1), request("b", RequestState.FINISHED, 3.0)]
    merged = merge_requests(
        [
            RequestList(requests=first, requests_in_flight=2, requests_queued=1),
            RequestList(requests=second, requests_in_flight=1),
        ],
        2,
    )
    assert [(each.request_id, each.state.value) for each in merged.requests] == [("b", "finished"), ("a", "decoding")]
    assert (merged.requests_in_flight, merged.requests_queued) == (3, 1)
