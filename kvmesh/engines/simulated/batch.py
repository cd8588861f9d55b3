"""The decode batch as arrays: one step for all its legs is a handful of vector operations.

Slots are dense from 0; removing a leg moves the last one into its slot.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.engines.simulated.card import TokenRange
from kvmesh.engines.simulated.leg import LegState


class DecodeBatch:
    """Legs that decode. `steps` counts calls of `step`; `rows_max` newest tokens of each leg can be read back."""

    def __init__(self, capacity: int, rows_max: int, token_range: TokenRange) -> None:
        self.steps = 0
        self.keys: list[int] = []
        self.legs: list[LegState] = []
        self._sums: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._weights: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._recent: npt.NDArray[np.uint32] = np.zeros((rows_max, capacity), np.uint32)
        self._rows_max = rows_max
        self._first = token_range.first_id
        self._span = token_range.span

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, leg: LegState, total: int) -> None:
        """Takes a leg whose tokens are all flushed; `total` is their checksum plus the leg's constant."""
        slot = len(self.keys)
        leg.slot, leg.flushed_step = slot, self.steps
        self.keys.append(leg.key)
        self.legs.append(leg)
        self._sums[slot] = total
        self._weights[slot] = len(leg.tokens) + 1

    def remove(self, leg: LegState) -> None:
        """Lets a leg go; its unflushed tokens are lost unless `flush` came first."""
        slot, last = leg.slot, len(self.keys) - 1
        if slot != last:
            moved = self.legs[last]
            self.legs[slot], self.keys[slot], moved.slot = moved, self.keys[last], slot
            self._sums[slot], self._weights[slot] = self._sums[last], self._weights[last]
            self._recent[:, slot] = self._recent[:, last]
        self.keys.pop()
        self.legs.pop()
        leg.slot = -1

    def step(self, forced: Mapping[int, int]) -> list[int]:
        """The next token of every leg, by slot; `forced` says what it is at some of them."""
        count = len(self.keys)
        sums, weights = self._sums[:count], self._weights[:count]
        ids = sums % self._span
        ids += self._first
        for slot, token_id in forced.items():
            ids[slot] = token_id
        self._recent[self.steps % self._rows_max, :count] = ids
        sums += ids * weights
        weights += 1
        self.steps += 1
        result: list[int] = ids.tolist()
        return result

    def natural(self, leg: LegState) -> int:
        """The token that the arithmetic says comes next."""
        return int(self._sums[leg.slot]) % self._span + self._first

    def unflushed(self, leg: LegState) -> int:
        """Generated tokens that `leg.tokens` lacks."""
        return self.steps - leg.flushed_step if leg.slot >= 0 else 0

    def flush(self, legs: Sequence[LegState]) -> None:
        """Appends the legs' newest tokens to their `tokens`. Legs that were flushed together are copied together."""
        groups: dict[int, list[LegState]] = {}
        for leg in legs:
            groups.setdefault(leg.flushed_step, []).append(leg)
        for flushed_step, group in groups.items():
            count = self.steps - flushed_step
            rows = [step % self._rows_max for step in range(flushed_step, self.steps)]
            data = self._recent[rows][:, [leg.slot for leg in group]].T.tobytes()
            for place, leg in enumerate(group):
                leg.tokens.frombytes(data[4 * count * place : 4 * count * (place + 1)])
                leg.flushed_step = self.steps

    def totals(self, legs: Sequence[LegState]) -> list[int]:
        """Checksums of all the legs' tokens, unflushed ones included, plus the legs' constants."""
        totals: list[int] = self._sums[[leg.slot for leg in legs]].tolist()
        return totals
