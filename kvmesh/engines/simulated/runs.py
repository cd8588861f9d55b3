"""Blocks by the run: what lies side by side in several places is told and moved as one piece."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def neighbours(first: Numbers, second: Numbers) -> tuple[Numbers, Numbers]:
    """Where the runs begin in which both arrays count up by one, and how long they are. Both arrays are equally long."""
    if not len(first):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    is_break = (first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)
    starts = np.concatenate(([0], is_break.nonzero()[0] + 1))
    return starts, np.diff(starts, append=len(first))


def counted_up(firsts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of runs that begin with `firsts` and have so many numbers each, one run after the other."""
    ends = counts.cumsum()
    numbers: Numbers = np.arange(ends[-1] if len(ends) else 0) + np.repeat(firsts - ends + counts, counts)
    return numbers
