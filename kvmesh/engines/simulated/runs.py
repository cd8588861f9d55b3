"""Blocks by the run: what lies side by side in several places is told and moved as one piece."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def neighbours(first: Numbers, second: Numbers) -> tuple[Numbers, Numbers]:
    """Where the runs begin in which both arrays count up by one, and how long they are. Both arrays are equally long."""
    length = len(first)
    breaks = ((first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)).nonzero()[0]
    if not len(breaks):
        # The usual case for what a prompt's first pass wrote, and numpy's calls cost more than what they do.
        return np.zeros(min(length, 1), np.int64), np.full(min(length, 1), length)
    starts = np.concatenate(([0], breaks + 1))
    return starts, np.concatenate((starts[1:], [length])) - starts


def counted_up(firsts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of runs that begin with `firsts` and have so many numbers each, one run after the other."""
    if len(firsts) == 1:
        first = int(firsts[0])
        return np.arange(first, first + int(counts[0]))
    ends = counts.cumsum()
    numbers: Numbers = np.arange(ends[-1] if len(ends) else 0) + np.repeat(firsts - ends + counts, counts)
    return numbers
