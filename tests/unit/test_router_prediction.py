"""The metric of prediction errors: the compared times, and the bound on its labels."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvmesh.core import Report, ReportKind
from kvmesh.telemetry import Telemetry
from services.router import metrics as metrics_module
from services.router.core_settings import SyncSettings
from services.router.health.prediction_error import OTHER, WorkerLabels, error_ratio
from services.router.metrics import RouterMetrics
from services.router.replicas.peer_reservations import PeerReservations
from tests.unit.router_fleets import ask, core, join

ROOT = Path(__file__).resolve().parents[2]


def test_the_error_is_relative_and_needs_both_times():
    """Half of the expected time is -0.5 and twice the time is 1. Without an expected or an observed time there is no error."""
    assert error_ratio(0.2, 0.1) == -0.5
    assert error_ratio(0.1, 0.2) == 1
    assert error_ratio(None, 0.2) is error_ratio(0.1, None) is error_ratio(0.0, 0.2) is None


def test_labels_are_bounded_and_freed_with_their_workers():
    """Beyond the bound a worker is labelled `other`. The label of a removed worker can be reused."""
    labels = WorkerLabels(2)
    assert [labels.label_of(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    assert labels.remove_absent(["b", "c"]) == ["a"]
    assert labels.label_of("c") == "c"
    assert labels.remove_absent(["b", "c"]) == []


def test_errors_count_for_the_worker_of_their_phase(monkeypatch):
    """Prefill times count for the prefill worker and first tokens for the decode worker. The histograms of a removed worker are removed."""
    monkeypatch.setattr(metrics_module, "LABELLED_WORKERS_MAX", 2)
    router = core()
    for name, role in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
        join(router, name, role)
    telemetry = Telemetry.create("router", registry=CollectorRegistry())
    metrics = RouterMetrics(telemetry.instruments, router)

    def count(phase: str, worker: str) -> float | None:
        name = "kvmesh_router_prediction_error_ratio_count"
        return telemetry.registry.get_sample_value(name, {"phase": phase, "worker": worker})

    for number, decode in enumerate(("d1", "d2", "d1"), start=1):
        what = ask(f"r{number}", [number, 10 + number, 20 + number], pinned_decode_worker_id=decode)
        placement = router.ask("f", number, what, now=0.0, wall=0.0)
        assert placement.expected_ttft_s > 0
        for kind in (ReportKind.PREFILLED, ReportKind.FIRST_TOKEN):
            note = Report(kind=kind, elapsed_s=2 * placement.expected_ttft_s)
            metrics.observe_prediction(router.report("f", number, note, now=1.0), note)
    assert (count("prefill", "p1"), count("ttft", "d1"), count("ttft", OTHER)) == (3, 2, 1)
    name = "kvmesh_router_prediction_error_ratio_bucket"
    for bound, within in (("0.5", 0), ("1.0", 2)):
        labels = {"phase": "ttft", "worker": "d1", "le": bound}
        assert telemetry.registry.get_sample_value(name, labels) == within
    router.fleet.unregister("d1")
    metrics.remove_absent_workers()
    assert (count("prefill", "p1"), count("ttft", "d1")) == (3, None)


def test_the_readme_lists_all_metrics():
    """The table of metrics in the README matches the registered metrics."""
    telemetry = Telemetry.create("router", registry=CollectorRegistry())
    router = core()
    RouterMetrics(telemetry.instruments, router).add_peer_gauges(PeerReservations(router, SyncSettings()))
    prefix = "kvmesh_router_"
    there = {metric.name.removeprefix(prefix) for metric in telemetry.registry.collect()}
    text = (ROOT / "services/router/README.md").read_text().partition("## Metrics")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {name for name in there if not name.startswith("rpc_")}
