"""Computes pools and latencies from the metrics of a window. Pure."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core import Role
from kvmesh.core.planning import LatencyReport, PoolReport
from kvmesh.discovery.base import Health, Instance
from services.planner.arrivals import Arrivals

REQUESTS = "kvmesh_frontend_requests_total"
TTFT = "kvmesh_frontend_ttft_seconds"
ITL = "kvmesh_frontend_itl_seconds"
PROMPT_LENGTH = "kvmesh_frontend_prompt_length_tokens"
PROMPT_TOKENS = "kvmesh_frontend_prompt_tokens_total"
OUTPUT_TOKENS = "kvmesh_frontend_output_tokens_total"
RUNNING = "kvmesh_worker_running_requests"
WAITING = "kvmesh_worker_waiting_requests"
BLOCKS_USED = "kvmesh_worker_kv_blocks_used"
BLOCKS_TOTAL = "kvmesh_worker_kv_blocks_total"
WORKER_PROMPT_TOKENS = "kvmesh_worker_prompt_tokens_total"
WORKER_OUTPUT_TOKENS = "kvmesh_worker_output_tokens_total"
WORKER_CACHED_TOKENS = "kvmesh_worker_cached_tokens_total"
WAITING_TOKENS = "kvmesh_worker_waiting_prompt_tokens"
QUEUE_WAIT = "kvmesh_router_queue_wait_seconds"
QUEUED = "kvmesh_router_queue_requests"
QUEUED_TOKENS = "kvmesh_router_queue_tokens"

STARTED = f"{PROMPT_LENGTH}_count"
PROMPT_LENGTHS = f"{PROMPT_LENGTH}_sum"
KEPT = 12
"""Scrapes per window that are kept. Each has about 60 numbers per instance."""

# The metrics that are read, and the labels by which they are summed.
COUNTERS: Mapping[str, Sequence[str]] = {
    REQUESTS: ("model", "code"),
    STARTED: ("model",),
    PROMPT_LENGTHS: ("model",),
    f"{PROMPT_LENGTH}_bucket": ("model", "le"),
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
    WORKER_CACHED_TOKENS: ("model", "role"),
    f"{QUEUE_WAIT}_sum": (),
    f"{QUEUE_WAIT}_count": (),
}
GAUGES: Mapping[str, Sequence[str]] = {
    RUNNING: ("model", "role"),
    WAITING: ("model", "role"),
    BLOCKS_USED: ("model", "role"),
    BLOCKS_TOTAL: ("model", "role"),
    WAITING_TOKENS: ("model", "role"),
    QUEUED: (),
    QUEUED_TOKENS: ("priority",),
}

Key = tuple[str, ...]
"""Name of a metric and the values of the labels by which it is summed."""
Samples = Mapping[Key, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Increases of counters over `window_s` and the newest gauges, summed over all instances.

    `has_changed_fleet`: instances came or went within the window, so that increases of workers and of frontends differ. `recent_rates`:
    requests that currently start per second, by model. `surges`: the results of `Arrivals.surge`, by model. `newest_tokens`: prompt
    tokens per second since the previous observation, by model. `workers`: workers with samples, by model and role. `age_s`: age of the
    oldest of these workers' newest samples.
    """

    window_s: float
    increases: Samples = field(default_factory=dict)
    gauges: Samples = field(default_factory=dict)
    workers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    age_s: float = 0.0
    has_changed_fleet: bool = False
    recent_rates: Mapping[str, float] = field(default_factory=dict)
    surges: Mapping[str, float] = field(default_factory=dict)
    newest_tokens: Mapping[str, float] = field(default_factory=dict)

    def recent_rate(self, model: str) -> float:
        """Returns the requests that currently start per second; the window's mean if that is unknown."""
        known = self.recent_rates.get(model)
        return known if known is not None else _quotient(self.started(model), by=self.window_s) or 0.0

    def rate(self, key: Key) -> float | None:
        """Increase per second. None: not observed."""
        return _quotient(self.increases.get(key), by=self.window_s)

    def requests(self, model: str) -> float | None:
        """Returns the requests that ended. None: not observed."""
        found = [value for key, value in self.increases.items() if key[:2] == (REQUESTS, model)]
        return sum(found) if found else None

    def started(self, model: str) -> float | None:
        """Returns the requests that started; those that ended where frontends do not count them. None: not observed."""
        started = self.increases.get((STARTED, model))
        return self.requests(model) if started is None else started

    def buckets(self, histogram: str, model: str) -> list[tuple[float, float]]:
        """(upper bound, cumulative count) of a histogram."""
        name = f"{histogram}_bucket"
        return [(float(key[2]), count) for key, count in self.increases.items() if key[0] == name and key[1] == model]


