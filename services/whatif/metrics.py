"""The metrics that a simulated mesh would export, for the planner's own code."""

from bisect import bisect_left
from collections.abc import Mapping

from kvmesh.core import Role
from services.planner.plan import (
    BLOCKS_TOTAL,
    BLOCKS_USED,
    ITL,
    OUTPUT_TOKENS,
    PROMPT_LENGTH,
    PROMPT_TOKENS,
    QUEUED_TOKENS,
    REQUESTS,
    RUNNING,
    TTFT,
    WAITING,
    WAITING_TOKENS,
    WORKER_CACHED_TOKENS,
    WORKER_OUTPUT_TOKENS,
    WORKER_PROMPT_TOKENS,
    Key,
    Samples,
)
from services.whatif.engine import Job, ReplayEngine
from services.whatif.fleet import ChangingFleet

DURATION_BOUNDS_S = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
LENGTH_BOUNDS = tuple(float(base << power) for power in range(3, 17) for base in (2, 3))


class _Histogram:
    def __init__(self, name: str, model: str, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._keys: list[Key] = [(f"{name}_bucket", model, str(bound)) for bound in (*bounds, float("inf"))]
        self._sum_key: Key = (f"{name}_sum", model)
        self._count_key: Key = (f"{name}_count", model)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def samples(self) -> dict[Key, float]:
        total = 0
        samples: dict[Key, float] = {}
        for key, count in zip(self._keys, self._counts, strict=True):
            total += count
            samples[key] = float(total)
        return {**samples, self._sum_key: self._sum, self._count_key: float(total)}


class SimulatedMetrics:
    """Counts like a frontend, and reads workers like a scrape."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lengths = _Histogram(name=PROMPT_LENGTH, model=model, bounds=LENGTH_BOUNDS)
        self._ttft = _Histogram(name=TTFT, model=model, bounds=DURATION_BOUNDS_S)
        self._itl = _Histogram(name=ITL, model=model, bounds=DURATION_BOUNDS_S)
        self._prompt_tokens = self._output_tokens = self._cached_tokens = 0.0
        self._requests = 0

    def on_arrival(self, job: Job) -> None:
        self._lengths.observe(job.trace.prompt_tokens)
        self._prompt_tokens += job.trace.prompt_tokens

    def on_first_token(self, job: Job) -> None:
        self._ttft.observe(job.first_token_s - job.arrived_s)
        self._cached_tokens += job.cached_tokens

    def on_done(self, job: Job) -> None:
        """All gaps of an answer count as their mean."""
        self._requests += 1
        self._output_tokens += job.trace.output_tokens
        gaps = job.trace.output_tokens - 1
        if gaps > 0:
            self._itl.observe((job.done_s - job.first_token_s) / gaps, gaps)

    def scrape(self, fleet: ChangingFleet, queued_tokens: Mapping[str, float]) -> Mapping[str, Samples]:
        """Returns all samples, by instance. `queued_tokens`: those in the router's queue, by class of priority."""
        frontend: dict[Key, float] = {
            (REQUESTS, self._model, "200"): float(self._requests),
            (PROMPT_TOKENS, self._model): self._prompt_tokens,
            (OUTPUT_TOKENS, self._model): self._output_tokens,
            **self._lengths.samples(),
            **self._ttft.samples(),
            **self._itl.samples(),
            **{(QUEUED_TOKENS, priority): tokens for priority, tokens in queued_tokens.items()},
            # Caches are counted where requests end, since workers of a replay do not count them.
            (WORKER_CACHED_TOKENS, self._model, "prefill"): self._cached_tokens,
        }
        return {"frontend": frontend, **{engine.name: self._worker(engine, role) for role, engine in fleet.engines()}}

    def _worker(self, engine: ReplayEngine, role: Role) -> Samples:
        total = engine.shape.kv_blocks
        values = {
            RUNNING: engine.running,
            WAITING: len(engine.waiting),
            WAITING_TOKENS: engine.waiting_tokens,
            BLOCKS_USED: total - engine.pool.available,
            BLOCKS_TOTAL: total,
            WORKER_PROMPT_TOKENS: engine.computed_tokens,
            WORKER_OUTPUT_TOKENS: engine.output_tokens,
        }
        return {(name, self._model, role.value): float(value) for name, value in values.items()}
