"""Sources of the planner's metrics: scraping the instances in the registry, or a Prometheus that scrapes them."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import ClientError, ClientSession, ClientTimeout
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.checks import is_whole_number
from kvmesh.clock import Clock
from kvmesh.discovery.base import Instance
from kvmesh.network.names import host_port
from services.planner.plan import COUNTERS, GAUGES, PROMPT_LENGTHS, RUNNING, STARTED, Key, Samples, Window, WindowKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A window, or None while there is none, and the problems of observing it, in sentences."""

    window: Window | None
    problems: Sequence[str] = ()


class MetricsSource(Protocol):
    """Observes the mesh. An instance that does not answer becomes a problem of the observation, not an exception."""

    name: str

    async def observe(self, instances: Sequence[Instance]) -> Observation:
        """Returns the newest window."""
        ...

    async def history(self, *, span_s: float, step_s: float) -> Mapping[str, Sequence[float]]:
        """Returns past request rates by model, oldest first, one per `step_s`. Raises FetchError. Empty: the source has none."""
        ...


RESPONSE_BYTES_MAX = 16 << 20
"""Metrics of one process have less than a megabyte; a larger response is not one of a kvmesh service."""
RECENT_PROMETHEUS_S = 15.0
"""Three scrapes at the shipped interval of 5 s: `rate` needs at least two samples."""
FETCHES_MAX = 16
"""Concurrent requests: a scrape of a thousand instances takes well under the shortest useful interval."""


class FetchError(Exception):
    """A failed HTTP request; the message says why."""


