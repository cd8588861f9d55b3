"""A simulated worker for replays. It has the real block pool, but only counts of tokens. No I/O; times are arguments.

A run of steps in which the same requests decode is one event, so the cost of a simulation grows with its requests, not with its tokens. A
new request ends the run after the current step.

Order within a step, as in the simulated engine: decoding requests (one token each), then started prompts, then waiting ones in order of
arrival, within one token budget. A request allocates the blocks of its prompt and answer on admission. Computed blocks are available to
later requests immediately, even in the same step.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.core import KvEvent
from kvmesh.core.whatif import RecordedRequest
from kvmesh.engines.simulated.blocks import BlockPool
from services.planner.sizing.speed import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Speed and size of each worker. A run of equal decode steps is one event, at most `run_s` long; 0: every step is an event."""

    block_tokens: int = 512
    kv_blocks: int = 1500
    run_s: float = 0.0
    speed: Speed = field(default_factory=Speed)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One running request. `names` are the hashes of its full blocks."""

    ask_id: int
    trace: RecordedRequest
    names: tuple[int, ...]
    arrived_s: float
    placed_s: float = 0.0
    prefill: "ReplayEngine | None" = None
    decode: "ReplayEngine | None" = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    named: int = 0
    cached_tokens: int = 0
    transferred: bool = False
    first_token_s: float = -1.0
    done_s: float = -1.0


class ReplayEngine:
    """One worker. It calls `on_prompt` and `on_done` at the end of a step."""

    def __init__(
        self,
        name: str,
        shape: EngineShape,
        *,
        on_prompt: Callable[[Job, float], None],
        on_done: Callable[[Job, float], None],
    ) -> None:
        self.name = name
        self.shape = shape
        self.pool = BlockPool(shape.kv_blocks)
        self.waiting: deque[Job] = deque()
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.requests = 0
        self.steps = 0
        self.output_tokens = 0
        self.last_step_s = 0.0
        self.is_stepping = False
        self._on_prompt = on_prompt
        self._on_done = on_done
        self._prefilling: list[Job] = []
        # A heap of (number of the step that generates the last token, ask id, job).
        self._decoding: list[tuple[int, int, Job]] = []
        self._computed_in_step: list[Job] = []
        self._decoding_in_step = 0
        self._context_tokens = 0
        self._run_steps = 1
        self._run_began_s = 0.0

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting_tokens(self) -> int:
        """Returns the prompt tokens accepted and not computed yet."""
        begun = sum(job.trace.prompt_tokens - job.computed for job in self._prefilling)
        return begun + sum(job.trace.prompt_tokens for job in self.waiting if not job.transferred)

    @property
    def has_work(self) -> bool:
        """Returns whether a step would do something."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def submit(self, job: Job) -> None:
        """Adds a request."""
        self.requests += 1
        self.waiting.append(job)

    def begin_step(self, now_s: float = 0.0) -> float:
        """Starts a step, or a run of equal ones, and returns its length in seconds."""
        self._decoding_in_step = len(self._decoding)
        budget = self.shape.speed.step_tokens_max - self._decoding_in_step
        spent = 0
        while True:
            for job in self._prefilling:
                take = min(budget - spent, job.trace.prompt_tokens - job.computed)
                job.computed += take
                spent += take
                self._name_computed(job)
            ready = [job for job in self._prefilling if job.computed >= job.trace.prompt_tokens]
            if ready:
                self._computed_in_step += ready
                self._prefilling = [job for job in self._prefilling if job.computed < job.trace.prompt_tokens]
            if spent >= budget or not self._admit():
                break
        self.computed_tokens += spent
        self.steps += 1
        self.last_step_s = self.shape.speed.step_s(
            prefill_tokens=spent, decode_requests=self._decoding_in_step, kv_tokens=self._context_tokens
        )
        self._run_began_s = now_s
        self._run_steps = 1
        if self._decoding and not spent and not self._computed_in_step:
            # `steps` includes the first step of this run already.
            until_first_end = self._decoding[0][0] - self.steps + 1
            self._run_steps = max(1, min(until_first_end, int(self.shape.run_s / self.last_step_s)))
        return self.last_step_s * self._run_steps

    def cut_run(self, now_s: float) -> float | None:
        """Ends a run with the current step. Returns that step's end, or None if it is the run's last step anyway."""
        if self._run_steps == 1:
            return None
        steps = max(1, math.ceil((now_s - self._run_began_s) / self.last_step_s))
        if steps >= self._run_steps:
            return None
        self._run_steps = steps
        return self._run_began_s + steps * self.last_step_s

    def end_step(self, now_s: float) -> list[KvEvent]:
        """Ends the step and returns the changes of the cache."""
        self.steps += self._run_steps - 1
        self.busy_s += self._run_steps * self.last_step_s
        self.output_tokens += self._run_steps * self._decoding_in_step
        self._context_tokens += self._run_steps * self._decoding_in_step
        self._run_steps = 1
        ended = []
        while self._decoding and self._decoding[0][0] <= self.steps:
            job = heapq.heappop(self._decoding)[2]
            self._context_tokens -= job.trace.prompt_tokens + job.trace.output_tokens
            ended.append(job)
        done, self._computed_in_step = self._computed_in_step, []
        for job in done:
            # The prompt's last step gives the first token; each further step gives one.
            self._on_prompt(job, now_s)
        for job in ended:
            self._finish(job, now_s)
        return self.pool.take_events()

    def decode(self, job: Job, now_s: float) -> None:
        """Adds a request that has its first token, to continue decoding."""
        if job.trace.output_tokens <= 1:
            self._finish(job, now_s)
            return
        self._context_tokens += job.trace.prompt_tokens + 1
        heapq.heappush(self._decoding, (self.steps + job.trace.output_tokens - 1, job.ask_id, job))

    def release(self, blocks: list[int]) -> None:
        """Releases blocks that another worker has fetched."""
        self.pool.drop(blocks)

    def _finish(self, job: Job, now_s: float) -> None:
        self.pool.drop(job.blocks)
        job.blocks = []
        job.done_s = now_s
        self._on_done(job, now_s)

    def _name_computed(self, job: Job) -> None:
        """Makes full blocks of a prompt available to requests admitted later, even in the same step, as vLLM does."""
        first, full = job.named, min(job.computed // self.shape.block_tokens, len(job.names))
        if full > first:
            self.pool.name(job.blocks, first, job.names[first:full], parent=job.names[first - 1] if first else None)
            job.named = full

    def _admit(self) -> bool:
        if not self.waiting or self.running + len(self._computed_in_step) >= self.shape.speed.running_max:
            return False
        job = self.waiting[0]
        size = self.shape.block_tokens
        # The last token of a prompt is always computed, so a block that ends with it is not taken from the cache.
        cached = self.pool.match(job.names[: (job.trace.prompt_tokens - 1) // size])
        tokens = job.trace.prompt_tokens + (job.trace.output_tokens if job.decode is self else 0)
        missing = -(-tokens // size) - len(cached)
        # Cached blocks that no request holds count as available, but this request is about to hold them.
        if missing > self.pool.available - self.pool.idle_among(cached):
            return False
        self.waiting.popleft()
        self.pool.hold(cached)
        job.blocks = cached + self.pool.allocate(missing)
        if job.transferred:
            job.computed = job.trace.prompt_tokens
        else:
            job.computed = len(cached) * size
            job.cached_tokens = job.computed
            job.named = len(cached)
        self._prefilling.append(job)
        return True
