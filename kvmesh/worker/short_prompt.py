"""The short prompts of warm-ups and checks."""

from random import Random

from kvmesh.core import Generation, SamplingParams
from kvmesh.engines.base import INTERNAL_SALT, EngineDescription

PRIORITY = 100
"""A check on a busy worker does not wait for the requests that wait there."""


def short_prompt(description: EngineDescription, name: str, *, tokens: int) -> Generation:
    """Returns a request of more than one KV block. The same name gives the same token ids, so that repetition fills no cache."""
    size = description.block_size_tokens
    length = min(size + (size + 1) // 2, description.model.context_tokens_max - tokens)
    random = Random(name)
    return Generation(
        model=description.model.name,
        token_ids=[random.randrange(description.model.vocabulary_size) for _ in range(max(length, 1))],
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        cache_salt=INTERNAL_SALT,
        priority=PRIORITY,
    )
