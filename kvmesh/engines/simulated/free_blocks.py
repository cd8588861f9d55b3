"""The free blocks of a pool. An allocation gets consecutive blocks where possible, since NIXL moves them as one range.

Allocations go through the memory in rounds. Blocks are freed in about the order of their allocation, so long free stretches lie ahead.
"""

from bisect import bisect_right
from collections.abc import Sequence


class FreeBlocks:
    """The free blocks among `total`, by number. All are free at first."""

    def __init__(self, total: int) -> None:
        self._is_free = bytearray(b"\1") * total
        self._numbers = list(range(total))
        """Slicing it is faster than making new lists."""
        self._next = 0
        self.count = total

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks, in ascending order: one stretch, or the longest ones found. That many must be free."""
        self.count -= count
        start = self._find(count)
        if start >= 0:
            return self._cut(start=start, end=start + count)
        taken: list[int] = []
        stretch = count
        while (missing := count - len(taken)) > 0:
            stretch = min(stretch, missing)
            start = self._find(stretch)
            if start < 0:
                # Halving finds stretches of at least half of the longest length, with few searches.
                stretch = (stretch + 1) // 2
                continue
            # Extends the stretch up to the next used block.
            end = self._is_free.find(0, start + stretch, start + missing)
            taken += self._cut(start=start, end=end if end >= 0 else min(start + missing, len(self._is_free)))
        taken.sort()
        return taken

    def _cut(self, start: int, end: int) -> list[int]:
        self._is_free[start:end] = bytes(end - start)
        self._next = end
        return self._numbers[start:end]

    def take_one(self) -> int:
        """Takes one block. One must be free."""
        block = self._is_free.find(1, self._next)
        if block < 0:
            block = self._is_free.find(1)
        self._is_free[block] = 0
        self._next = block + 1
        self.count -= 1
        return block

    def _find(self, count: int) -> int:
        """Start of a free stretch of `count` blocks, searched from the previous allocation on; -1: there is none."""
        stretch = b"\1" * count
        start = self._is_free.find(stretch, self._next)
        # The end admits stretches that begin before `_next`: the first search has covered the others.
        return self._is_free.find(stretch, 0, self._next + count - 1) if start < 0 else start

    def give(self, blocks: Sequence[int]) -> None:
        """Frees blocks."""
        end = len(blocks)
        self.count += end
        start = 0
        while start < end:
            first = blocks[start]
            stop = end
            # Blocks ascend, so `blocks[place] - place` never falls. It is constant within consecutive blocks, and bisection finds where it
            # rises.
            if blocks[-1] - first != end - 1 - start:
                stop = bisect_right(range(end), first - start, start, end, key=lambda place: blocks[place] - place)
            self._is_free[first : first + stop - start] = b"\1" * (stop - start)
            start = stop