class WindowKeeper:
    """Compares the newest scrape with older ones. Keeps about KEPT scrapes of a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, Mapping[str, Samples]]] = deque()
        self._newest: Mapping[str, Samples] = {}
        self._starts = RecentStarts()

    def add(self, now_s: float, newest: Mapping[str, Samples]) -> Window:
        """Takes a scrape, by instance. The first one gives gauges only, in a window of length 0."""
        newest_tokens = self._starts.add(now_s, increase(self._newest, newest))
        self._newest = newest
        if not self._kept or now_s - self._kept[-1][0] >= self._window_s / KEPT:
            self._kept.append((now_s, newest))
        # Keeps one scrape outside of the window, so that the window is never shorter than `window_s`.
        while len(self._kept) > 2 and self._kept[1][0] <= now_s - self._window_s:
            self._kept.popleft()
        began_s, oldest = self._kept[0]
        return Window(
            window_s=now_s - began_s,
            increases=increase(oldest, newest),
            gauges=summed_gauges(newest.values()),
            workers=count_workers(newest.values()),
            has_changed_fleet=newest.keys() != oldest.keys(),
            recent_rates=self._starts.rates(),
            surges=self._starts.surges(),
            newest_tokens=newest_tokens,
        )


class RecentStarts:
    """Requests that started between scrapes, by model."""

    def __init__(self) -> None:
        self._newest_s: float | None = None
        self._models: dict[str, Arrivals] = {}

    def add(self, now_s: float, increases: Samples) -> Mapping[str, float]:
        """Returns the prompt tokens per second since the scrape before, by model."""
        before_s, self._newest_s = self._newest_s, now_s
        if before_s is None or now_s <= before_s:
            return {}
        for key, count in increases.items():
            if key[0] == STARTED:
                self._models.setdefault(key[1], Arrivals()).add(now_s - before_s, count)
        return {key[1]: tokens / (now_s - before_s) for key, tokens in increases.items() if key[0] == PROMPT_LENGTHS}

    def rates(self) -> Mapping[str, float]:
        """Returns the present rate of each model."""
        return {model: rate for model, arrivals in self._models.items() if (rate := arrivals.rate) is not None}

    def surges(self) -> Mapping[str, float]:
        """Returns the rate of the newest count of each model whose load surges."""
        return {model: arrivals.surge for model, arrivals in self._models.items() if arrivals.surge}


def count_workers(scrapes: Iterable[Samples]) -> dict[tuple[str, str], int]:
    """Counts the scrapes that are workers', by model and role."""
    return dict(Counter((key[1], key[2]) for samples in scrapes for key in samples if key[0] == RUNNING))


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
    return [_pool(window, model, role, members=members[model, role]) for model, role in sorted(members)]


def latencies(window: Window) -> list[LatencyReport]:
    """Returns one latency per model in the metrics of frontends, sorted by name."""
    counted = (REQUESTS, STARTED)
    return [_latency(window, model) for model in sorted({key[1] for key in window.increases if key[0] in counted})]


def _pool(window: Window | None, model: str, role: Role, *, members: Sequence[Instance]) -> PoolReport:
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
        prompt_tokens_per_s=window.rate((WORKER_PROMPT_TOKENS, model, role)) if window is not None else None,
        output_tokens_per_s=window.rate((WORKER_OUTPUT_TOKENS, model, role)) if window is not None else None,
        waiting_prompt_tokens=gauges.get((WAITING_TOKENS, model, role)),
    )


def _latency(window: Window, model: str) -> LatencyReport:
    started, ended = window.started(model), window.requests(model)
    failed = sum(
        count for key, count in window.increases.items() if key[:2] == (REQUESTS, model) and _is_failure(key[2])
    )
    cached = _sum_of_roles(window, WORKER_CACHED_TOKENS, model=model)
    computed = _sum_of_roles(window, WORKER_PROMPT_TOKENS, model=model)
    return LatencyReport(
        model=model,
        requests_per_s=_quotient(started, by=window.window_s),
        ttft_mean_s=_mean(window, TTFT, model=model),
        ttft_p99_s=quantile(0.99, window.buckets(TTFT, model=model)),
        itl_mean_s=_mean(window, ITL, model=model),
        itl_p99_s=quantile(0.99, window.buckets(ITL, model=model)),
        prompt_tokens_mean=_quotient(window.increases.get((PROMPT_TOKENS, model)), by=started),
        output_tokens_mean=_quotient(window.increases.get((OUTPUT_TOKENS, model)), by=ended),
        hit_rate=None if cached is None else _quotient(cached, by=cached + (computed or 0.0)),
        queue_wait_mean_s=_quotient(
            window.increases.get((f"{QUEUE_WAIT}_sum",)), by=window.increases.get((f"{QUEUE_WAIT}_count",))
        ),
        queued_requests=window.gauges.get((QUEUED,)),
        failed_rate=_quotient(failed, by=ended),
    )


def _is_failure(code: str) -> bool:
    """Returns whether the mesh failed or refused the request; other 4xx codes are the client's."""
    return code.startswith("5") or code == "429"


def _sum_of_roles(window: Window, name: str, model: str) -> float | None:
    found = [value for key, value in window.increases.items() if key[:2] == (name, model)]
    return sum(found) if found else None


def _mean(window: Window, histogram: str, model: str) -> float | None:
    return _quotient(
        window.increases.get((f"{histogram}_sum", model)), by=window.increases.get((f"{histogram}_count", model))
    )


def _quotient(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by
