"""Made-up embeddings: each token has a direction of its own, and a text's vector is the normalised sum of its tokens'.

So equal texts have equal vectors, and texts are the closer the more tokens they share.
"""

from collections.abc import Sequence

import numpy as np

from kvmesh.engines.simulated.leg_state import LegState

_ODD, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def embed(leg: LegState, dimensions: int) -> Sequence[float]:
    """The vector of a leg's tokens; a shorter one is its beginning, normalised again."""
    vector = embed_tokens(leg.tokens, dimensions)[: leg.request.dimensions]
    length = float(np.linalg.norm(vector))
    # A prefix may be all zero; any direction is as good then.
    normal = vector / length if length else np.eye(1, len(vector))[0]
    result: list[float] = normal.astype(np.float32).tolist()
    return result


def embed_tokens(token_ids: Sequence[int], dimensions: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The sum over tokens of their +-1 directions (bits of a hash of token and dimension), not normalised."""
    tokens, counts = np.unique(np.asarray(token_ids, np.uint64), return_counts=True)
    total = np.zeros(dimensions)
    places = np.arange(dimensions, dtype=np.uint64) * np.uint64(_MIX)
    for token, count in zip(tokens, counts, strict=True):
        mixed = (places + token + np.uint64(1)) * np.uint64(_ODD)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(_MIX)
        total += count * (1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64))
    return total
