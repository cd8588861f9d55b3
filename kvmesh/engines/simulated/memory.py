"""The pool's bytes. A block is 64-bit words: guard (its hash), stamp (which filling), then its checksum repeated.

The checksum part of a block is what attention would read: the sum of (position + 1) * token over its tokens. A block read
after its owner freed and refilled it shows another guard or stamp.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HEAD_WORDS = 2
WORD_MASK = (1 << 60) - 1
STAMP_MASK = (1 << 62) - 1


class KvMemory:
    """Words of all blocks, one row per block. `buffer` is what a transport registers."""

    def __init__(self, blocks: int, bytes_per_block: int, first_stamp: int) -> None:
        self.bytes_per_block = bytes_per_block
        self._words: npt.NDArray[np.uint64] = np.zeros((blocks, bytes_per_block // 8), np.uint64)
        self._payload_words = bytes_per_block // 8 - HEAD_WORDS
        self._stamp = first_stamp & STAMP_MASK

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The same memory as bytes."""
        return self._words.reshape(-1).view(np.uint8)

    def write(self, blocks: Sequence[int], guards: Sequence[int], parts: npt.NDArray[np.uint64]) -> None:
        """Fills blocks, each with a stamp of its own."""
        rows = np.asarray(blocks, np.int64)
        self._words[rows] = parts[:, None]
        self._words[rows, 0] = np.asarray(guards, np.uint64)
        self._words[rows, 1] = np.arange(self._stamp + 1, self._stamp + 1 + len(blocks), dtype=np.uint64)
        self._stamp += len(blocks)

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
