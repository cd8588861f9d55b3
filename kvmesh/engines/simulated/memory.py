"""The pool's bytes. A block is 64-bit words: guard (its hash), stamp (which filling), then its checksum repeated.

The checksum part of a block is what attention would read: the sum of (position + 1) * token over its tokens. A block read
after its owner freed and refilled it shows another guard or stamp.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HEAD_WORDS = 2
WORD_MASK = (1 << 60) - 1


class KvMemory:
    """Words of all blocks, one row per block. `buffer` is what a transport registers."""

    def __init__(self, blocks: int, bytes_per_block: int, first_stamp: int) -> None:
        self.bytes_per_block = bytes_per_block
        self._words: npt.NDArray[np.uint64] = np.zeros((blocks, bytes_per_block // 8), np.uint64)
        self._payload_words = bytes_per_block // 8 - HEAD_WORDS
        self._stamp = first_stamp

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The same memory as bytes."""
        return self._words.reshape(-1).view(np.uint8)

    def write(self, block: int, guard: int, part: int) -> None:
        """Fills one block with a new stamp."""
        self._stamp = (self._stamp + 1) & 0xFFFFFFFFFFFFFFFF
        row = self._words[block]
        row[HEAD_WORDS:] = part
        row[0] = guard
        row[1] = self._stamp

    def write_many(self, blocks: Sequence[int], guards: Sequence[int], parts: npt.NDArray[np.uint64]) -> None:
        """Fills blocks, each with a stamp of its own."""
        stamps = range(self._stamp + 1, self._stamp + 1 + len(blocks))
        self._stamp += len(blocks)
        rows = np.asarray(blocks)
        self._words[rows] = parts[:, None]
        self._words[rows, 0] = np.asarray(guards, np.uint64)
        self._words[rows, 1] = np.asarray([stamp & 0xFFFFFFFFFFFFFFFF for stamp in stamps], np.uint64)

    def read_parts(self, blocks: Sequence[int]) -> list[int]:
        """Each block's checksum, from all of its words; a damaged word gives a wrong one."""
        if not blocks:
            return []
        totals = self._words[np.asarray(blocks), HEAD_WORDS:].sum(axis=1) // np.uint64(self._payload_words)
        return [int(total) & WORD_MASK for total in totals.tolist()]

    def guards(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Guards and stamps of blocks."""
        heads = self._words[np.asarray(blocks, np.int64), :HEAD_WORDS]
        return heads[:, 0].tolist(), heads[:, 1].tolist()

    def damage(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks with other content, as a reuse after the lease would."""
        if blocks:
            self._words[np.asarray(blocks)] += np.uint64(0x9E3779B97F4A7C15)
