"""The warnings of `kvmesh status` about failing paths."""

from kvmesh.cli.status import ADVICE, path_warnings, worker_row
from kvmesh.core import FailingKvPath, LoadRecord, Role, WorkerRef, WorkerView
from kvmesh.core.worker import KV_PATH_REASONS


def view(*failing: FailingKvPath, paused: tuple[str, ...] = ()) -> WorkerView:
    return WorkerView(
        worker=WorkerRef(worker_id="decode-1", address="h:1"),
        role=Role.DECODE,
        model="m",
        trust="exact",
        load=LoadRecord(failing_kv_paths=failing),
        paused_frontend_ids=paused,
    )


def test_each_failing_pair_is_named_with_its_cause() -> None:
    """The warning appears once, although several routers list the pair."""
    seen = view(FailingKvPath(worker_id="prefill-1", reason="loopback_address"))
    assert path_warnings([seen, seen]) == [
        "decode-1 cannot pull KV from prefill-1: loopback_address; "
        "it is handed out with a loopback address; start both with --address"
    ]


def test_every_reason_has_advice() -> None:
    """Each known reason has advice. An unknown reason, from a newer worker, is shown as it is."""
    assert ADVICE.keys() == KV_PATH_REASONS
    (line,) = path_warnings([view(FailingKvPath(worker_id="p", reason="newer"))])
    assert "newer" in line and "the log of decode-1" in line


def test_each_lost_connection_of_a_frontend_is_reported() -> None:
    """`kvmesh status` shows a lost connection as a warning and in the worker's state. A worker without problems has no warning."""
    lost = view(paused=("frontend-1", "frontend-2"))
    lines = path_warnings([lost])
    assert [line.partition(" has lost its connection to decode-1")[0] for line in lines] == ["frontend-1", "frontend-2"]
    assert worker_row(lost)[-1] == "paths lost"
    assert worker_row(view())[-1] == "ok"
    assert path_warnings([view()]) == []
