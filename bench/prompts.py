"""Prompts of a given length: words that are one token each in the target's tokenizer, seeded, with shared prefixes.

Nothing here needs a tokenizer at run time: `calibrate` asks the server for the prompt length of two probes instead.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people my"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """`tokens` words per prompt; the first `prefix_share` (0 to 1) of it is one of `prefix_groups` common beginnings."""

    tokens: int
    prefix_groups: int = 0
    prefix_share: float = 0.5


def make_prompts(shape: PromptShape, count: int, *, seed: int, words: Sequence[str] = WORDS) -> list[str]:
    """Distinct prompts; two differ from the first word after their common beginning."""
    rng = random.Random(seed)
    shared = int(shape.tokens * shape.prefix_share) if shape.prefix_groups else 0
    prefixes = [" ".join(rng.choices(words, k=shared)) for _ in range(max(1, shape.prefix_groups))]
    rest = max(1, shape.tokens - shared)
    return [" ".join(filter(None, (rng.choice(prefixes), *rng.choices(words, k=rest)))) for _ in range(count)]


def trace_prompt(request: TraceRequest, *, tokens_scale: float = 1.0, words: Sequence[str] = WORDS) -> str:
    """Text whose 512-word blocks repeat exactly where the trace's block ids do; `tokens_scale` shrinks every block."""
    per_block = max(1, round(MOONCAKE_BLOCK_TOKENS * tokens_scale))
    total = max(1, round(request.prompt_tokens * tokens_scale))
    blocks = request.block_ids or (id(request),)
    parts: list[str] = []
    for block_id in blocks:
        parts += random.Random(block_id).choices(words, k=min(per_block, total - len(parts)))
        if len(parts) >= total:
            break
    while len(parts) < total:
        parts += random.Random(len(parts)).choices(words, k=min(per_block, total - len(parts)))
    return " ".join(parts)
