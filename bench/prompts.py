"""Generates prompts of a given length from seeded one-token words, with shared prefixes."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kvmesh.core.whatif import RecordedRequest
from services.whatif.traces import MOONCAKE_BLOCK_TOKENS

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people my"
).split()
WORDS_MIN = 64
WORD_BOUNDARY = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""A leading space in byte-level tokenizers."""

DISTINCT_WORDS = 8
BODIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """Prompts of `tokens` words. The first `prefix_share` (0 to 1) of each is one of `prefix_groups` common prefixes."""

    tokens: int
    prefix_groups: int = 0
    prefix_share: float = 0.5


def one_token_words(model_dir: Path) -> Sequence[str]:
    """Returns words that are one token after a space in this model's tokenizer; WORDS if there are too few."""
    vocabulary = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    plain = sorted(
        token[1:]
        for token in vocabulary
        if token.startswith(WORD_BOUNDARY) and token[1:].isascii() and token[1:].isalpha() and token[1:].islower()
    )
    return plain if len(plain) >= WORDS_MIN else WORDS


def make_prompts(shape: PromptShape, *, seed: int, words: Sequence[str] = WORDS) -> Iterator[str]:
    """Yields distinct prompts endlessly: the words after the common prefix differ in each prompt.

    The rest is one of a few prepared texts, because choosing thousands of words per prompt would cost the generator too much CPU.
    """
    rng = random.Random(seed)
    shared = int(shape.tokens * shape.prefix_share) if shape.prefix_groups else 0
    prefixes = [rng.choices(words, k=shared) for _ in range(max(1, shape.prefix_groups))]
    distinct = min(DISTINCT_WORDS, max(1, shape.tokens - shared))
    bodies = [rng.choices(words, k=max(0, shape.tokens - shared - distinct)) for _ in range(BODIES)]
    starts, ends = [" ".join(prefix) for prefix in prefixes], [" ".join(body) for body in bodies]
    while True:
        middle = " ".join(rng.choices(words, k=distinct))
        yield " ".join(filter(None, (rng.choice(starts), middle, rng.choice(ends))))


def trace_prompt(request: RecordedRequest, *, tokens_scale: float = 1.0, words: Sequence[str] = WORDS) -> str:
    """Returns text whose 512-word blocks repeat where the trace's block ids do. `tokens_scale` scales every block.

    Without block ids, every request has a unique text, which is the same in each run.
    """
    per_block = max(1, round(MOONCAKE_BLOCK_TOKENS * tokens_scale))
    total = max(1, round(request.prompt_tokens * tokens_scale))
    own = f"{request.at_s}/{request.prompt_tokens}/{request.output_tokens}"
    # Unique text follows the listed blocks, so that a prompt shares only the blocks that the trace lists.
    seeds = chain(map(str, request.block_ids), (f"{own}/{i}" for i in range(total)))
    parts: list[str] = []
    for seed in seeds:
        parts += random.Random(seed).choices(words, k=per_block)
        if len(parts) >= total:
            break
    return " ".join(parts[:total])
