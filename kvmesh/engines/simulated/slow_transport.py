"""A KV transport whose transfers take time, so that faults and cancels can meet one."""

from collections.abc import Awaitable, Sequence

from kvmesh.clock import Clock
from kvmesh.errors import KvLostError
from kvmesh.kv.transport import KvTransport, Listener, Memory, Piece

ALIGNMENT_BYTES = 8


class SlowTransport:
    """Passes everything to another transport. A pull copies half of its pieces, pauses, and copies the rest."""

    def __init__(self, transport: KvTransport, clock: Clock, pause_s: float) -> None:
        self._transport = transport
        self._clock = clock
        self._pause_s = pause_s

    async def start(self, memory: Memory, listener: Listener) -> None:
        await self._transport.start(memory, listener)

    @property
    def metadata(self) -> bytes:
        return self._transport.metadata

    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Awaitable[None] | None:
        return self._pull(peer, pieces, timeout_s)

    async def _pull(self, peer: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        ends_s = self._clock.now() + timeout_s
        first, rest = halves(pieces)
        await self._part(peer, first, ends_s)
        await self._clock.sleep(min(self._pause_s, ends_s - self._clock.now()))
        await self._part(peer, rest, ends_s)

    async def _part(self, peer: bytes, pieces: Sequence[Piece], ends_s: float) -> None:
        left_s = ends_s - self._clock.now()
        if left_s <= 0:
            raise KvLostError("the pull took too long", reason="kv_pull_timeout")
        if pieces and (copied := self._transport.pull_nowait(peer, pieces, timeout_s=left_s)) is not None:
            await copied

    async def notify(self, peer: bytes, message: bytes) -> None:
        await self._transport.notify(peer, message=message)

    def expect_messages(self, is_expecting: bool) -> None:
        self._transport.expect_messages(is_expecting)

    async def aclose(self) -> None:
        await self._transport.aclose()


def halves(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Splits pieces in two. A single one is split itself, at a multiple of ALIGNMENT_BYTES."""
    if len(pieces) != 1:
        middle = len(pieces) // 2
        return pieces[:middle], pieces[middle:]
    theirs, ours, size = pieces[0]
    middle = size // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    first = [(theirs, ours, middle)] if middle else []
    return first, [(theirs + middle, ours + middle, size - middle)]
