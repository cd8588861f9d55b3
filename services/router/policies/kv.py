"""Seconds to the first token, and what decoding costs the newcomer and those already there."""

from typing import ClassVar

import numpy as np

from services.router.board import BASE, CAP, FLOOR, GROWTH, PER_PAIR, PER_TOKEN, RUNNING, SHARE, UNTIL, WAIT, Floats
from services.router.policies.base import Candidates, Columns, LegKind, Policy, PolicyContext


class KvPolicy(Policy):
    """queue + prefill + transfer + wait + decode, and for a decode worker that computes the prompt itself also interference."""

    name: ClassVar[str] = "kv"
    cost_unit: ClassVar[str] = "s"
    counts_transfer: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.preference = context.cost.preference_s
        self._weight = context.cost.decode_weight
        self._output_tokens = context.cost.output_tokens

    def weigh(self, candidates: Candidates) -> Columns:
        """Prefill: queue, prefill. Decode: wait, decode. Alone: all of them and interference."""
        if candidates.kind is LegKind.PREFILL:
            return self._prefill(candidates, candidates.board.values[:WAIT].take(candidates.positions, 1))
        values = candidates.board.values
        if candidates.kind is LegKind.DECODE:
            return self._decode(candidates, values[WAIT:RUNNING].take(candidates.positions, 1))
        rows = values.take(candidates.positions, 1)
        columns = self._prefill(candidates, rows) | self._decode(candidates, rows[WAIT:RUNNING])
        columns["interference"] = self._weight * rows[RUNNING] * columns["prefill"]
        return columns

    def _prefill(self, candidates: Candidates, rows: Floats) -> dict[str, Floats]:
        queue = rows[UNTIL]
        queue -= candidates.now
        np.minimum(queue, rows[CAP], queue)
        np.maximum(queue, rows[FLOOR], queue)
        tokens, held = candidates.ask.prompt_tokens, candidates.held
        uncached = tokens if held is None else tokens - held
        rate = rows[PER_TOKEN]
        if candidates.board.has_pairs:
            rate = rate + rows[PER_PAIR] * (tokens - 0.5 * uncached)
        return {"queue": queue, "prefill": rate * uncached + rows[BASE]}

    def _decode(self, candidates: Candidates, rows: Floats) -> dict[str, Floats]:
        """Each of `output` tokens comes later by what the batch adds to a step; everybody in it waits for the newcomer's part."""
        ask = candidates.ask
        output = ask.expected_output_tokens or self._output_tokens
        delayed = self._weight * output * max(1, ask.choices)
        decode = rows[SHARE - WAIT] * (delayed * (ask.prompt_tokens + output))
        decode += rows[GROWTH - WAIT] * delayed
        return {"wait": rows[0], "decode": decode}
