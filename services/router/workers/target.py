"""What a leg is placed on: one data-parallel rank of a worker, with the work on it and how fast it is. Pure.

The queue in seconds is kept as the time at which the promised work should be done (`until_s`), so it shrinks as time passes
without anybody touching it. It is never more than what is promised or told and not yet known to be done, and never less than a
part of it: work that should be over and is not is still there. A change without a time counts as made at the last known one.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.core import LoadRecord, WorkerRef
from services.router.workers.board import (
    BASE,
    CHUNK,
    FLOOR,
    GROWTH,
    PER_PAIR,
    PER_TOKEN,
    RUNNING,
    SHARE,
    UNTIL,
    WAIT,
    Board,
)
from services.router.workers.coefficients import Coefficients
from services.router.workers.cost_settings import CostSettings

if TYPE_CHECKING:
    from services.router.workers.fleet import Worker

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """When a target takes no more. A prefill worker without work takes any prompt, however long."""

    requests_per_decode_max: int = 1024
    prompt_tokens_per_prefill_max: int = 262_144
    kv_used_ratio_max: float = 0.95


@dataclass(slots=True, eq=False, kw_only=True)
class Target:
    """Outlives the worker in reservations; its column of the board does not."""

    worker: "Worker"
    rank: int
    ref: WorkerRef
    block_size_tokens: int
    bits: list[int]
    """The worker's holders in the device index by rank; the feed changes them in place."""
    board: Board
    cost: CostSettings
    limits: TargetLimits
    coefficients: Coefficients
    load: LoadRecord | None = None
    """What the worker said last; what decisions read of it is below."""
    told_prompt_tokens: int = 0
    told_requests: int = 0
    told_kv_blocks: int = 0
    slots: int = 0
    """Requests that run at once; 0: not known."""
    is_short_of_blocks: bool = False
    requests_in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    kv_blocks_in_flight: int = 0
    prefill_s_in_flight: float = 0.0
    until_s: float = 0.0
    told_s: float = 0.0
    seen_s: float = 0.0
    placed_last: int = 0
    adapters: dict[str, None] = field(default_factory=dict)
    """Those of the newest requests, the newest last."""
    column: int = -1
    """Where it stands on the board; -1: nowhere, it takes no more requests."""

    def __post_init__(self) -> None:
        self.column = self.board.join()
        self.refresh()

    @property
    def prompt_tokens_queued(self) -> int:
        """Prompt tokens ahead of a newcomer. What the worker says contains what this router placed, unless that is newer."""
        told, placed = self.told_prompt_tokens, self.prompt_tokens_in_flight
        return told if told > placed else placed

    @property
    def requests_active(self) -> int:
        """Requests running, waiting or on their way."""
        told, placed = self.told_requests, self.requests_in_flight
        return told if told > placed else placed

    @property
    def kv_blocks_active(self) -> int:
        """Blocks that requests hold, or will hold."""
        told, placed = self.told_kv_blocks, self.kv_blocks_in_flight
        return told if told > placed else placed

    @property
    def kv_tokens_active(self) -> int:
        """Tokens whose KV blocks requests hold, or will hold."""
        return self.kv_blocks_active * self.block_size_tokens

    @property
    def takes_prompts(self) -> bool:
        """Whether it has room for another prompt to compute."""
        most = self.limits.prompt_tokens_per_prefill_max
        return not self.prompt_tokens_in_flight or self.prompt_tokens_queued < most

    @property
    def takes_requests(self) -> bool:
        """Whether it has room for another request to decode.

        Whether KV blocks run out is for the worker to say: promises count a prefix that requests share once for each.
        """
        if not self.requests_in_flight:
            return True
        return not self.is_short_of_blocks and self.requests_in_flight < self.limits.requests_per_decode_max

    def queue_s(self, now: float) -> float:
        """Seconds of prefill work ahead of a newcomer."""
        promised_s, least_s = self.until_s - now, self.cost.overdue_ratio * self.prefill_s_in_flight
        return promised_s if promised_s > least_s else least_s

    def wait_s(self) -> float:
        """Seconds until a decode slot is free: as many requests as run end in the time that one takes."""
        slots = self.slots
        if not slots:
            return 0.0
        active = self.requests_active
        if active < slots:
            return 0.0
        request_s = self.cost.output_tokens * self.coefficients.step_s(slots, self.kv_tokens_active)
        return request_s * (active - slots + 1) / slots

    def promise(self, tokens: int, prefill_s: float, now: float | None) -> None:
        """A prompt to compute is on its way."""
        self.seen_s = now = self.seen_s if now is None or now < self.seen_s else now
        self.until_s = now + self.queue_s(now) + prefill_s
        self.prompt_tokens_in_flight += tokens
        self.prefill_s_in_flight += prefill_s
        self.refresh_queue()

    def computed(self, tokens: int, prefill_s: float, now: float | None) -> None:
        """A promised prompt is computed, and what is left begins now; `now` None: it is not known when, or it was given up."""
        self.prompt_tokens_in_flight -= tokens
        left_s = self.prefill_s_in_flight - prefill_s
        # Sums of floats do not come back to zero by themselves.
        self.prefill_s_in_flight = left_s if left_s > 0 and self.prompt_tokens_in_flight else 0.0
        left_s = self.prefill_s_in_flight + self.told_s
        if now is not None and now >= self.seen_s:
            self.seen_s = now
            # With nothing left there is no moment to wait for, whatever the clock of who asks next.
            self.until_s = now + left_s if left_s else 0.0
        else:
            self.until_s = min(self.until_s, self.seen_s + left_s)
        self.refresh_queue()

    def told(self, record: LoadRecord, now: float | None) -> None:
        """The worker says how it does."""
        if self.cost.learning and self.load is not None:
            self._learn(self.load, record)
        self.load = record
        self.told_prompt_tokens = record.waiting_prompt_tokens
        self.told_requests = record.running_requests + record.waiting_requests
        self.told_kv_blocks = record.kv_blocks_used
        self.slots = record.running_requests_max
        self.is_short_of_blocks = record.kv_blocks_used >= self.limits.kv_used_ratio_max * record.kv_blocks_total > 0
        self.told_s = self._foreign_s(record)
        self.seen_s = now = self.seen_s if now is None or now < self.seen_s else now
        self.until_s = now + self.told_s + max(0.0, min(self.until_s - now, self.prefill_s_in_flight))
        self.refresh()

    def ran(self, adapter: str) -> None:
        """A request with an adapter was placed here."""
        self.adapters.pop(adapter, None)
        self.adapters[adapter] = None
        if len(self.adapters) > self.cost.adapters_warm:
            del self.adapters[next(iter(self.adapters))]

    def leave(self) -> None:
        """It is replaced or its worker is gone: reservations on it may still settle."""
        if self.column >= 0:
            self.board.leave(self.column)
            self.column = -1

    def refresh(self) -> None:
        """Writes its column, after its pace or its load has changed."""
        self.refresh_prefill()
        self.refresh_batch()

    def refresh_prefill(self) -> None:
        """The same after a change of its pace with prompts."""
        if self.column < 0:
            return
        cells, columns = self.board.cells, self.board.columns
        base_s, per_token_s, per_pair_s = self.coefficients.prefill.values
        cells[PER_TOKEN * columns + self.column] = per_token_s
        cells[PER_PAIR * columns + self.column] = per_pair_s
        cells[BASE * columns + self.column] = base_s
        self.board.has_pairs = self.board.has_pairs or per_pair_s > 0
        self.refresh_queue()

    def refresh_queue(self) -> None:
        """Writes what prompts wait for, after a change of those promised."""
        column = self.column
        if column < 0:
            return
        board, base_s = self.board, self.coefficients.prefill.values[0]
        cells, columns = board.cells, board.columns
        cells[UNTIL * columns + column] = self.until_s + base_s
        cells[FLOOR * columns + column] = (
            self.cost.overdue_ratio * self.prefill_s_in_flight + base_s if self.takes_prompts else INFINITE
        )

    def refresh_batch(self) -> None:
        """Writes what decoding costs, after a change of the requests on it."""
        column = self.column
        if column < 0:
            return
        board, coefficients = self.board, self.coefficients
        cells, columns = board.cells, board.columns
        base_s, per_request_s, per_kv_token_s = coefficients.decode.values
        requests, kv_s = self.requests_active, per_kv_token_s * self.kv_tokens_active
        request_s = per_request_s * requests
        cells[WAIT * columns + column] = self.wait_s() if self.takes_requests else INFINITE
        cells[GROWTH * columns + column] = 2 * request_s + kv_s
        cells[SHARE * columns + column] = per_kv_token_s * requests
        cells[RUNNING * columns + column] = requests
        cells[CHUNK * columns + column] = (
            coefficients.itl_target_s - base_s - request_s - kv_s if requests else INFINITE
        )

    def _foreign_s(self, record: LoadRecord) -> float:
        """Prefill work that waits there and that this router did not place. Of its own it knows better what is uncached."""
        foreign = record.waiting_requests - self.requests_in_flight
        if foreign <= 0:
            return 0.0
        base_s, per_token_s, _ = self.coefficients.prefill.values
        return foreign * (base_s + per_token_s * record.waiting_prompt_tokens / record.waiting_requests)

    def _learn(self, before: LoadRecord, record: LoadRecord) -> None:
        """Step times from two records in a row: pure decode steps, and stretches in which prompts never ran out."""
        tokens = record.prompt_tokens_total - before.prompt_tokens_total
        if record.sequence <= before.sequence or record.epoch != before.epoch:
            return
        if not tokens and record.step > before.step and record.running_requests and not record.waiting_requests:
            held = record.kv_blocks_used * self.block_size_tokens
            self.coefficients.decode.learn(record.step_s, 1, record.running_requests, held)
        elif tokens > 0 and before.waiting_prompt_tokens and record.waiting_prompt_tokens:
            steps = record.step - before.step
            self.coefficients.prefill.learn(record.taken_at_s - before.taken_at_s, steps, tokens, 0)
