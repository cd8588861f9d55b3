"""Numbers of all targets side by side in arrays, one column per target, so that all candidates are weighed at once.

A target writes its column whenever something of it changes (`Target.refresh`); a decision only reads. Columns are given out by
`join` and come back with `leave`; pools hold column numbers and are made anew whenever the fleet changes.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]

UNTIL, CAP, FLOOR, BASE, PER_TOKEN, PER_PAIR, WAIT, GROWTH, SHARE, RUNNING, CHUNK = range(11)
"""Rows. Prefill: time at which the promised work should be done, its sum and its least in seconds (infinite: takes no
more), coefficients. Decode: wait for a slot in seconds (infinite: takes no more), delay per output token that the batch and
the newcomer cause each other, the same per token the newcomer holds, requests in the batch, seconds of prefill that a step has room for."""
ROWS = 11


class Board:
    """The arrays. `values[row, column]`; they move when they grow, so nobody keeps a view."""

    __slots__ = ("_free", "has_pairs", "values")

    def __init__(self, columns: int = 64) -> None:
        self.values: Floats = np.zeros((ROWS, columns))
        self._free = list(range(columns - 1, -1, -1))
        self.has_pairs = False
        """True once some worker's prefill time grows with the square of the prompt."""

    def join(self) -> int:
        """A column of zeros."""
        if not self._free:
            columns = self.values.shape[1]
            self.values = np.concatenate((self.values, np.zeros((ROWS, columns))), axis=1)
            self._free = list(range(2 * columns - 1, columns - 1, -1))
        column = self._free.pop()
        self.values[:, column] = 0.0
        return column

    def leave(self, column: int) -> None:
        """The column is nobody's."""
        self._free.append(column)
