"""A replay: a trace's requests through one router core and many simulated workers, as a discrete-event simulation.

The router receives events as late as in a mesh: KV events `event_delay_s` after their step, load records at most every `load_interval_s`,
reports of frontends immediately.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from time import process_time

from kvmesh.core.whatif import RecordedRequest
from services.whatif.engine import EngineShape, Job, ReplayEngine
from services.whatif.placers import QueuedByRouter, SimulatedPlacer, Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """Numbers of workers and routers, and delays of events. Without prefill workers, decode workers compute prompts."""

    prefills: int
    decodes: int
    engine: EngineShape = field(default_factory=EngineShape)
    event_delay_s: float = 0.005
    load_interval_s: float = 0.1
    retry_s: float = 0.05
    routers: int = 1
    sync_interval_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Results. Fairness is Jain's index of the workers' busy seconds, for the pool that computes prompts and the decode pool."""

    requests: int
    hit_rate: float
    ttft_s: Sequence[float]
    fairness: float
    decode_fairness: float
    utilisation: float
    span_s: float
    placing_cpu_s: float
    busy_s: Sequence[float]


def jain(values: Sequence[float]) -> float:
    """Returns Jain's fairness index: 1 if all are equal, 1/n if one has everything (Jain, Chiu, Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


class Replay:
    """One simulation."""

    def __init__(self, shape: ReplayShape, placer: Callable[["Replay"], SimulatedPlacer], seed: int = 1) -> None:
        self.shape = shape
        self.now_s = 0.0
        self.random = Random(seed)
        self.prefills = [self._engine(f"prefill-{i}") for i in range(shape.prefills)]
        self.decodes = [self._engine(f"decode-{i}") for i in range(shape.decodes)]
        self.jobs: list[Job] = []
        self._assigned: dict[str, int] = {}
        self.on_idle: Callable[[ReplayEngine], None] = lambda engine: None
        """Called when a worker has no request any more, neither running nor on its way."""
        self._runs: dict[str, int] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._unfinished = 0
        self._told_s: dict[str, float] = {}
        self._placing_cpu_s = 0.0
        # Last, because a placer reads the workers of the replay.
        self._placer = placer(self)

    def run(self, trace: Sequence[RecordedRequest], *, speed: float) -> ReplayResult:
        """Replays all requests, `speed` times as fast as recorded."""
        self.play(trace, speed=speed)
        return self._result()

    def play(self, trace: Sequence[RecordedRequest], *, speed: float = 1.0) -> None:
        """Replays all requests until the last one ends. Calls that are scheduled for later are not made."""
        self._unfinished = len(trace)
        for request in trace:
            self.at(request.at_s / speed, lambda request=request: self._arrive(request))  # type: ignore[misc]
        while self._agenda and self._unfinished:
            self.now_s, _, happen = heapq.heappop(self._agenda)
            happen()

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Schedules a call. Simultaneous calls run in the order of scheduling."""
        heapq.heappush(self._agenda, (time_s, next(self._order), happen))

    def place(self, job: Job) -> None:
        """Requests a placement. If it is rejected for lack of capacity, retries after `retry_s`."""
        began = process_time()
        try:
            spot = self._placer.place(job)
        except QueuedByRouter:
            return
        finally:
            self._placing_cpu_s += process_time() - began
        if spot is None:
            self.place_later(job)
        else:
            self.go(job, spot)

    def place_later(self, job: Job) -> None:
        """Schedules a retry, as a client would."""
        self.at(self.now_s + self.shape.retry_s, lambda: self.place(job))

    def go(self, job: Job, spot: Spot) -> None:
        """Starts a placed request."""
        job.placed_s = self.now_s
        job.prefill, job.decode = spot.prefill, spot.decode
        for engine in (spot.prefill, spot.decode):
            if engine is not None:
                self._assigned[engine.name] = self.assigned(engine) + 1
        self._submit(spot.prefill or spot.decode, job)

    def add(self, name: str) -> ReplayEngine:
        """Returns a new worker, which the placer does not know yet."""
        return self._engine(name)

    def assigned(self, engine: ReplayEngine) -> int:
        """Returns the number of requests that a worker has or will get."""
        return self._assigned.get(engine.name, 0)

    def _release(self, engine: ReplayEngine) -> None:
        self._assigned[engine.name] -= 1
        if not self._assigned[engine.name]:
            self.on_idle(engine)

    def _engine(self, name: str) -> ReplayEngine:
        return ReplayEngine(name, self.shape.engine, on_prompt=self._on_prompt, on_done=self._on_done)

    def _arrive(self, request: RecordedRequest) -> None:
        size = self.shape.engine.block_tokens
        names = tuple(_name(block) for block in request.block_ids[: request.prompt_tokens // size])
        job = Job(ask_id=len(self.jobs) + 1, trace=request, names=names, arrived_s=self.now_s)
        self.jobs.append(job)
        self.place(job)

    def _submit(self, engine: ReplayEngine, job: Job) -> None:
        engine.submit(job)
        if engine.is_stepping and (ends_s := engine.cut_run(self.now_s)) is not None:
            self._end_at(engine, ends_s)
        self._wake(engine)

    def _wake(self, engine: ReplayEngine) -> None:
        if not engine.is_stepping and engine.has_work:
            engine.is_stepping = True
            # Simultaneous requests share a step.
            self.at(self.now_s, lambda: self._step(engine))

    def _step(self, engine: ReplayEngine) -> None:
        self._end_at(engine, self.now_s + engine.begin_step(self.now_s))

    def _end_at(self, engine: ReplayEngine, time_s: float) -> None:
        """Ends the step or run then. Replaces an earlier end of the same run."""
        # An entry of the heap cannot be removed. The end that is replaced finds another number, and does nothing.
        number = self._runs[engine.name] = self._runs.get(engine.name, 0) + 1
        self.at(time_s, lambda: self._end_step(engine) if self._runs[engine.name] == number else None)

    def _end_step(self, engine: ReplayEngine) -> None:
        events = engine.end_step(self.now_s)
        if events:
            self.at(self.now_s + self.shape.event_delay_s, lambda: self._placer.on_events(engine, events))
        if self.now_s - self._told_s.get(engine.name, -1.0) >= self.shape.load_interval_s or not engine.has_work:
            self._told_s[engine.name] = self.now_s
            self._placer.on_load(engine)
        if engine.has_work:
            self._step(engine)
        else:
            engine.is_stepping = False

    def _on_prompt(self, job: Job, now_s: float) -> None:
        """Handles a prompt that was computed or transferred."""
        decode = job.decode
        assert decode is not None
        if job.prefill is None or job.transferred:
            job.first_token_s = now_s
            self._placer.on_first_token(job)
            decode.decode(job, now_s)
            return
        self._placer.on_prefilled(job)
        held, source = job.blocks, job.prefill
        job.blocks = []
        self.at(
            now_s + self.shape.engine.speed.transfer_s(job.trace.prompt_tokens), lambda: self._moved(job, source, held)
        )

    def _moved(self, job: Job, source: ReplayEngine, held: list[int]) -> None:
        source.release(held)
        self._wake(source)
        self._release(source)
        assert job.decode is not None
        job.transferred = True
        self._submit(job.decode, job)

    def _on_done(self, job: Job, now_s: float) -> None:
        self._placer.on_done(job)
        self._unfinished -= 1
        assert job.decode is not None
        self._release(job.decode)

    def _result(self) -> ReplayResult:
        lost = [job for job in self.jobs if job.done_s < 0]
        if lost:
            raise AssertionError(f"{len(lost)} of {len(self.jobs)} requests did not end")
        computing = self.prefills or self.decodes
        prompt = sum(job.trace.prompt_tokens for job in self.jobs)
        span_s = max(job.done_s for job in self.jobs)
        arrivals_s = max(job.arrived_s for job in self.jobs)
        return ReplayResult(
            requests=len(self.jobs),
            hit_rate=sum(job.cached_tokens for job in self.jobs) / prompt,
            ttft_s=sorted(job.first_token_s - job.arrived_s for job in self.jobs),
            fairness=jain([engine.busy_s for engine in computing]),
            decode_fairness=jain([engine.busy_s for engine in self.decodes]),
            utilisation=sum(engine.busy_s for engine in computing) / len(computing) / max(arrivals_s, 1e-9),
            span_s=span_s,
            placing_cpu_s=self._placing_cpu_s,
            busy_s=[engine.busy_s for engine in computing],
        )


def _name(block: int) -> int:
    """Returns a 64-bit hash for a block id. The trace's ids are chained: equal ids mean equal prefixes."""
    # Fibonacci hashing: the factor is 2^64 divided by the golden ratio. It is odd, so different ids have different hashes.
    return (block + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
