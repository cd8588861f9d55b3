"""Counts changes of direction in the sizes that a planner wants."""

from collections.abc import Sequence
from itertools import pairwise

from services.whatif.result import WhatIfResult


def reversals(result: WhatIfResult) -> int:
    """Returns how often a pool's wanted size changed direction."""
    return sum(
        _reversals([getattr(shape, name) for _, shape in result.shapes])
        for name in ("prefill_workers", "decode_workers")
    )


def _reversals(sizes: Sequence[int]) -> int:
    changes = [after - before for before, after in pairwise(sizes) if after != before]
    return sum(one * other < 0 for one, other in pairwise(changes))
