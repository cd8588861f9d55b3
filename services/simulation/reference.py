"""The simulated model's answers, computed the slow way."""

from collections.abc import Sequence

from kvmesh.core import Generation
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.tokens import biased_token, constant_of


def checksum(token_ids: Sequence[int], first_position: int = 0) -> int:
    """The part of S that these tokens contribute when the first stands at `first_position`."""
    return sum((first_position + i + 1) * token for i, token in enumerate(token_ids))


def expected_tokens(
    generation: Generation, token_range: TokenRange, count: int, *, eos_after_tokens: int = 0, eos_token_id: int = 2
) -> list[int]:
    """The next `count` tokens of a correct engine. Stop tokens and limits are ignored."""
    sequence = [*generation.token_ids, *generation.emitted_token_ids]
    constant = constant_of(generation.sampling, generation.adapter, token_range.span)
    start = len(sequence)
    total = checksum(sequence)
    bias = dict(generation.sampling.logit_bias)
    for _ in range(count):
        token_id = token_range.first_id + (total + constant) % token_range.span
        sequence.append(biased_token(token_id, bias, token_range) if bias else token_id)
        if eos_after_tokens and len(sequence) - len(generation.token_ids) == eos_after_tokens:
            sequence[-1] = eos_token_id
            break
        total += len(sequence) * sequence[-1]
    return sequence[start:]
