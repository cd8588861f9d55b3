"""Arrays of the numbers that the cost formula reads for each target, so that one decision scores all candidates together.

A target writes its numbers when they change, and a decision only reads them. Calling methods of 512 Python objects would take longer than
the rest of the decision. Symbols in brackets are those of docs/understand/routing-cost.md.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]


class PrefillNumbers(NamedTuple):
    """What computing a prompt costs on each target."""

    done_s: Floats
    """Time at which all promised prompts should be computed [done(p)]."""
    queue_s_min: Floats
    """The least length of the queue [overdue_ratio · promised(p)]. Infinite: the target accepts no more prompts."""
    base_s: Floats
    s_per_token: Floats
    s_per_token_pair_half: Floats
    """Half of the seconds per pair of a computed token and a token before it [per_pair / 2]."""


class DecodeNumbers(NamedTuple):
    """What decoding costs on each target."""

    wait_s: Floats
    """Seconds until a decode slot is free [wait]. Infinite: the target takes no more requests."""
    delay_s: Floats
    """Seconds per output token that the batch and a new request delay each other by [2 · r · R + k · K]."""
    delay_s_per_token: Floats
    """The same for each token that the new request holds [k · R]."""
    requests: Floats
    """Requests on the target [R]."""
    step_room_s: Floats
    """Seconds of prefill that fit into a decode step within the inter-token latency target. Infinite without requests."""


class TargetArrays:
    """The numbers of all targets of a fleet, one column per target. The arrays are replaced when they grow; callers must not keep them."""

    __slots__ = ("_free_columns", "decode", "has_pair_costs", "prefill")

    def __init__(self, columns: int = 64) -> None:
        self.prefill = PrefillNumbers(*[np.zeros(columns) for _ in PrefillNumbers._fields])
        self.decode = DecodeNumbers(*[np.zeros(columns) for _ in DecodeNumbers._fields])
        self._free_columns = list(range(columns - 1, -1, -1))
        self.has_pair_costs = False
        """True once the prefill time of a target grows with the square of the prompt."""

    def add_column(self) -> int:
        """Reserves a column for a target and returns its index."""
        if not self._free_columns:
            columns = len(self.prefill.done_s)
            self.prefill = PrefillNumbers(*[np.append(values, np.zeros(columns)) for values in self.prefill])
            self.decode = DecodeNumbers(*[np.append(values, np.zeros(columns)) for values in self.decode])
            self._free_columns = list(range(2 * columns - 1, columns - 1, -1))
        return self._free_columns.pop()

    def free_column(self, column: int) -> None:
        self._free_columns.append(column)
