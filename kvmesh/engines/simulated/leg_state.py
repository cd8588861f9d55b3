"""One leg inside the scheduler."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.core import Usage
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.handles import HandlePayload
from kvmesh.engines.simulated.memory import Words


class Phase(Enum):
    """Where a leg stands. A leg that was preempted waits again."""

    WAITING = "waiting"
    PULLING = "pulling"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class LegState:
    """A leg's tokens and blocks.

    `tokens` is prompt, emitted and generated tokens up to the last flush of the decode batch; `names` are the hashes of its
    full blocks, of which the first `named_blocks` are complete in memory; `named_sum` is their checksum plus `constant`.
    `parts` are the checksums of the computed blocks, as they were read after a pull and written since; None: somebody else wrote the first
    ones, and they must be read.
    `script` is the whole answer of a constrained leg, eos aside; the arithmetic decides where it is None.
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

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts legs by who goes first: larger priority, then earlier arrival."""
        return -self.request.generation.priority, self.order

    @property
    def is_steered(self) -> bool:
        """True when the arithmetic alone does not decide its tokens."""
        return self.script is not None or bool(self.bias)

    def scripted(self, position: int) -> int:
        """The script's token at a position of `tokens`; 0 behind its end, where eos comes."""
        assert self.script is not None
        index = position - len(self.request.generation.token_ids)
        return self.script[index] if index < len(self.script) else 0

    def usage(self) -> Usage:
        """What it cost up to the newest token in `tokens`."""
        return Usage(
            prompt_tokens=len(self.request.generation.token_ids),
            output_tokens=len(self.tokens) - self.start_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
        )
