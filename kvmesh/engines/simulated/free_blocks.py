"""The free blocks of a pool, by position. An allocation of many blocks gets neighbours, which NIXL moves as one range.

Blocks are taken in rounds through the memory. They come back about in the order in which they were taken, so that what lies ahead
is free in long stretches, if only a part of the memory is free at all.
"""

from bisect import bisect_right
from collections.abc import Sequence


class FreeSpace:
    """Blocks by number, all of them free at first."""

    def __init__(self, total: int) -> None:
        self._is_free = bytearray(b"\1") * total
        self._numbers = list(range(total))
        """Slices of it are quicker than new numbers."""
        self._next = 0
        self.count = total

    def take(self, count: int) -> list[int]:
        """As many blocks, of which there must be enough, by their numbers: in one stretch, or in the longest ones found."""
        self.count -= count
        start = self._find(count)
        if start >= 0:
            return self._cut(start, start + count)
        taken: list[int] = []
        stretch = count
        while (missing := count - len(taken)) > 0:
            stretch = min(stretch, missing)
            start = self._find(stretch)
            if start < 0:
                stretch = (stretch + 1) // 2
                continue
            end = self._is_free.find(0, start + stretch, start + missing)
            taken += self._cut(start, end if end >= 0 else min(start + missing, len(self._is_free)))
        taken.sort()
        return taken

    def _cut(self, start: int, end: int) -> list[int]:
        self._is_free[start:end] = bytes(end - start)
        self._next = end
        return self._numbers[start:end]

    def take_one(self) -> int:
        """A block; there must be one."""
        block = self._is_free.find(1, self._next)
        if block < 0:
            block = self._is_free.find(1)
        self._is_free[block] = 0
        self._next = block + 1
        self.count -= 1
        return block

    def _find(self, count: int) -> int:
        """Where so many neighbours are free, from where the last ones were taken on; -1: nowhere."""
        stretch = b"\1" * count
        start = self._is_free.find(stretch, self._next)
        return self._is_free.find(stretch, 0, self._next + count - 1) if start < 0 else start

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks, by their numbers, are free."""
        end = len(blocks)
        self.count += end
        start = 0
        while start < end:
            first = blocks[start]
            behind = end
            if blocks[-1] - first != end - 1 - start:
                behind = bisect_right(range(end), first - start, start, end, key=lambda place: blocks[place] - place)
            self._is_free[first : first + behind - start] = b"\1" * (behind - start)
            start = behind
