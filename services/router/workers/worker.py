"""A worker, and its targets: the data-parallel ranks on which requests are placed. Pure; times are arguments.

A target keeps its prefill queue as the time at which the promised prompts should be computed (`done_s`), so the queue shrinks as time
passes without an update. The queue is at most the prefill time of the prompts that are promised or reported and not known to be
computed, and at least a part of it: a prompt that should be computed by now, and is not, still occupies the worker. An update without
a time counts as made at the time of the previous update.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.core import Handoff, LoadRecord, Role, WorkerDescription, WorkerRef
from services.router.core_settings import CoreSettings
from services.router.index.kv_feed import KvFeed
from services.router.workers.coefficients import Coefficients
from services.router.workers.target_arrays import TargetArrays

INFINITE = float("inf")
CONNECTING = "unreachable"
"""Why a worker gets no requests before its streams are open, and after one of them breaks."""
OUTPUT_TOKENS = 256
"""Expected output tokens of a request that does not say how many it wants: about a chat answer."""
PREALLOCATING_REQUESTS_MAX = 2
"""Requests that may wait for KV blocks on a decode worker with rendezvous handoff; with more it gets no requests.

One or two wait for a moment in normal operation. More show that the worker has no blocks left, whatever its running batch says.
"""


@dataclass(slots=True, eq=False, kw_only=True)
class RegisteredWorker:
    """A registered worker.

    `stream_fault` is empty exactly while its streams are open. `health_fault` is written by `HealthMonitor` only.
    """

    worker_id: str
    address: str
    role: Role
    labels: Mapping[str, str] = field(default_factory=dict)
    is_critical: bool = False
    is_marked_draining: bool = False
    """By the registry."""
    is_draining_itself: bool = False
    """By its description or load record."""
    stream_fault: str = CONNECTING
    health_fault: str = ""
    description: WorkerDescription | None = None
    block_size_tokens: int = 1
    targets: list["Target"] = field(default_factory=list)
    feed: KvFeed | None = None

    @property
    def excluded_by(self) -> str:
        """Why the worker gets no requests; empty when it gets some."""
        if self.is_marked_draining or self.is_draining_itself:
            return "draining"
        if self.is_critical:
            return "critical"
        return self.stream_fault or self.health_fault

    @property
    def exchange_key(self) -> tuple[str, Handoff] | None:
        """Two workers can exchange KV exactly when their keys are equal. None: this one cannot exchange KV."""
        description = self.description
        if description is None or not description.kv_compatibility_hash or not description.capabilities.handoffs:
            return None
        handoff = description.capabilities.handoffs[0]
        if handoff is Handoff.RENDEZVOUS and self.role is Role.PREFILL and not description.rendezvous_address:
            return None
        return description.kv_compatibility_hash, handoff

    @property
    def requires_prefill(self) -> bool:
        """True: it gets requests only together with a prefill worker."""
        return self.description is not None and self.description.requires_prefill

    @property
    def model_name(self) -> str:
        return self.description.model.name if self.description is not None else ""


@dataclass(slots=True, eq=False, kw_only=True)
class Target:
    """One data-parallel rank of a worker. Reservations may outlive it; its column in `arrays` does not."""

    worker: RegisteredWorker
    rank: int
    ref: WorkerRef
    block_size_tokens: int
    bits: list[int]
    """The index holders of the worker's ranks. The feed changes the list in place."""
    arrays: TargetArrays
    settings: CoreSettings
    coefficients: Coefficients
    load: LoadRecord | None = None
    """The newest load record. The fields below repeat what decisions read of it."""
    reported_prompt_tokens: int = 0
    reported_requests: int = 0
    reported_kv_blocks: int = 0
    reported_blocked: int = 0
    """Requests that wait there for KV blocks (rendezvous handoff)."""
    decode_slots: int = 0
    """Requests that the worker can run concurrently; 0: not known."""
    is_short_of_blocks: bool = False
    requests_in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    kv_blocks_in_flight: int = 0
    prefill_s_in_flight: float = 0.0
    done_s: float = 0.0
    foreign_prefill_s: float = 0.0
    """Prefill time of requests that wait at the worker and that this router did not place."""
    updated_s: float = 0.0
    placed_last: int = 0
    """The number of its newest placement."""
    adapters: dict[str, None] = field(default_factory=dict)
    """The adapters of its newest requests, the newest last."""
    column: int = -1
    """Its column in `arrays`; -1: it has left and takes no more requests."""

    def __post_init__(self) -> None:
        self.column = self.arrays.add_column()
        self.write_all()

    @property
    def prompt_tokens_queued(self) -> int:
        """Prompt tokens ahead of a new request. A load record contains what this router placed, unless that is newer."""
        reported, placed = self.reported_prompt_tokens, self.prompt_tokens_in_flight
        return reported if reported > placed else placed

    @property
    def requests_active(self) -> int:
        """Requests that run, wait or are on their way."""
        reported, placed = self.reported_requests, self.requests_in_flight
        return reported if reported > placed else placed

    @property
    def kv_blocks_active(self) -> int:
        """KV blocks that these requests hold or will hold."""
        reported, placed = self.reported_kv_blocks, self.kv_blocks_in_flight
        return reported if reported > placed else placed

    @property
    def kv_tokens_active(self) -> int:
        return self.kv_blocks_active * self.block_size_tokens

    @property
    def takes_prompts(self) -> bool:
        tokens_max = self.settings.prompt_tokens_per_prefill_max
        # A worker without prompts takes one of any length, also one beyond the limit.
        return not self.prompt_tokens_in_flight or self.prompt_tokens_queued < tokens_max

    @property
    def takes_requests(self) -> bool:
        """Whether there is room to decode another request.

        Only the worker's own report counts for KV blocks: the router counts a prefix that requests share once for each of them.
        """
        if self.reported_blocked > PREALLOCATING_REQUESTS_MAX:
            return False
        if not self.requests_in_flight:
            return True
        return not self.is_short_of_blocks and self.requests_in_flight < self.settings.requests_per_decode_max

    @property
    def queue_s_min(self) -> float:
        """The shortest that the queue is taken to be: promised prompts that are overdue are not computed yet."""
        return self.settings.cost.overdue_ratio * self.prefill_s_in_flight

    def queue_s(self, now: float) -> float:
        """Returns the seconds of prefill work ahead of a new request."""
        return max(self.done_s - now, self.queue_s_min)

    def wait_s(self) -> float:
        """Returns the seconds until a decode slot is free: running requests end at an even rate.

        While requests wait for KV blocks, only those with blocks count as slots.
        """
        slots, active = self.decode_slots, self.requests_active
        if self.reported_blocked:
            slots = min(slots, max(1, self.reported_requests - self.reported_blocked))
        if not slots or active < slots:
            return 0.0
        request_s = OUTPUT_TOKENS * self.coefficients.step_s(slots, self.kv_tokens_active)
        return request_s * (active - slots + 1) / slots

    def add_prompt(self, tokens: int, *, prefill_s: float, now: float | None) -> None:
        now = self._advance(now)
        self.done_s = now + self.queue_s(now) + prefill_s
        self.prompt_tokens_in_flight += tokens
        self.prefill_s_in_flight += prefill_s
        self.write_queue()

    def remove_prompt(self, tokens: int, *, prefill_s: float, now: float | None) -> None:
        """A prompt is computed at `now`, and the worker begins the next one. None: the time is not known, or it was given up."""
        self.prompt_tokens_in_flight -= tokens
        left_s = self.prefill_s_in_flight - prefill_s
        # Rounding errors of the sum must not outlive the last prompt.
        self.prefill_s_in_flight = left_s if left_s > 0 and self.prompt_tokens_in_flight else 0.0
        left_s = self.prefill_s_in_flight + self.foreign_prefill_s
        if now is not None and now >= self.updated_s:
            self.updated_s = now
            # Without work the queue is empty for callers of any time, also of an earlier one.
            self.done_s = now + left_s if left_s else 0.0
        else:
            # It is not known when the prompt ended, only that no more than the rest is left.
            self.done_s = min(self.done_s, self.updated_s + left_s)
        self.write_queue()

    def on_load_record(self, record: LoadRecord, now: float | None) -> None:
        if self.settings.cost.learning and self.load is not None:
            self._learn(self.load, record)
        self.load = record
        self.reported_prompt_tokens = record.waiting_prompt_tokens
        self.reported_blocked = record.preallocating_requests + record.retracted_requests
        self.reported_requests = (
            record.running_requests + record.waiting_requests + record.receiving_requests + self.reported_blocked
        )
        self.reported_kv_blocks = record.kv_blocks_used
        self.decode_slots = record.running_requests_max
        # The last comparison: a worker that reports no number of blocks is never short of them.
        self.is_short_of_blocks = record.kv_blocks_used >= self.settings.kv_used_ratio_max * record.kv_blocks_total > 0
        self.foreign_prefill_s = self._foreign_prefill_s(record)
        now = self._advance(now)
        # The earlier `done_s` may contain foreign work of the record before. This router's own part is at most what it promised.
        self.done_s = now + self.foreign_prefill_s + max(0.0, min(self.done_s - now, self.prefill_s_in_flight))
        self.write_all()

    def use_adapter(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)
        self.adapters[adapter] = None
        if len(self.adapters) > self.settings.cost.adapters_warm:
            del self.adapters[next(iter(self.adapters))]

    def leave(self) -> None:
        """The target is replaced, or its worker is gone. Reservations on it may still settle."""
        if self.column >= 0:
            self.arrays.free_column(self.column)
            self.column = -1

    def write_all(self) -> None:
        """Writes all its numbers into `arrays`."""
        self.write_prefill_coefficients()
        self.write_batch()

    def write_prefill_coefficients(self) -> None:
        if (column := self.column) < 0:
            return
        numbers = self.arrays.prefill
        base_s, per_token_s, per_pair_s = self.coefficients.prefill.values
        numbers.base_s[column], numbers.s_per_token[column] = base_s, per_token_s
        numbers.s_per_token_pair_half[column] = per_pair_s / 2
        self.arrays.has_pair_costs = self.arrays.has_pair_costs or per_pair_s > 0
        self.write_queue()

    def write_queue(self) -> None:
        if (column := self.column) < 0:
            return
        numbers = self.arrays.prefill
        numbers.done_s[column] = self.done_s
        numbers.queue_s_min[column] = self.queue_s_min if self.takes_prompts else INFINITE

    def write_batch(self) -> None:
        """Writes what the cost of decoding depends on."""
        if (column := self.column) < 0:
            return
        numbers = self.arrays.decode
        base_s, per_request_s, per_kv_token_s = self.coefficients.decode.values
        requests, kv_s = self.requests_active, per_kv_token_s * self.kv_tokens_active
        step_s = base_s + per_request_s * requests + kv_s
        numbers.wait_s[column] = self.wait_s() if self.takes_requests else INFINITE
        # The batch delays the new request by r * R + k * K a step, and the new request delays each of R by r.
        numbers.delay_s[column] = 2 * per_request_s * requests + kv_s
        numbers.delay_s_per_token[column] = per_kv_token_s * requests
        numbers.requests[column] = requests
        numbers.step_room_s[column] = self.coefficients.itl_target_s - step_s if requests else INFINITE

    def _advance(self, now: float | None) -> float:
        """Returns the time of an update; time does not go back."""
        if now is not None and now > self.updated_s:
            self.updated_s = now
        return self.updated_s

    def _foreign_prefill_s(self, record: LoadRecord) -> float:
        """Prefill time of requests that wait there and that this router did not place. Of its own it knows what is cached."""
        # A lower bound, because some of this router's requests run already.
        foreign = record.waiting_requests - self.requests_in_flight
        if foreign <= 0:
            return 0.0
        base_s, per_token_s, _ = self.coefficients.prefill.values
        return foreign * (base_s + per_token_s * record.waiting_prompt_tokens / record.waiting_requests)

    def _learn(self, before: LoadRecord, record: LoadRecord) -> None:
        """Learns step times from two consecutive records: of pure decode steps, and of times in which prompts never ran out."""
        tokens = record.prompt_tokens_total - before.prompt_tokens_total
        if record.sequence <= before.sequence or record.epoch != before.epoch:
            return
        if not tokens and record.step > before.step and record.running_requests and not record.waiting_requests:
            kv_tokens = record.kv_blocks_used * self.block_size_tokens
            self.coefficients.decode.learn(record.step_s, 1, record.running_requests, kv_tokens)
        elif tokens > 0 and before.waiting_prompt_tokens and record.waiting_prompt_tokens:
            steps = record.step - before.step
            self.coefficients.prefill.learn(record.taken_at_s - before.taken_at_s, steps, tokens, 0)
