"""The `kv` policy: seconds to the first token, and what decoding costs the request and its neighbours on the worker."""

from typing import ClassVar

import numpy as np

from services.router.placement.policies.base import Candidates, LegKind, Policy, PolicyContext
from services.router.workers.target_arrays import Floats


class KvPolicy(Policy):
    """The cost of docs/understand/routing-cost.md, with its terms and symbols. `pair_search.py` adds the term `transfer`."""

    name: ClassVar[str] = "kv"
    cost_unit: ClassVar[str] = "s"
    counts_transfer: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.preference = context.cost.preference_s
        self._decode_weight = context.cost.decode_weight
        self._output_tokens = context.cost.output_tokens

    def terms(self, candidates: Candidates) -> dict[str, Floats]:
        if candidates.kind is LegKind.PREFILL:
            return {"queue": _queue_s(candidates), "prefill": _prefill_s(candidates)}
        if candidates.kind is LegKind.DECODE:
            return {"wait": candidates.decode.wait_s, "decode": self._decode_s(candidates)}
        prefill_s = _prefill_s(candidates)
        return {
            "queue": _queue_s(candidates),
            "prefill": prefill_s,
            "wait": candidates.decode.wait_s,
            "decode": self._decode_s(candidates),
            "interference": self._decode_weight * candidates.decode.requests * prefill_s,
        }

    def _decode_s(self, candidates: Candidates) -> Floats:
        """Each of m output tokens is delayed by the batch, and delays the batch."""
        decode, ask = candidates.decode, candidates.ask
        m = ask.expected_output_tokens or self._output_tokens
        delay_s = decode.delay_s + decode.delay_s_per_token * (ask.prompt_tokens + m)
        return delay_s * (self._decode_weight * m * (ask.choices or 1))


def _queue_s(candidates: Candidates) -> Floats:
    seconds: Floats = np.maximum(candidates.prefill.done_s - candidates.now, candidates.prefill.queue_s_min)
    return seconds


def _prefill_s(candidates: Candidates) -> Floats:
    prefill, n, cached = candidates.prefill, candidates.ask.prompt_tokens, candidates.cached_tokens
    s_per_token = prefill.s_per_token
    if candidates.has_pair_costs:
        # n - u/2 = (n + cached) / 2
        s_per_token = s_per_token + prefill.s_per_token_pair_half * (n + cached)
    return prefill.base_s + s_per_token * (n - cached)
