"""The simulated model: arithmetic that a test can do by hand.

    S      = sum over positions i from 0 of (i + 1) * token[i]              over prompt and output so far
    c      = (seed * 1 000 003 when the request samples with a seed, else 0) + xxh3_64(adapter) (0 without an adapter)
    next   = first_id + (S + c) mod span

Each token depends on every token before it, and S is a sum that KV blocks can carry in parts. A request samples with a seed when it
states one and its temperature is not 0. Parameters that only reshape a distribution (top_p, penalties) change nothing, since one token
has all the probability. A logit bias can choose another token: the k-th id after `next` (within the range of generated ids, with
wrap-around) starts at -k / 2, and ids from the 20th on or outside of the range start at -10. The largest sum of start and bias
wins; on a tie, the smallest k.

Embeddings are made up too: each token has a direction of its own, and a text's vector is the normalised sum of its tokens'. So equal
texts have equal vectors, and texts are the closer the more tokens they share.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvmesh.core import SamplingParams, TokenLogprob
from kvmesh.engines.simulated.model_card import TokenRange

SEED_FACTOR = 1_000_003
LOGPROBS_MAX = 20
FAR = 20
"""From this distance on all ids are equally unlikely."""
# The increment and a multiplier of SplitMix64.
_ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def constant_of(sampling: SamplingParams, adapter: str, span: int) -> int:
    """`c` modulo the span."""
    value = xxh3_64_intdigest(adapter.encode()) if adapter else 0
    if sampling.seed is not None and sampling.temperature != 0:
        value += sampling.seed * SEED_FACTOR
    return value % span


def biased_token(token_id: int, bias: Mapping[int, float], token_range: TokenRange) -> int:
    """Returns the token that is generated instead of `token_id`. Only biased tokens and the nearest other one can win."""
    first, span = token_range.first_id, token_range.span

    def rank(other: int) -> tuple[float, int]:
        is_inside = first <= other < first + span
        distance = (other - token_id) % span if is_inside else FAR
        return bias.get(other, 0.0) - 0.5 * min(distance, FAR), -distance

    nearest_first = (first + (token_id - first + k) % span for k in range(span))
    unbiased = next((other for other in nearest_first if other not in bias), None)
    return max((other for other in (*bias, unbiased) if other is not None), key=rank)


def made_up_logprob(token_id: int, alternatives: int, vocabulary_size: int) -> TokenLogprob:
    """Makes up log-probabilities. The chosen token has -(1 + id mod 8) / 64 and is its own first alternative, as with greedy sampling.

    Alternative k is id + k (modulo the vocabulary), with half a nat less per k.
    """
    top = -(1 + token_id % 8) / 64
    return TokenLogprob(
        logprob=top,
        alternatives=tuple(((token_id + k) % vocabulary_size, top - 0.5 * k) for k in range(alternatives)),
    )


def embed(token_ids: Sequence[int], dimensions_max: int, dimensions: int | None) -> Sequence[float]:
    """Returns the vector of a text. A shorter one is its beginning, normalised again."""
    vector = _sum_of_directions(token_ids, dimensions_max)[:dimensions]
    length = float(np.linalg.norm(vector))
    # A prefix may be all zeros. Then any direction will do.
    normal = vector / length if length else np.eye(1, len(vector))[0]
    result: list[float] = normal.astype(np.float32).tolist()
    return result


def _sum_of_directions(token_ids: Sequence[int], dimensions: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    # A direction has +1 or -1 in each dimension: one bit of a hash of token and dimension.
    tokens, counts = np.unique(np.asarray(token_ids, np.uint64), return_counts=True)
    total = np.zeros(dimensions)
    places = np.arange(dimensions, dtype=np.uint64) * np.uint64(_MIX)
    for token, count in zip(tokens, counts, strict=True):
        mixed = (places + token + np.uint64(1)) * np.uint64(_ODD)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(_MIX)
        total += count * (1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64))
    return total
