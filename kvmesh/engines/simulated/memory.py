"""The pool's bytes. A block is 64-bit words: guard (its hash), stamp (a number per write), then its checksum repeated.

The checksum represents the data that attention would read: the sum of (position + 1) * token over the block's tokens. A block that its
owner freed and wrote again has another guard or stamp. Blocks with consecutive numbers are described and moved as one run.
"""

import sys
from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt

HEAD_WORDS = 2
WORD_MASK = (1 << 60) - 1
STAMP_MASK = (1 << 62) - 1
Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Run = tuple[int, int, int]
"""First number in one place, count of consecutive numbers, first number in the other place."""
_HEAD = Struct("=QQ")


class KvMemory:
    """Words of all blocks, one row per block. A transport registers `buffer`."""

    def __init__(self, blocks: int, bytes_per_block: int, first_stamp: int) -> None:
        self.bytes_per_block = bytes_per_block
        self._words: Words = np.zeros((blocks, bytes_per_block // 8), np.uint64)
        self._bytes = memoryview(self.buffer)  # type: ignore[arg-type]  # numpy says so from 3.12 on
        self._payload_words = bytes_per_block // 8 - HEAD_WORDS
        self._stamp = first_stamp & STAMP_MASK

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        return self._words.reshape(-1).view(np.uint8)

    def write(self, blocks: Sequence[int], guards: Sequence[int], parts: Words) -> None:
        """Writes blocks, each with a new stamp."""
        if not blocks:
            return
        places = _places(blocks)
        is_whole = isinstance(places, slice)
        # A slice gives a view, so writes go to the memory. An array of numbers would give a copy.
        rows = self._words[places] if is_whole else np.empty((len(blocks), self._words.shape[1]), np.uint64)
        rows[:, 0] = words_of(guards)
        rows[:, 1] = np.arange(self._stamp + 1, self._stamp + 1 + len(blocks), dtype=np.uint64)
        rows[:, HEAD_WORDS:] = parts[:, None]
        self._stamp += len(blocks)
        if not is_whole:
            self._words[places] = rows

    def write_one(self, block: int, guard: int, part: int) -> None:
        """`write` for one block, without numpy, whose fixed cost per call dominates for single blocks."""
        self._stamp += 1
        row = _HEAD.pack(guard, self._stamp) + part.to_bytes(8, sys.byteorder) * self._payload_words
        start = block * self.bytes_per_block
        self._bytes[start : start + self.bytes_per_block] = row

    def read_parts(self, blocks: Sequence[int]) -> Words:
        """Each block's checksum, averaged over all of its words, so that any damaged word changes it."""
        parts: Words = self._words[_places(blocks)][:, HEAD_WORDS:].sum(axis=1)
        parts //= np.uint64(self._payload_words)
        parts &= np.uint64(WORD_MASK)
        return parts

    def read_rows(self, blocks: Sequence[int]) -> Words:
        """Returns a copy of whole blocks, to be written back with `write_rows`."""
        return self._words[np.array(blocks, np.int64)]

    def write_rows(self, blocks: Sequence[int], rows: Words) -> None:
        self._words[np.array(blocks, np.int64)] = rows

    def guards(self, blocks: Sequence[int]) -> tuple[Words, Words]:
        places = _places(blocks)
        return self._words[places, 0], self._words[places, 1]


def _places(blocks: Sequence[int]) -> slice | npt.NDArray[np.int64]:
    """Returns an index for the rows of distinct blocks: a slice if their numbers are consecutive, as a prompt's mostly are."""
    if blocks and are_neighbours(blocks):
        return slice(blocks[0], blocks[-1] + 1)
    return np.array(blocks, np.int64)


def words_of(values: Sequence[int]) -> Words:
    """64-bit words as an array. `array` converts a list faster than numpy does."""
    return np.frombuffer(array("Q", values), np.uint64) if values else np.empty(0, np.uint64)


def are_neighbours(blocks: Sequence[int]) -> bool:
    """Returns True when these distinct numbers are consecutive and ascending."""
    # The difference alone is not enough: the numbers may be in another order.
    return blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == sorted(blocks)


def runs_of(first: Numbers, second: Numbers) -> list[Run]:
    """Returns the runs in which both arrays, of equal length, count up by one."""
    if not len(first):
        return []
    breaks = ((first[1:] - first[:-1] != 1) | (second[1:] - second[:-1] != 1)).nonzero()[0]
    starts = [0, *(breaks + 1).tolist()]
    counts = [end - start for start, end in zip(starts, [*starts[1:], len(first)], strict=True)]
    return list(zip(first[starts].tolist(), counts, second[starts].tolist(), strict=True))


def counted_up(runs: Sequence[tuple[int, int]]) -> Numbers:
    """Returns the numbers of all runs (first number, count), one run after the other."""
    if len(runs) == 1:
        first, count = runs[0]
        return np.arange(first, first + count)
    return np.concatenate([np.arange(first, first + count) for first, count in runs]) if runs else np.empty(0, np.int64)
