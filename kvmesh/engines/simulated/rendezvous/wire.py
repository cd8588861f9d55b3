"""How the two engines of a rendezvous talk: a channel for each room, from the decode engine to the prefill engine's bootstrap server."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol

from aiohttp import ClientError, ClientSession, ClientTimeout, WSMsgType, web

from kvmesh.errors import UnavailableError
from kvmesh.event_log import event_logger

FAKE_HOST = "2.2.2.2"
"""Host of a rendezvous without a counterpart: no KV moves, and the tokens are wrong. For warm-up and tests; SGLang uses the same."""
HELLO, READY, OFFER, DONE, FAILED = b"H", b"R", b"O", b"D", b"F"
"""First byte of a message. HELLO, READY and DONE go to the prefill engine; OFFER (the blocks to pull) and FAILED (a reason) come back."""
_HELLO = Struct(">QI")
_log = event_logger(__name__)
HEARTBEAT_S = 2.0
"""A peer whose process is suspended misses two of them and counts as gone."""
MESSAGE_BYTES_MAX = 16 << 20
"""An offer has 16 bytes per run of blocks."""
CLOSE_S = 0.5


class ChannelClosed(Exception):
    """The other end closed the channel or is gone."""


class Channel(Protocol):
    """Messages in order, in both directions."""

    def send_nowait(self, message: bytes) -> None:
        """Sends a message. Messages on a closed channel are dropped."""
        ...

    async def receive(self) -> bytes:
        """Returns the next message. Raises ChannelClosed after the last one."""
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
        """Returns None if the message is not a hello."""
        if not message.startswith(HELLO) or len(message) < 1 + _HELLO.size:
            return None
        room, rank = _HELLO.unpack_from(message, 1)
        return cls(room=room, rank=rank, compatibility_hash=message[1 + _HELLO.size :].decode(errors="replace"))


class HttpWire:
    """See Wire. `host` is the address that the server binds to and that others connect to; port 0: any free one."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._session: ClientSession | None = None
        self._channels: set[_WebSocketChannel] = set()

    async def serve(self, ranks: Mapping[int, Mapping[str, object]], on_channel: OnChannel) -> str:
        async def route(_: web.Request) -> web.Response:
            return web.json_response({"ranks": {str(rank): dict(record) for rank, record in ranks.items()}})

        async def room(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, timeout=CLOSE_S, max_msg_size=MESSAGE_BYTES_MAX)
            await socket.prepare(request)
            channel = self._add(socket)
            try:
                await on_channel(channel)
            finally:
                # aiohttp closes the socket when the handler returns, so the last messages must be written before.
                await channel.wait_closed()
            return socket

        app = web.Application()
        app.add_routes([web.get("/route", route), web.get("/rooms", room)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise UnavailableError(
                f"the bootstrap server cannot listen on {self._host}:{self._port}: {error}", field="bootstrap_port"
            ) from error
        return f"{self._host}:{self._runner.addresses[0][1]}"

    async def connect(self, host: str, port: int) -> Channel:
        if self._session is None:
            self._session = ClientSession(timeout=ClientTimeout(total=None))
        try:
            socket = await self._session.ws_connect(
                f"http://{f'[{host}]' if ':' in host else host}:{port}/rooms",
                heartbeat=HEARTBEAT_S,
                max_msg_size=MESSAGE_BYTES_MAX,
            )
        except (ClientError, OSError) as error:
            raise ChannelClosed(str(error)) from error
        return self._add(socket)

    def _add(self, socket: Any) -> "_WebSocketChannel":
        channel = _WebSocketChannel(socket)
        self._channels.add(channel)
        channel.writer.add_done_callback(lambda _: self._channels.discard(channel))
        return channel

    async def aclose(self) -> None:
        for channel in list(self._channels):
            channel.close_nowait()
        await asyncio.gather(*(channel.wait_closed() for channel in list(self._channels)), return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


class _WebSocketChannel:
    """One task writes, in order, so that sending never waits."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.writer = asyncio.create_task(self._write(), name="rendezvous-writer")

    async def _write(self) -> None:
        try:
            while (message := await self._unsent.get()) is not None:
                await self._socket.send_bytes(message)
        except (ClientError, OSError):
            _log.info("rendezvous_message_dropped")
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close()

    def send_nowait(self, message: bytes) -> None:
        self._unsent.put_nowait(message)

    async def receive(self) -> bytes:
        message = await self._socket.receive()
        if message.type is not WSMsgType.BINARY:
            raise ChannelClosed(str(message.type))
        data: bytes = message.data
        return data

    def close_nowait(self) -> None:
        self._unsent.put_nowait(None)

    async def wait_closed(self) -> None:
        """Until the last message is written and the socket is closed."""
        await asyncio.gather(self.writer, return_exceptions=True)