class Fetcher:
    """Sends HTTP GET requests, FETCHES_MAX at a time. `timeout_s`: longest wait for one response."""

    def __init__(self, session: ClientSession, *, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(FETCHES_MAX)

    async def get(self, url: str, params: Mapping[str, str] | None = None) -> bytes:
        """Returns the body of a response with status 200. Raises FetchError otherwise."""
        timeout = ClientTimeout(total=self._timeout_s)
        try:
            async with self._slots, self._session.get(url, params=params, timeout=timeout) as response:
                body = await self._read(response.content)
                if response.status != 200:
                    raise FetchError(f"status {response.status}: {body[:200].decode(errors='replace')}")
                return body
        except TimeoutError:
            raise FetchError(f"no answer within {self._timeout_s:g} s") from None
        except ClientError as error:
            raise FetchError(str(error) or type(error).__name__) from error

    async def _read(self, content: Any) -> bytes:
        body = bytearray()
        # In chunks, because `read` would keep an answer of any length in memory.
        async for chunk in content.iter_any():
            body += chunk
            if len(body) > RESPONSE_BYTES_MAX:
                raise FetchError(f"the answer is longer than {RESPONSE_BYTES_MAX} bytes")
        return bytes(body)


class ScrapeSource:
    """Scrapes every instance with a metrics port and compares with the oldest scrape inside the window."""

    name = "scrape"

    def __init__(self, fetcher: Fetcher, clock: Clock, *, window_s: float) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._windows = WindowKeeper(window_s)

    async def observe(self, instances: Sequence[Instance]) -> Observation:
        """Scrapes all instances. The first scrape gives gauges only, in a window of length 0."""
        scraped = [instance for instance in instances if is_whole_number(instance.meta.get("metrics_port", ""))]
        problems = [
            f"{instance.service} {instance.instance_id} has no metrics port"
            for instance in instances
            if instance not in scraped
        ]
        newest: dict[str, Samples] = {}
        for instance, result in zip(scraped, await asyncio.gather(*map(self._scrape, scraped)), strict=True):
            if isinstance(result, str):
                problems.append(f"{instance.service} {instance.instance_id} cannot be scraped: {result}")
            else:
                newest[instance.instance_id] = result
        return Observation(window=self._windows.add(self._clock.now(), newest), problems=problems)

    async def history(self, *, span_s: float, step_s: float) -> Mapping[str, Sequence[float]]:
        """Returns nothing: a scrape knows no past."""
        return {}

    async def _scrape(self, instance: Instance) -> Samples | str:
        target = host_port(instance.host, int(instance.meta["metrics_port"]))
        try:
            body = await self._fetcher.get(f"http://{target}/metrics")
            return parse(body.decode())
        except (FetchError, ValueError) as error:
            return str(error)


class PrometheusSource:
    """Queries a Prometheus over its HTTP API. Increases come from PromQL `increase`, which extrapolates."""

    name = "prometheus"

    def __init__(self, fetcher: Fetcher, url: str, clock: Clock, *, window_s: float) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._url = url.rstrip("/") + "/api/v1/query"
        self._window_s = window_s
        self._workers_seen: Mapping[tuple[str, str], int] = {}
        self._workers_changed_s = -math.inf

    async def observe(self, instances: Sequence[Instance]) -> Observation:
        """Sends one query per metric, all for the same time, since means are quotients of two of them."""
        at_s = self._clock.wall()
        results = await asyncio.gather(*(self._query(name, at_s) for name in (*COUNTERS, *GAUGES)))
        failed = sorted({result for result in results if isinstance(result, str)})
        found = [result for result in results if not isinstance(result, str)]
        merged: dict[Key, float] = {key: value for samples in found for key, value in samples.items()}
        problems = [f"Prometheus does not answer: {problem}" for problem in failed]
        problems += await self._down(at_s)
        workers, age_s = await self._workers(at_s)
        recent, tokens = await self._recent(STARTED, at_s), await self._recent(PROMPT_LENGTHS, at_s)
        return Observation(
            window=Window(
                window_s=self._window_s,
                increases={key: value for key, value in merged.items() if key[0] in COUNTERS},
                gauges={key: value for key, value in merged.items() if key[0] in GAUGES},
                workers=workers,
                age_s=age_s,
                has_changed_fleet=self._has_changed(workers, at_s),
                recent_rates=recent,
                newest_tokens=tokens,
            )
            if found
            else None,
            problems=problems,
        )

    async def history(self, *, span_s: float, step_s: float) -> Mapping[str, Sequence[float]]:
        """Returns a range query. Times without samples are omitted at the beginning, and count as 0 later."""
        now_s = self._clock.wall()
        query = f"sum by (model) (rate({STARTED}[{max(step_s, RECENT_PROMETHEUS_S):g}s]))"
        span = {"start": f"{now_s - span_s:.3f}", "end": f"{now_s:.3f}", "step": f"{step_s:g}"}
        try:
            answer = json.loads(await self._fetcher.get(f"{self._url}_range", {"query": query, **span}))
            return {row["metric"].get("model", ""): _rates(row["values"], step_s) for row in answer["data"]["result"]}
        except (ValueError, KeyError, TypeError) as error:
            raise FetchError(f"not an answer of Prometheus: {error}") from error

    async def _query(self, name: str, at_s: float) -> Samples | str:
        labels = COUNTERS[name] if name in COUNTERS else GAUGES[name]
        inner = f"increase({name}[{self._window_s:g}s])" if name in COUNTERS else name
        try:
            rows = await self._rows(f"sum by ({', '.join(labels)}) ({inner})", at_s)
        except (FetchError, ValueError, KeyError) as error:
            return str(error)
        return {(name, *(row["metric"].get(label, "") for label in labels)): float(row["value"][1]) for row in rows}

    async def _workers(self, at_s: float) -> tuple[Mapping[tuple[str, str], int], float]:
        """Returns the number of workers with samples, by model and role, and the age of the oldest of their newest samples."""
        try:
            rows = await self._rows(f"count by (model, role) ({RUNNING})", at_s)
            ages = await self._rows(f"time() - min(timestamp({RUNNING}))", at_s)
        except (FetchError, ValueError, KeyError):
            return {}, 0.0
        counts = {(row["metric"].get("model", ""), row["metric"].get("role", "")): int(row["value"][1]) for row in rows}
        return counts, max((float(row["value"][1]) for row in ages), default=0.0)

    def _has_changed(self, workers: Mapping[tuple[str, str], int], at_s: float) -> bool:
        """Returns whether the number of workers changed within the window."""
        if workers != self._workers_seen:
            self._workers_seen, self._workers_changed_s = workers, at_s
        return at_s - self._workers_changed_s < self._window_s

    async def _recent(self, name: str, at_s: float) -> Mapping[str, float]:
        """Returns the newest rate of a counter, by model."""
        try:
            rows = await self._rows(f"sum by (model) (rate({name}[{RECENT_PROMETHEUS_S:g}s]))", at_s)
        except (FetchError, ValueError, KeyError):
            return {}
        return {row["metric"].get("model", ""): float(row["value"][1]) for row in rows}

    async def _down(self, at_s: float) -> list[str]:
        """Returns problems for the targets that Prometheus cannot scrape."""
        try:
            rows = await self._rows('up{service=~"kvmesh-.*"} == 0', at_s)
        except (FetchError, ValueError, KeyError):
            return []
        return sorted(
            f"{row['metric'].get('service', '')} {row['metric'].get('instance', '')} cannot be scraped by Prometheus"
            for row in rows
        )

    async def _rows(self, query: str, at_s: float) -> Sequence[Any]:
        answer = json.loads(await self._fetcher.get(self._url, {"query": query, "time": f"{at_s:.3f}"}))
        rows: Sequence[Any] = answer["data"]["result"]
        return rows


def _rates(values: Sequence[Sequence[Any]], step_s: float) -> Sequence[float]:
    """Values at equal intervals, from (time, text) of those times that have one."""
    rates: list[float] = []
    before_s: float | None = None
    for at_s, text in values:
        missing = 0 if before_s is None else round((at_s - before_s) / step_s) - 1
        rates += [0.0] * missing
        value = float(text)
        rates.append(value if math.isfinite(value) else 0.0)
        before_s = at_s
    return rates


def parse(text: str) -> Samples:
    """Parses Prometheus text into the samples that the planner reads, summed by label. Raises ValueError if malformed."""
    wanted = {**COUNTERS, **GAUGES}
    total: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = wanted.get(sample.name)
            if labels is not None:
                key = (sample.name, *(sample.labels.get(label, "") for label in labels))
                total[key] = total.get(key, 0.0) + sample.value
    return total
