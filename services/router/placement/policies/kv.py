"""The `kv` policy: seconds to the first token, and what decoding costs the request and its neighbours on the worker."""

from typing import ClassVar

import numpy as np

from services.router.placement.policies.base import Candidates, LegKind, Policy, PolicyContext
from services.router.workers.target_arrays import Floats
from services.router.workers.worker import OUTPUT_TOKENS


class KvPolicy(Policy):
    """The cost of docs/understand/routing-cost.md, with its terms and symbols. `pair_search.py` adds the term `transfer`."""

    name: ClassVar[str] = "kv"
    cost_unit: ClassVar[str] = "s"
    counts_transfer: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.preference = context.cost.preference_s
        self._decode_weight = context.cost.decode_weight

    def terms(self, candidates: Candidates) -> dict[str, Floats]:
        if candidates.kind is LegKind.PREFILL:
            return {"queue": _queue_s(candidates), "prefill": _prefill_s(candidates)}
        wait_s = candidates.arrays.decode.wait_s.take(candidates.columns)
        if candidates.kind is LegKind.DECODE:
            return {"wait": wait_s, "decode": self._decode_s(candidates)}
        prefill_s = _prefill_s(candidates)
        requests = candidates.arrays.decode.requests.take(candidates.columns)
        return {
            "queue": _queue_s(candidates),
            "prefill": prefill_s,
            "wait": wait_s,
            "decode": self._decode_s(candidates),
            "interference": self._decode_weight * requests * prefill_s,
        }

    def _decode_s(self, candidates: Candidates) -> Floats:
        """Each of m output tokens is delayed by the batch, and delays the batch."""
        decode, columns, ask = candidates.arrays.decode, candidates.columns, candidates.ask
        m = ask.expected_output_tokens or OUTPUT_TOKENS
        delay_s = decode.delay_s.take(columns) + decode.delay_s_per_token.take(columns) * (ask.prompt_tokens + m)
        return delay_s * (self._decode_weight * m * (ask.choices or 1))


def _queue_s(candidates: Candidates) -> Floats:
    prefill, columns = candidates.arrays.prefill, candidates.columns
    seconds: Floats = np.maximum(prefill.done_s.take(columns) - candidates.now, prefill.queue_s_min.take(columns))
    return seconds


def _prefill_s(candidates: Candidates) -> Floats:
    prefill, columns = candidates.arrays.prefill, candidates.columns
    n, cached = candidates.ask.prompt_tokens, candidates.cached_tokens
    s_per_token = prefill.s_per_token.take(columns)
    if candidates.arrays.has_pair_costs:
        # n - u/2 = (n + cached) / 2
        s_per_token = s_per_token + prefill.s_per_token_pair_half.take(columns) * (n + cached)
    return prefill.base_s.take(columns) + s_per_token * (n - cached)
