"""Computes pools and latencies from the metrics of a window. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core import Role
from kvmesh.core.plan import LatencyReport, PoolReport
from kvmesh.discovery.base import Health, Instance

REQUESTS = "kvmesh_frontend_requests_total"
TTFT = "kvmesh_frontend_ttft_seconds"
ITL = "kvmesh_frontend_itl_seconds"
PROMPT_TOKENS = "kvmesh_frontend_prompt_tokens_total"
OUTPUT_TOKENS = "kvmesh_frontend_output_tokens_total"
RUNNING = "kvmesh_worker_running_requests"
WAITING = "kvmesh_worker_waiting_requests"
BLOCKS_USED = "kvmesh_worker_kv_blocks_used"
BLOCKS_TOTAL = "kvmesh_worker_kv_blocks_total"
WORKER_PROMPT_TOKENS = "kvmesh_worker_prompt_tokens_total"
WORKER_OUTPUT_TOKENS = "kvmesh_worker_output_tokens_total"

# The metrics that are read, and the labels by which they are summed.
COUNTERS: Mapping[str, Sequence[str]] = {
    REQUESTS: ("model",),
    PROMPT_TOKENS: ("model",),
    OUTPUT_TOKENS: ("model",),
    f"{TTFT}_sum": ("model",),
    f"{TTFT}_count": ("model",),
    f"{TTFT}_bucket": ("model", "le"),
    f"{ITL}_sum": ("model",),
    f"{ITL}_count": ("model",),
    f"{ITL}_bucket": ("model", "le"),
    WORKER_PROMPT_TOKENS: ("model", "role"),
    WORKER_OUTPUT_TOKENS: ("model", "role"),
}
GAUGES: Mapping[str, Sequence[str]] = {
    RUNNING: ("model", "role"),
    WAITING: ("model", "role"),
    BLOCKS_USED: ("model", "role"),
    BLOCKS_TOTAL: ("model", "role"),
}

Key = tuple[str, ...]
"""Name of a metric and the values of the labels by which it is summed."""
Samples = Mapping[Key, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Increases of counters over `window_s` and the newest gauges, summed over all instances."""

    window_s: float
    increases: Samples = field(default_factory=dict)
    gauges: Samples = field(default_factory=dict)


def increase(older: Mapping[str, Samples], newer: Mapping[str, Samples]) -> dict[Key, float]:
    """Returns the increases of counters between two scrapes, summed over instances.

    A value below the older one means that the process restarted: it counts from zero, as in Prometheus' `increase`. An
    instance that the older scrape lacks does not count, since its start is not known.
    """
    total: dict[Key, float] = {}
    for instance_id, now in newer.items():
        before = older.get(instance_id)
        if before is None:
            continue
        for key, value in now.items():
            if key[0] in COUNTERS:
                known = before.get(key, 0.0)
                total[key] = total.get(key, 0.0) + (value - known if value >= known else value)
    return total


def summed_gauges(newest: Iterable[Samples]) -> dict[Key, float]:
    """Sums gauges over instances."""
    total: dict[Key, float] = {}
    for samples in newest:
        for key, value in samples.items():
            if key[0] in GAUGES:
                total[key] = total.get(key, 0.0) + value
    return total


def quantile(q: float, buckets: Iterable[tuple[float, float]]) -> float | None:
    """Prometheus' histogram_quantile over (upper bound, cumulative count): linear within the bucket that holds the rank.

    In the last bucket (+Inf) it is the upper bound of the one before; the first one begins at 0. None without
    observations or without a +Inf bucket. Source: prometheus/prometheus promql/quantile.go, `bucketQuantile`.
    """
    ordered = sorted(buckets)
    if len(ordered) < 2 or not math.isinf(ordered[-1][0]) or ordered[-1][1] <= 0:
        return None
    # A scrape between two increments can give decreasing counts; cumulative counts never decrease.
    highest = 0.0
    counts: list[float] = []
    for _, count in ordered:
        highest = max(highest, count)
        counts.append(highest)
    rank = q * counts[-1]
    position = next(i for i, count in enumerate(counts) if count >= rank)
    if position == len(ordered) - 1:
        return ordered[-2][0]
    upper = ordered[position][0]
    if position == 0 and upper <= 0:
        return upper
    lower = ordered[position - 1][0] if position else 0.0
    below = counts[position - 1] if position else 0.0
    within = counts[position] - below
    return lower + (upper - lower) * (rank - below) / within if within else upper


def pools(window: Window | None, instances: Iterable[Instance]) -> list[PoolReport]:
    """Returns one status per model and role in the registry, sorted."""
    members: dict[tuple[str, Role], list[Instance]] = {}
    for instance in instances:
        role, model = instance.meta.get("role", ""), instance.meta.get("model", "")
        if model and role in (Role.PREFILL, Role.DECODE):
            members.setdefault((model, Role(role)), []).append(instance)
    return [_pool(window, model, role, members[model, role]) for model, role in sorted(members)]


def latencies(window: Window) -> list[LatencyReport]:
    """Returns one latency per model in the metrics of frontends, sorted by name."""
    return [_latency(window, model) for model in sorted({key[1] for key in window.increases if key[0] == REQUESTS})]


def _pool(window: Window | None, model: str, role: Role, members: Sequence[Instance]) -> PoolReport:
    gauges = window.gauges if window is not None else {}
    total = gauges.get((BLOCKS_TOTAL, model, role), 0.0)
    return PoolReport(
        model=model,
        role=role,
        workers_ready=sum(1 for member in members if member.takes_requests),
        workers_draining=sum(1 for member in members if member.is_draining),
        workers_critical=sum(1 for member in members if member.health is Health.CRITICAL and not member.is_draining),
        running_requests=round(gauges.get((RUNNING, model, role), 0.0)),
        waiting_requests=round(gauges.get((WAITING, model, role), 0.0)),
        kv_usage=gauges.get((BLOCKS_USED, model, role), 0.0) / total if total else None,
        prompt_tokens_per_s=_rate(window, (WORKER_PROMPT_TOKENS, model, role)),
        output_tokens_per_s=_rate(window, (WORKER_OUTPUT_TOKENS, model, role)),
    )


def _latency(window: Window, model: str) -> LatencyReport:
    requests = window.increases.get((REQUESTS, model))
    return LatencyReport(
        model=model,
        requests_per_s=_rate(window, (REQUESTS, model)),
        ttft_mean_s=_mean(window, TTFT, model),
        ttft_p99_s=quantile(0.99, _buckets(window, TTFT, model)),
        itl_mean_s=_mean(window, ITL, model),
        itl_p99_s=quantile(0.99, _buckets(window, ITL, model)),
        prompt_tokens_mean=_quotient(window.increases.get((PROMPT_TOKENS, model)), requests),
        output_tokens_mean=_quotient(window.increases.get((OUTPUT_TOKENS, model)), requests),
    )


def _rate(window: Window | None, key: Key) -> float | None:
    return _quotient(window.increases.get(key), window.window_s) if window is not None else None


def _mean(window: Window, histogram: str, model: str) -> float | None:
    return _quotient(
        window.increases.get((f"{histogram}_sum", model)), window.increases.get((f"{histogram}_count", model))
    )


def _quotient(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _buckets(window: Window, histogram: str, model: str) -> list[tuple[float, float]]:
    name = f"{histogram}_bucket"
    return [(float(key[2]), count) for key, count in window.increases.items() if key[0] == name and key[1] == model]
