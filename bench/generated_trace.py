"""Generates a request trace, for machines without the recorded ones."""

import math
import random

from kvmesh.core.whatif import RecordedRequest
from services.whatif.traces import MOONCAKE_BLOCK_TOKENS


def generate_trace(count: int, *, rate_per_s: float, seed: int) -> list[RecordedRequest]:
    """Generates Poisson arrivals of growing sessions. Each turn repeats its session's blocks and adds new ones.

    Fitted to the Mooncake conversation trace, whose values are in parentheses: the median prompt has 7 100 tokens (6 900), the third quartile 15
    600 (15 400), the ninth decile 29 700 (27 400); 350 output tokens; 0.38 of all blocks occurred before (0.37).
    """
    rng = random.Random(seed)
    at_s, next_block = 0.0, 1
    sessions: list[tuple[int, ...]] = []
    requests: list[RecordedRequest] = []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s)
        known = sessions.pop(rng.randrange(len(sessions))) if sessions and rng.random() < 0.35 else (0,)
        fresh = max(1, round(rng.lognormvariate(math.log(8), 1.2)))
        blocks = (*known, *range(next_block, next_block + fresh))[:250]
        next_block += fresh
        requests.append(
            RecordedRequest(
                at_s=at_s,
                prompt_tokens=MOONCAKE_BLOCK_TOKENS * len(blocks) - rng.randrange(MOONCAKE_BLOCK_TOKENS),
                output_tokens=min(2000, max(1, round(rng.lognormvariate(math.log(350), 0.6)))),
                block_ids=blocks,
            )
        )
        sessions.append(blocks)
    return requests
