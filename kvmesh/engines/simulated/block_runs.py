"""Runs of blocks: neighbours in several places are described and moved as one piece.

Most prompts are one run, and numpy's calls cost more than what they do then.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Run = tuple[int, int, int]
"""The first number in one place, how many count up from it, and the first number in the other place, which counts up too."""


def are_neighbours(blocks: Sequence[int]) -> bool:
    """True when these numbers, all of them different, count up by one."""
    return blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == sorted(blocks)


def runs_of(first: Numbers, second: Numbers) -> list[Run]:
    """The runs in which both arrays count up by one. Both arrays are equally long."""
    if not len(first):
        return []
    breaks = ((first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)).nonzero()[0]
    starts = [0, *(breaks + 1).tolist()]
    counts = [end - start for start, end in zip(starts, [*starts[1:], len(first)], strict=True)]
    return list(zip(first[starts].tolist(), counts, second[starts].tolist(), strict=True))


def counted_up(runs: Sequence[tuple[int, int]]) -> Numbers:
    """The numbers of runs that begin with the first number and have so many numbers each, one run after the other."""
    if len(runs) == 1:
        first, count = runs[0]
        return np.arange(first, first + count)
    return np.concatenate([np.arange(first, first + count) for first, count in runs]) if runs else np.empty(0, np.int64)
