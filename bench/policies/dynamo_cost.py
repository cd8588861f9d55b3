"""Dynamo's published cost function as a policy, for comparison in replays.

Source: NVIDIA Dynamo 1.x, `lib/kv-router/src/scheduling/selector/default.rs`, with the defaults of `KvRouterConfig`: overlap_score_credit 1, its
decay 0, prefill_load_scale 1, decode_active_request_weight 0, host 0.75, disk 0.25; blocks and prefill tokens are tracked, temperature 0 with
random tie-breaks. In blocks, lower wins:

    max(0, (active_prefill_tokens + prompt_tokens) / block - overlap_blocks) + potential_decode_blocks

The prefill router adds both terms; the decode router of a disaggregated mesh uses the second. A worker's potential blocks are those placed on it
and the request's own. Blocks that requests share count once, as `cached_tokens` does here.
"""

from typing import ClassVar

import numpy as np

from services.router.placement.policies import Candidates, LegKind, Policy, Terms
from services.router.workers.target_arrays import Floats


class DynamoCostPolicy(Policy):
    """The cost adjusted_prefill + potential_decode_blocks."""

    name: ClassVar[str] = "dynamo_cost"
    cost_unit: ClassVar[str] = "blocks"

    def terms(self, candidates: Candidates) -> Terms:
        """Returns two terms, or one if the request only needs a decode worker."""
        size = candidates.targets[0].block_size_tokens
        columns = {"potential_decode_blocks": self._decode_blocks(candidates, size)}
        if candidates.kind is not LegKind.DECODE:
            columns["adjusted_prefill"] = self._prefill_blocks(candidates, size)
        return columns

    def _prefill_blocks(self, candidates: Candidates, size: int) -> Floats:
        raw = (candidates.values_of("prompt_tokens_in_flight") + candidates.ask.prompt_tokens) / size
        blocks: Floats = np.maximum(0.0, raw - np.floor(candidates.cached_tokens / size + 1e-9))
        return blocks

    def _decode_blocks(self, candidates: Candidates, size: int) -> Floats:
        if candidates.kind is LegKind.PREFILL:
            active = candidates.values_of("prompt_tokens_in_flight") / size
        else:
            active = candidates.values_of("kv_blocks_in_flight")
        return active + -(-candidates.ask.prompt_tokens // size)
