"""The decode batch as columns: a step is a few passes over plain lists.

Plain lists beat numpy here. Other processes run between two steps and evict numpy's code from the caches; its few operations then
cost more than an addition for each of 32 legs.

Slots are dense from 0; removing a leg moves the last one into its slot.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.model_card import TokenRange


class DecodeBatch:
    """Legs that decode. `steps` counts calls of `step`. The `rows_max` newest tokens of each leg can be read back."""

    def __init__(self, rows_max: int, token_range: TokenRange) -> None:
        self.steps = 0
        self.keys: list[int] = []
        self.legs: list[SimulatedLeg] = []
        self._sums: list[int] = []
        self._offsets: list[int] = []
        """The weight of a leg's next token is its offset plus `steps`."""
        self._recent: deque[list[int]] = deque(maxlen=rows_max)
        self._first = token_range.first_id
        self._span = token_range.span

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, leg: SimulatedLeg, total: int) -> None:
        """Adds a leg whose tokens are all flushed. `total` is their checksum plus the leg's constant."""
        leg.slot, leg.flushed_step = len(self.keys), self.steps
        self.keys.append(leg.key)
        self.legs.append(leg)
        self._sums.append(total)
        self._offsets.append(len(leg.tokens) + 1 - self.steps)

    def remove(self, leg: SimulatedLeg) -> None:
        """Removes a leg. Call `flush` first, or its unflushed tokens are lost."""
        slot, moved = leg.slot, self.legs[-1]
        last = moved.slot
        for column in (self.keys, self.legs, self._sums, self._offsets):
            _move_last(column, slot)
        if slot != last:
            # The moved leg's unflushed tokens must be in the column of its new slot.
            moved.slot = slot
            for row in self._rows(moved.flushed_step):
                row[slot] = row[last]
        leg.slot = -1

    def step(self, forced: Mapping[int, int]) -> list[int]:
        """Returns the next token of every leg, by slot. `forced` gives it for some slots."""
        first, span, steps = self._first, self._span, self.steps
        ids = [total % span + first for total in self._sums]
        for slot, token_id in forced.items():
            ids[slot] = token_id
        self._recent.append(ids)
        self._sums = [
            total + token_id * (offset + steps)
            for total, token_id, offset in zip(self._sums, ids, self._offsets, strict=True)
        ]
        self.steps += 1
        # The receiver owns its list and may replace a token by eos, while `remove` changes the rows.
        return ids.copy()

    def next_token(self, leg: SimulatedLeg) -> int:
        """Returns the leg's next token by the arithmetic."""
        return self._sums[leg.slot] % self._span + self._first

    def unflushed(self, leg: SimulatedLeg) -> int:
        return self.steps - leg.flushed_step if leg.slot >= 0 else 0

    def flush(self, legs: Sequence[SimulatedLeg]) -> None:
        """Appends the legs' newest tokens to their `tokens`."""
        since = -1
        rows: list[list[int]] = []
        for leg in legs:
            if leg.flushed_step != since:
                # Legs that joined in the same step share these rows.
                since = leg.flushed_step
                rows = self._rows(since)
            slot = leg.slot
            leg.tokens.extend([row[slot] for row in rows])
            leg.flushed_step = self.steps

    def _rows(self, since: int) -> list[list[int]]:
        """Returns the tokens of the steps from number `since` on."""
        return list(islice(self._recent, len(self._recent) - self.steps + since, None))

    def totals(self, legs: Sequence[SimulatedLeg]) -> list[int]:
        """Checksums of all the legs' tokens, unflushed ones included, plus the legs' constants."""
        sums = self._sums
        return [sums[leg.slot] for leg in legs]


def _move_last(column: list[Any], slot: int) -> None:
    """Removes the last entry and writes it to `slot`."""
    last = column.pop()
    if slot < len(column):
        column[slot] = last
