"""The pool's bytes. A block is 64-bit words: guard (its hash), stamp (which filling), then its checksum repeated.

The checksum part of a block is what attention would read: the sum of (position + 1) * token over its tokens. A block read
after its owner freed and refilled it shows another guard or stamp.
"""

import sys
from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt

from kvmesh.engines.simulated.block_runs import are_neighbours

HEAD_WORDS = 2
WORD_MASK = (1 << 60) - 1
STAMP_MASK = (1 << 62) - 1
Words = npt.NDArray[np.uint64]
_HEAD = Struct("=QQ")


class KvMemory:
    """Words of all blocks, one row per block. `buffer` is what a transport registers."""

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
        """Fills blocks, each with a stamp of its own."""
        if not blocks:
            return
        places = _places(blocks)
        is_whole = isinstance(places, slice)
        rows = self._words[places] if is_whole else np.empty((len(blocks), self._words.shape[1]), np.uint64)
        rows[:, 0] = words_of(guards)
        rows[:, 1] = np.arange(self._stamp + 1, self._stamp + 1 + len(blocks), dtype=np.uint64)
        rows[:, HEAD_WORDS:] = parts[:, None]
        self._stamp += len(blocks)
        if not is_whole:
            self._words[places] = rows

    def write_one(self, block: int, guard: int, part: int) -> None:
        """The same for one block, without numpy: a decode step fills few, and comes when numpy's code is in no cache."""
        self._stamp += 1
        row = _HEAD.pack(guard, self._stamp) + part.to_bytes(8, sys.byteorder) * self._payload_words
        start = block * self.bytes_per_block
        self._bytes[start : start + self.bytes_per_block] = row

    def read_parts(self, blocks: Sequence[int]) -> Words:
        """Each block's checksum, from all of its words; a damaged word gives a wrong one."""
        parts: Words = self._words[_places(blocks)][:, HEAD_WORDS:].sum(axis=1)
        parts //= np.uint64(self._payload_words)
        parts &= np.uint64(WORD_MASK)
        return parts

    def guards(self, blocks: Sequence[int]) -> tuple[Words, Words]:
        places = _places(blocks)
        return self._words[places, 0], self._words[places, 1]


def _places(blocks: Sequence[int]) -> slice | npt.NDArray[np.int64]:
    """What takes the rows of these blocks, all of them different, out of an array: where they are neighbours, as a prompt's mostly
    are, the rows themselves."""
    if blocks and are_neighbours(blocks):
        return slice(blocks[0], blocks[-1] + 1)
    return np.array(blocks, np.int64)


def words_of(values: Sequence[int]) -> Words:
    """64-bit words as an array. Through `array`, which is the quickest way out of a list."""
    return np.frombuffer(array("Q", values), np.uint64) if values else np.empty(0, np.uint64)
