"""How KV bytes get from one engine to another: the reader pulls out of the writer's registered memory.

A transport belongs to one engine incarnation. `metadata` names it to others; it travels inside KV handles. What a transport
cannot check is whether the bytes are still the right ones: that is what leases and the engine's own guards are for.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Listener = Callable[[bytes], None]


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

    async def pull(
        self,
        peer: bytes,
        remote_offsets: Sequence[int],
        local_offsets: Sequence[int],
        length: int,
        *,
        timeout_s: float,
    ) -> None:
        """Copies runs of `length` bytes from the memory of the transport with this metadata. Waits for `start` when necessary.

        Raises KvLostError when the peer is gone, unknown or too slow. However it ends, by cancellation too, nothing writes to
        the local memory any more.
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


def merge_runs(remote_offsets: Sequence[int], local_offsets: Sequence[int], length: int) -> list[tuple[int, int, int]]:
    """(remote, local, bytes) with neighbours joined that are neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    first_remote = first_local = next_remote = next_local = 0
    for remote, local in zip(remote_offsets, local_offsets, strict=True):
        if remote != next_remote or local != next_local:
            if next_remote > first_remote:
                runs.append((first_remote, first_local, next_remote - first_remote))
            first_remote, first_local = remote, local
        next_remote, next_local = remote + length, local + length
    if next_remote > first_remote:
        runs.append((first_remote, first_local, next_remote - first_remote))
    return runs
