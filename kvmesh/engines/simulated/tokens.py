"""The simulated model: arithmetic that a test can do by hand.

    S      = sum over positions i from 0 of (i + 1) * token[i]              over prompt and output so far
    c      = (seed * 1 000 003 when the request samples with a seed, else 0) + xxh3_64(adapter) (0 without an adapter)
    next   = first_id + (S + c) mod span

So each token depends on every token before it, and S is a sum that KV blocks can carry in parts. A request samples with a
seed when it states one and its temperature is not 0. Whatever only reshapes a distribution (top_p, penalties) changes
nothing, since all probability lies on one token. A bias can move it: token number k behind `next` (in the range of generated
ids, around its end) has k / 2 less to begin with, everything from 20 behind on and outside of the range 10 less; the largest
sum of that and the bias wins, of equals the nearest.
"""

from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from kvmesh.core import Generation, SamplingParams, TokenLogprob
from kvmesh.engines.simulated.model_card import TokenRange

SEED_FACTOR = 1_000_003
LOGPROBS_MAX = 20


def term(sampling: SamplingParams, adapter: str, span: int) -> int:
    """`c` modulo the span."""
    value = xxh3_64_intdigest(adapter.encode()) if adapter else 0
    if sampling.seed is not None and sampling.temperature != 0:
        value += sampling.seed * SEED_FACTOR
    return value % span


FAR = 20
"""From so many tokens behind on all are equally unlikely."""


def biased(token_id: int, bias: Mapping[int, float], token_range: TokenRange) -> int:
    """What is said instead of `token_id` when these tokens are biased. Only they and the nearest other one can win."""
    first, span = token_range.first_id, token_range.span

    def rank(other: int) -> tuple[float, int]:
        is_inside = first <= other < first + span
        behind = (other - token_id) % span if is_inside else FAR
        return bias.get(other, 0.0) - 0.5 * min(behind, FAR), -behind

    near = (first + (token_id - first + k) % span for k in range(span))
    free = next((other for other in near if other not in bias), None)
    return max((other for other in (*bias, free) if other is not None), key=rank)


def checksum(token_ids: Sequence[int], first_position: int = 0) -> int:
    """The part of S that these tokens contribute when the first stands at `first_position`."""
    return sum((first_position + i + 1) * token for i, token in enumerate(token_ids))


def expected_tokens(
    generation: Generation, token_range: TokenRange, count: int, *, eos_after_tokens: int = 0, eos_token_id: int = 2
) -> list[int]:
    """What a correct engine answers next, `count` tokens of it, stops aside: the slow reference."""
    sequence = [*generation.token_ids, *generation.emitted_token_ids]
    constant = term(generation.sampling, generation.adapter, token_range.span)
    start = len(sequence)
    for _ in range(count):
        token_id = token_range.first_id + (checksum(sequence) + constant) % token_range.span
        bias = dict(generation.sampling.logit_bias)
        sequence.append(biased(token_id, bias, token_range) if bias else token_id)
        if eos_after_tokens and len(sequence) - len(generation.token_ids) == eos_after_tokens:
            sequence[-1] = eos_token_id
            break
    return sequence[start:]


def made_up_logprob(token_id: int, alternatives: int, vocabulary_size: int) -> TokenLogprob:
    """The chosen token has -(1 + id mod 8) / 64; alternative k is id + k (modulo the vocabulary) with half a nat less per k.

    The chosen token is the first of its alternatives, as with greedy sampling.
    """
    top = -(1 + token_id % 8) / 64
    return TokenLogprob(
        logprob=top,
        alternatives=tuple(((token_id + k) % vocabulary_size, top - 0.5 * k) for k in range(alternatives)),
    )
