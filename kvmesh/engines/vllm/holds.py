"""Hold words: prove to a reader that the blocks it pulled were held until the last byte arrived.

The engine keeps one 64-bit word per handed-out prompt in memory that NIXL peers may read. The word is the hold's number
while its blocks are held, and 0 from the moment before they are freed. A reader pulls the blocks, then the word. Reading
the expected number proves that no block was reused during the pull. No clock takes part in this.
"""

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass

WORD_BYTES = 8
HOLDS_PATH = "kvmesh_holds"
"""Name of the connector's extra setting with the path of the table."""
HOLDS_MAX = 1 << 16
"""Prompts held at a time. A prompt beyond this number is handed out without a hold, and its reader computes it instead."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One word: its index in the table and the number that it has while the blocks are held."""

    index: int
    number: int


class HoldTable:
    """The words of one engine, in memory that its scheduler and its ranks share. Only the scheduler writes to it.

    Ranks of a tensor-parallel engine are processes of their own. Each maps the memory by its path, and registers it with
    its own NIXL agent.
    """

    def __init__(self, path: str) -> None:
        """Maps the memory at `path`, which a HoldMemory gave. OSError when its owner is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, HOLDS_MAX * WORD_BYTES)
        finally:
            os.close(descriptor)
        self._words = (ctypes.c_uint64 * HOLDS_MAX).from_buffer(self._memory)
        self._free = list(range(HOLDS_MAX - 1, -1, -1))
        self._holds: dict[str, Hold] = {}
        # Random, so that no two engines use the same numbers.
        self._next = secrets.randbits(62) + 1

    @property
    def address(self) -> int:
        """Where the first word lies in this process."""
        return ctypes.addressof(self._words)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first word to the end of the last."""
        return HOLDS_MAX * WORD_BYTES

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, request_id: str) -> Hold | None:
        """Begins a hold. None: the table is full."""
        if not self._free:
            return None
        hold = Hold(self._free.pop(), self._next)
        self._next += 1
        self._holds[request_id] = hold
        self._words[hold.index] = hold.number
        return hold

    def end(self, request_id: str) -> None:
        """Ends a hold. Call this before the blocks are freed. Unknown requests are ignored."""
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self._words[hold.index] = 0
            self._free.append(hold.index)


class HoldMemory:
    """Owns the memory of one table. The kernel frees it when the last process that maps it ends, however it ends."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("kvmesh-holds", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, HOLDS_MAX * WORD_BYTES)

    @property
    def path(self) -> str:
        """Where processes of the same user can open the memory until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """No process can map the memory any more; those that have keep it."""
        os.close(self._descriptor)
