"""A worker's load as Prometheus metrics, read from the engine at scrape time: nothing is counted per token."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.worker.worker import Worker

GAUGES = {
    "running_requests": "Requests in the running batch.",
    "waiting_requests": "Requests that wait for their first step.",
    "waiting_prompt_tokens": "Prompt tokens accepted but not computed yet.",
    "kv_blocks_used": "KV blocks in use by requests, leased ones included.",
    "kv_blocks_free": "KV blocks that no request holds.",
    "kv_blocks_total": "All KV blocks.",
    "kv_blocks_leased": "KV blocks held for handles that were not pulled yet.",
    "bootstrapping_requests": "Prefill, rendezvous handoff: requests that wait for their decode worker.",
    "sending_requests": "Prefill, rendezvous handoff: requests whose KV is being sent.",
    "preallocating_requests": "Decode, rendezvous handoff: requests that wait for KV blocks.",
    "receiving_requests": "Decode, rendezvous handoff: requests that have blocks and wait for KV.",
    "retracted_requests": "Requests that lost their blocks to others and wait to continue.",
    "pulling_requests": "Transfers of KV into this worker that may still write, those of cancelled requests included.",
    "kv_blocks_cached": "Free KV blocks that hold cached KV.",
    "kv_blocks_held": "KV blocks of requests and handles, counted from these.",
    "kv_blocks_unaccounted": "Total minus free minus held KV blocks: 0, unless blocks leaked or have two owners.",
}
COUNTERS = {
    "prompt_tokens_total": "Prompt tokens computed.",
    "output_tokens_total": "Output tokens generated.",
    "cached_tokens_total": "Prompt tokens served from the cache.",
    "transferred_tokens_total": "Prompt tokens whose KV came from another worker.",
    "preempted_requests_total": "Requests taken off the batch for want of blocks.",
    "failed_handoffs_total": "Handoffs whose KV could not be pulled.",
    "recomputed_tokens_total": "Prompt tokens computed because their KV could not be pulled.",
}
LABELS = ("model", "role")


class WorkerMetrics(Collector):
    """`kvmesh_worker_*`, one sample each."""

    def __init__(self, worker: Worker, registry: CollectorRegistry) -> None:
        self._worker = worker
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The newest load. Called by the scrape on the worker's own event loop."""
        load = self._worker.engine.load()
        description = self._worker.description
        labels = (description.model.name, description.role.value)
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvmesh_worker_{name}", text, labels=LABELS)
            if (value := getattr(load, name)) is not None:
                gauge.add_metric(labels, value)
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"kvmesh_worker_{name}", text, labels=LABELS)
            counter.add_metric(labels, getattr(load, name))
            yield counter
        statistics = self._worker.statistics()
        for name, value, text in (
            ("legs_requests", statistics.legs, "Legs in the engine."),
            (
                "leases_handles",
                statistics.leases,
                "Handles whose KV blocks are held: neither pulled, released nor expired.",
            ),
            (
                "unanswered_cancels_requests",
                statistics.unanswered_cancels,
                "Cancelled legs that the engine has not ended yet.",
            ),
            ("failing_kv_paths", len(load.failing_kv_paths), "Prefill workers whose KV cannot be pulled at present."),
            ("kv_announced_blocks", statistics.kv_blocks_announced, "Cached KV blocks as published to routers."),
        ):
            gauge = GaugeMetricFamily(f"kvmesh_worker_{name}", text, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine may not be loaded yet when the collector is registered."""
        return ()
