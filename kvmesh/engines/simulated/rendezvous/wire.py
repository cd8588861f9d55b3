"""How the two engines of a rendezvous talk: a channel for each room, from the decode engine to the prefill engine's bootstrap server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

FAKE_HOST = "2.2.2.2"
"""Host of a rendezvous without a counterpart: no KV moves, and the tokens are wrong. For warm-up and tests; SGLang uses the same."""
HELLO, READY, OFFER, DONE, FAILED = b"H", b"R", b"O", b"D", b"F"
"""First byte of a message. HELLO, READY and DONE go to the prefill engine; OFFER (the blocks to pull) and FAILED (a reason) come back."""
_HELLO = Struct(">QI")


class ChannelClosed(Exception):
    """The other end closed the channel or is gone."""


class Channel(Protocol):
    """Messages in order, in both directions."""

    def send_nowait(self, message: bytes) -> None:
        """Sends a message. Messages on a closed channel are dropped."""
        ...

    async def receive(self) -> bytes:
        """The next message. Raises ChannelClosed after the last one."""
        ...

    def close_nowait(self) -> None:
        """Closes the channel after the messages that were sent. Idempotent."""
        ...


OnChannel = Callable[[Channel], Awaitable[None]]


class Wire(Protocol):
    """One engine's access to the others. Failures to connect are ChannelClosed."""

    async def serve(self, ranks: Mapping[int, Mapping[str, object]], on_channel: OnChannel) -> str:
        """Starts the bootstrap server of these ranks and returns its address, host:port. `on_channel` runs once per channel."""
        ...

    async def connect(self, host: str, port: int) -> Channel: ...

    async def aclose(self) -> None:
        """Stops the server and closes all channels. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a decode engine."""

    room: int
    rank: int
    compatibility_hash: str

    def pack(self) -> bytes:
        return HELLO + _HELLO.pack(self.room, self.rank) + self.compatibility_hash.encode()

    @classmethod
    def unpack(cls, message: bytes) -> "Hello | None":
        """None: the message is not a hello."""
        if not message.startswith(HELLO) or len(message) < 1 + _HELLO.size:
            return None
        room, rank = _HELLO.unpack_from(message, 1)
        return cls(room=room, rank=rank, compatibility_hash=message[1 + _HELLO.size :].decode(errors="replace"))
