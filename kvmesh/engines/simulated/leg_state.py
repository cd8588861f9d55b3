"""A leg inside the scheduler, and the queue of waiting legs."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush

from kvmesh.core import Usage
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.handles import HandlePayload
from kvmesh.engines.simulated.memory import Words
from kvmesh.engines.simulated.rendezvous.wire import FAKE_HOST

DEAD_ENTRIES_MAX = 64
"""Dead entries that the waiting queue keeps even when it is short."""


class Phase(Enum):
    """A preempted leg is WAITING again, or RETRACTED if it came by a rendezvous.

    Rendezvous, prefill: BOOTSTRAPPING, WAITING, PREFILL, SENDING. Decode: PREALLOCATING, RECEIVING, PULLING, PREBUILT, DECODE.
    """

    WAITING = "waiting"
    BOOTSTRAPPING = "bootstrapping"
    SENDING = "sending"
    PREALLOCATING = "preallocating"
    RECEIVING = "receiving"
    PREBUILT = "prebuilt"
    RETRACTED = "retracted"
    PULLING = "pulling"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedLeg:
    """A leg's tokens and blocks.

    `tokens` are prompt, emitted and generated tokens up to the last flush of the decode batch. `names` are the hashes of its full
    blocks, of which the first `named_blocks` are complete in memory; `named_sum` is their checksum plus `constant`.
    `parts` are the checksums of the computed blocks; None: other legs wrote the first blocks, so memory must be read.
    `script` is the whole answer of a constrained leg without eos; None: the arithmetic of `tokens.py` decides.
    `eos_at` and `tokens_max` count the leg's own tokens from 1; `eos_at` 0: none is eos.
    """

    request: EngineRequest
    order: int
    tokens: "array[int]"
    names: list[int]
    seed_hash: int
    constant: int
    tokens_max: int
    eos_at: int
    payload: HandlePayload | None = None
    payload_expires_at_s: float = 0.0
    start_tokens: int = 0
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    parts: Words | None = None
    computed: int = 0
    named_blocks: int = 0
    named_sum: int = 0
    slot: int = -1
    flushed_step: int = 0
    grow_step: int = -1
    end_step: int = -1
    stop_ids: frozenset[int] = frozenset()
    script: "array[int] | None" = None
    bias: Mapping[int, float] = field(default_factory=dict)
    has_scored_prompt: bool = False
    cached_tokens: int = 0
    transferred_tokens: int = 0
    was_admitted: bool = False
    was_recomputed: bool = False
    submitted_at_s: float = 0.0
    queue_s: float = 0.0
    saved_total: int = 0
    """Checksum of a retracted leg's tokens."""
    saved_rows: Words | None = None
    """KV of a retracted leg's named blocks."""

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def is_fake(self) -> bool:
        """True: a rendezvous without a counterpart."""
        return self.request.rendezvous is not None and self.request.rendezvous.host == FAKE_HOST

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def rank(self) -> tuple[int, int]:
        """The order of scheduling: larger priority first, then earlier arrival."""
        return -self.request.generation.priority, self.order

    @property
    def is_steered(self) -> bool:
        """True when a script or a logit bias changes its tokens."""
        return self.script is not None or bool(self.bias)

    def scripted(self, position: int) -> int:
        """Returns the script's token at a position of `tokens`; 0 after its end, where eos follows."""
        assert self.script is not None
        index = position - len(self.request.generation.token_ids)
        return self.script[index] if index < len(self.script) else 0

    def usage(self) -> Usage:
        """Usage up to the newest token in `tokens`."""
        return Usage(
            prompt_tokens=len(self.request.generation.token_ids),
            output_tokens=len(self.tokens) - self.start_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
        )


class WaitingQueue:
    """Legs in one phase by rank. Entries of legs that left the phase are skipped; the caller reports them with `discount`."""

    def __init__(self, phase: Phase = Phase.WAITING) -> None:
        self._phase = phase
        self._heap: list[tuple[tuple[int, int], SimulatedLeg]] = []
        self._live = 0
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return self._live

    def push(self, leg: SimulatedLeg) -> None:
        heappush(self._heap, (leg.rank, leg))
        self._live += 1
        self.prompt_tokens += len(leg.tokens)

    def peek(self) -> SimulatedLeg | None:
        """Returns the first leg."""
        while self._heap:
            leg = self._heap[0][1]
            if leg.phase is self._phase:
                return leg
            heappop(self._heap)
        return None

    def pop(self) -> None:
        """Removes the leg that `peek` returned."""
        self.discount(heappop(self._heap)[1])

    def discount(self, leg: SimulatedLeg) -> None:
        """Subtracts a leg that left the phase. Rebuilds the heap when most of its entries are dead."""
        self._live -= 1
        self.prompt_tokens -= len(leg.tokens)
        # More than half of the entries are dead, so the rebuild costs a constant for each that it removes.
        if len(self._heap) > 2 * self._live + DEAD_ENTRIES_MAX:
            self._heap = [entry for entry in self._heap if entry[1].phase is self._phase]
            heapify(self._heap)
