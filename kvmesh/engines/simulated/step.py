"""The result of a scheduler step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kvmesh.core import TokenLogprob
from kvmesh.engines.base import EngineFinish, StepOutput
from kvmesh.engines.simulated.handles import HandlePayload
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.memory import Run, are_neighbours, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """A pull from a peer into `blocks[first:]`. `Scheduler.pull_ended` reports its end.

    `blocks` is the leg's own list until `Scheduler.pull_overdue`; then the order alone owns the blocks.
    """

    leg: SimulatedLeg
    blocks: list[int]
    payload: HandlePayload
    handle_id: str
    first: int

    def runs(self) -> list[Run]:
        """Returns the pull as runs: (the peer's first block, count, the leg's first block)."""
        first, theirs = self.first, self.payload.runs
        mine = self.blocks[first : len(self.payload)]
        # The usual case, without numpy.
        if len(theirs) == 1 and are_neighbours(mine):
            return [(theirs[0][0] + first, len(mine), mine[0])]
        return runs_of(self.payload.blocks[first:], np.array(mine, np.int64))


@dataclass(slots=True, kw_only=True)
class Step:
    """One step."""

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] | None = None
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finishes: list[EngineFinish] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    prefill_tokens: int = 0
    prompts: int = 0
    """Prompts of which tokens are computed."""
    token_pairs: float = 0.0
    """Pairs of a computed prompt token and a token before it."""
    decode_requests: int = 0
    can_go_on: bool = False
    """The next step has something to do, even if this one did nothing."""

    @property
    def has_output(self) -> bool:
        """True when the step produced tokens, finishes or scores of a prompt."""
        return bool(self.keys or self.finishes or self.prompt_logprobs)

    @property
    def has_progress(self) -> bool:
        """False: further steps do nothing until a leg arrives or a pull ends."""
        return bool(self.keys or self.finishes or self.prefill_tokens or self.pulls or self.can_go_on)

    def add_rounds(self, rounds: Sequence[tuple[list[int], list[int]]]) -> None:
        """Adds several tokens per key. Each round holds keys and one token for each of them."""
        keys = rounds[0][0]
        if rounds[-1][0] == keys:
            # Rounds only lose keys, so all rounds have the same keys.
            self.keys, self.counts = keys, [len(rounds)] * len(keys)
            self.token_ids = list(chain.from_iterable(zip(*(ids for _, ids in rounds), strict=True)))
        else:
            by_key: dict[int, list[int]] = {}
            for keys, token_ids in rounds:
                for key, token_id in zip(keys, token_ids, strict=True):
                    by_key.setdefault(key, []).append(token_id)
            self.keys, self.counts = list(by_key), [len(tokens) for tokens in by_key.values()]
            self.token_ids = list(chain.from_iterable(by_key.values()))

    def add_token(self, key: int, token_id: int) -> None:
        self.keys.append(key)
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.append(1)

    def output(self, number: int) -> StepOutput:
        return StepOutput(
            step=number,
            keys=self.keys,
            token_ids=self.token_ids,
            counts=self.counts,
            logprobs=self.logprobs,
            finishes=self.finishes,
            prompt_logprobs=self.prompt_logprobs,
        )
