"""Hold words prove to a reader that pulled blocks were held until the last byte arrived.

The engine keeps a 64-bit word per handed-out prompt in memory that NIXL peers can read. The word is the hold's number while the blocks
are held, and 0 from just before they are freed. A reader pulls the blocks, then the word. If the word has the expected number, no
block was reused during the pull. No clock is involved.
"""

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass

WORD_BYTES = 8
HOLDS_PATH = "kvmesh_holds"
"""The connector's extra setting with the path of the table."""
SECRET_FILE = "kvmesh_secret_file"
"""The connector's extra setting with the path of the mesh's secret; empty: the side channel stays open."""
HOLDS_MAX = 1 << 16
"""Concurrent holds. Further prompts are handed out without a hold, and their readers compute them."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A word's index in the table, and its value while the blocks are held."""

    index: int
    number: int


class HoldTable:
    """The words of one engine, in memory that its scheduler and its ranks share. Only the scheduler writes to it.

    The ranks of a tensor-parallel engine are separate processes. Each maps the memory by its path and registers it with its own NIXL
    agent.
    """

    def __init__(self, path: str) -> None:
        """Maps the memory of a HoldMemory at `path`. OSError when its owner has ended."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, HOLDS_MAX * WORD_BYTES)
        finally:
            os.close(descriptor)
        self._words = (ctypes.c_uint64 * HOLDS_MAX).from_buffer(self._memory)
        self._free = list(range(HOLDS_MAX - 1, -1, -1))
        self._holds: dict[str, Hold] = {}
        # Random, so that different engines use different numbers.
        self._next = secrets.randbits(62) + 1

    @property
    def address(self) -> int:
        """Address of the first word in this process."""
        return ctypes.addressof(self._words)

    @property
    def size_bytes(self) -> int:
        return HOLDS_MAX * WORD_BYTES

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, request_id: str) -> Hold | None:
        """Starts a hold. None: the table is full."""
        if not self._free:
            return None
        hold = Hold(index=self._free.pop(), number=self._next)
        # A number is never used twice, so a word that serves another prompt does not look like an earlier hold.
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
    """Owns the memory of one table. The kernel frees it after the last process that maps it has ended, even by a crash."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("kvmesh-holds", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, HOLDS_MAX * WORD_BYTES)

    @property
    def path(self) -> str:
        """Processes of the same user can open the memory here until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Ends access by path. Existing mappings stay valid."""
        os.close(self._descriptor)
