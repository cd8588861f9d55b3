"""Seconds to the first token, and what decoding costs the newcomer and those already there."""

from typing import ClassVar

import numpy as np

from kvmesh.core import Ask
from services.router.placement.policies.base import Candidates, Columns, LegKind, Policy, PolicyContext
from services.router.workers.board import BASE, FLOOR, GROWTH, PER_PAIR, PER_TOKEN, RUNNING, SHARE, UNTIL, WAIT, Floats


class KvPolicy(Policy):
    """queue + prefill + transfer + wait + decode, and for a decode worker that computes the prompt itself also interference.

    `weigh` says what the terms are; `costs` is their sum in fewer array operations, which take most of a decision's time.
    """

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
            return self._prefill(candidates)
        if candidates.kind is LegKind.DECODE:
            return self._decode(candidates)
        columns = self._prefill(candidates) | self._decode(candidates)
        columns["interference"] = self._weight * candidates.rows[RUNNING] * columns["prefill"]
        return columns

    def costs(self, candidates: Candidates) -> Floats:
        """See `weigh`."""
        if candidates.kind is LegKind.PREFILL:
            return self._prefill_costs(candidates)
        if candidates.kind is LegKind.DECODE:
            return self._decode_costs(candidates)
        return super().costs(candidates)

    def _prefill(self, candidates: Candidates) -> dict[str, Floats]:
        rows = candidates.rows
        queue = np.maximum(rows[UNTIL] - candidates.now, rows[FLOOR]) - rows[BASE]
        uncached = candidates.uncached_tokens
        pairs = uncached * (candidates.ask.prompt_tokens - 0.5 * uncached)
        return {"queue": queue, "prefill": rows[BASE] + rows[PER_TOKEN] * uncached + rows[PER_PAIR] * pairs}

    def _decode(self, candidates: Candidates) -> dict[str, Floats]:
        """Each of `output` tokens comes later by what the batch adds to a step; everybody in it waits for the newcomer's part."""
        rows, (delayed, delayed_tokens) = candidates.rows, self.delayed(candidates.ask)
        return {"wait": rows[WAIT], "decode": rows[GROWTH] * delayed + rows[SHARE] * delayed_tokens}

    def delayed(self, ask: Ask) -> tuple[float, float]:
        """Output tokens that come later, in what they are worth, and the same times the tokens that the request holds."""
        output = ask.expected_output_tokens or self._output_tokens
        delayed = self._weight * output * (ask.choices or 1)
        return delayed, delayed * (ask.prompt_tokens + output)

    def _prefill_costs(self, candidates: Candidates) -> Floats:
        rows, held, tokens = candidates.rows, candidates.held, candidates.ask.prompt_tokens
        costs: Floats = rows[UNTIL] - candidates.now
        np.maximum(costs, rows[FLOOR], costs)
        uncached = tokens if held is None else tokens - held
        own = rows[PER_TOKEN] * uncached
        if candidates.has_pairs:
            own += rows[PER_PAIR] * (uncached * (tokens - 0.5 * uncached))
        costs += own
        return costs

    def _decode_costs(self, candidates: Candidates) -> Floats:
        rows, (delayed, delayed_tokens) = candidates.rows, self.delayed(candidates.ask)
        costs: Floats = rows[GROWTH] * delayed
        costs += rows[SHARE] * delayed_tokens
        costs += rows[WAIT]
        return costs
