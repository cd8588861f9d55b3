"""Numbers of all targets side by side in arrays, one column per target, so that all candidates are weighed at once.

A target writes its column whenever something of it changes; a decision only reads. Columns are given out by `join` and come
back with `leave`; pools hold column numbers and are made anew whenever the fleet changes.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]

UNTIL, FLOOR, PER_TOKEN, PER_PAIR, WAIT, GROWTH, SHARE, BASE, RUNNING, CHUNK, NOTHING, NEVER, RATE = range(13)
"""Rows, in seconds. Prefill: time at which a prompt placed now would begin plus its base, the least of that as a time from now
(infinite: takes no more prompts), time per uncached token, per uncached token and token before it. Decode: wait for a slot
(infinite: takes no more), delay per output token that batch and newcomer cause each other, the same per token the newcomer
holds. Both: the base, requests in the batch, time of prefill that a step has room for. Zero, minus infinity, and in the first
column what the decision that is being made says itself: the transfer's time per token."""
ROWS = 13


class Board:
    """`values[row, column]` reads what is written to `cells[row * columns + column]`: single numbers are written several times
    faster to the latter; `flat` is the same as an array. All are replaced when they grow, so nobody keeps them."""

    __slots__ = ("_free", "cells", "columns", "flat", "has_pairs", "values")

    def __init__(self, columns: int = 64) -> None:
        self._free = list(range(columns - 1, -1, -1))
        self._allot(columns)
        self.has_pairs = False
        """True once some worker's prefill time grows with the square of the prompt."""

    def join(self) -> int:
        """A column of zeros."""
        if not self._free:
            columns, before = self.columns, self.values
            self._allot(2 * columns)
            self.values[:, :columns] = before
            self._free = list(range(2 * columns - 1, columns - 1, -1))
        column = self._free.pop()
        self.values[:NOTHING, column] = 0.0
        return column

    def leave(self, column: int) -> None:
        """The column is nobody's."""
        self._free.append(column)

    def _allot(self, columns: int) -> None:
        self.columns = columns
        self.cells = array("d", bytes(8 * ROWS * columns))
        self.flat: Floats = np.frombuffer(self.cells, dtype=np.float64)
        self.values: Floats = self.flat.reshape(ROWS, columns)
        self.values[NEVER] = -np.inf
