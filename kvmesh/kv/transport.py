"""The interface of KV transports. A reader pulls KV out of the writer's registered memory.

A transport belongs to one run of an engine. Its `metadata` is part of KV handles and lets other transports connect to it. A transport
cannot verify that the memory still holds the right KV; leases and the engine's own checks do that.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Listener = Callable[[bytes], None]
Piece = tuple[int, int, int]
"""Offset in the peer's memory, offset in local memory, bytes."""


class KvTransport(Protocol):
    """One engine's transport. All methods run on one event loop; none blocks it for long."""

    async def start(self, memory: Memory, listener: Listener) -> None:
        """Registers `memory` until the transport is closed. Passes messages of peers to `listener`, on the event loop.

        Raises a MeshError that says what is missing.
        """
        ...

    @property
    def metadata(self) -> bytes:
        """Lets peers pull from here; some hundred bytes. Available after `start`."""
        ...

    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Awaitable[None] | None:
        """Copies pieces from the memory of the transport with the metadata `peer`.

        Returns None if the copy is complete, otherwise an awaitable, which waits for `start` if necessary. Both raise KvLostError when
        the peer is gone, unknown or too slow. When the awaitable has ended, even by cancellation, nothing writes to the local memory any
        longer.
        """
        ...

    async def notify(self, peer: bytes, message: bytes) -> None:
        """Sends a message to a peer's listener. Messages to a lost peer are dropped."""
        ...

    def expect_messages(self, is_expecting: bool) -> None:
        """Tells the transport whether messages may arrive. It need not poll while none can."""
        ...

    async def aclose(self) -> None:
        """Ends pulls in progress and releases everything. Idempotent."""
        ...
