"""How KV bytes get from one engine to another: the reader pulls out of the writer's registered memory.

A transport belongs to one engine incarnation. `metadata` names it to others; it travels inside KV handles. What a transport
cannot check is whether the bytes are still the right ones: that is what leases and the engine's own guards are for.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Listener = Callable[[bytes], None]
Piece = tuple[int, int, int]
"""Where it begins in the peer's memory, where in one's own, and how many bytes it has."""


class KvTransport(Protocol):
    """One end of the KV plane. All methods run on one event loop; none blocks it for long."""

    async def start(self, memory: Memory, listener: Listener) -> None:
        """Registers `memory` for as long as the transport lives; `listener` gets the messages of peers, on the loop.

        Raises a MeshError that says what is missing.
        """
        ...

    @property
    def metadata(self) -> bytes:
        """What peers need to pull from here, some hundred bytes. After `start`."""
        ...

    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Awaitable[None] | None:
        """Copies pieces from the memory of the transport with this metadata. None: that has happened. Otherwise what is to be
        awaited for the rest, which waits for `start` when necessary.

        Both raise KvLostError when the peer is gone, unknown or too slow. However it ends, by cancellation too, nothing writes
        to the local memory any more.
        """
        ...

    async def notify(self, peer: bytes, message: bytes) -> None:
        """Sends a message to a peer's listener; dropped silently when the peer is gone."""
        ...

    def expect_messages(self, is_expecting: bool) -> None:
        """Says whether messages may come: a transport that must poll for them rests while none can."""
        ...

    async def aclose(self) -> None:
        """Ends pulls in progress and forgets everything. Idempotent."""
        ...
