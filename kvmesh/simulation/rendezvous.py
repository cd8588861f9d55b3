"""The wire of rendezvous inside one process, for simulations on virtual time and for tests."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvmesh.engines.simulated.rendezvous.wire import Channel, ChannelClosed, OnChannel

PORT = 8998


@dataclass(slots=True, kw_only=True)
class MemoryRendezvousNetwork:
    """Shared by the wires of one simulation: bootstrap servers by host."""

    latency_s: float = 0.0
    servers: dict[str, "MemoryWire"] = field(default_factory=dict)


class MemoryWire:
    """See Wire. A wire is closed when its host dies: both ends of its channels notice after the network's latency."""

    def __init__(self, network: MemoryRendezvousNetwork, host: str) -> None:
        self._network = network
        self._host = host
        self._on_channel: OnChannel | None = None
        self._channels: dict[RendezvousChannel, None] = {}
        """Not a set: its order would differ from run to run."""
        self._tasks: dict[asyncio.Future[None], None] = {}

    async def serve(self, ranks: Mapping[int, Mapping[str, object]], on_channel: OnChannel) -> str:
        self._on_channel = on_channel
        self._network.servers[self._host] = self
        return f"{self._host}:{PORT}"

    async def connect(self, host: str, port: int) -> Channel:
        await asyncio.sleep(self._network.latency_s)
        server = self._network.servers.get(host)
        if server is None or port != PORT:
            raise ChannelClosed(f"nothing listens on {host}:{port}")
        mine, theirs = RendezvousChannel(self._network.latency_s), RendezvousChannel(self._network.latency_s)
        mine.peer, theirs.peer = theirs, mine
        mine.on_closed = lambda: self._channels.pop(mine, None)
        self._channels[mine] = None
        server._accept(theirs)
        return mine

    def _accept(self, channel: "RendezvousChannel") -> None:
        assert self._on_channel is not None
        self._channels[channel] = None
        task = asyncio.ensure_future(self._on_channel(channel))
        self._tasks[task] = None

        def on_done(task: asyncio.Future[None]) -> None:
            self._tasks.pop(task, None)
            self._channels.pop(channel, None)

        task.add_done_callback(on_done)

    async def aclose(self) -> None:
        if self._network.servers.get(self._host) is self:
            del self._network.servers[self._host]
        for channel in list(self._channels):
            channel.close_nowait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channels.clear()


class RendezvousChannel:
    """One end. Messages arrive in order, after the latency."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self.peer: RendezvousChannel | None = None
        self.on_closed: Callable[[], object] = bool
        self._travelling: deque[bytes | None] = deque()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_closed = False

    def send_nowait(self, message: bytes) -> None:
        if not self._is_closed and self.peer is not None:
            self.peer._post(message)

    def _post(self, message: bytes | None) -> None:
        self._travelling.append(message)
        asyncio.get_running_loop().call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        # All messages travel equally long, so each timer delivers the oldest one.
        self._arrived.put_nowait(self._travelling.popleft())

    async def receive(self) -> bytes:
        message = None if self._is_closed else await self._arrived.get()
        if message is None:
            self._is_closed = True
            raise ChannelClosed("the other end closed the channel")
        return message

    def close_nowait(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.on_closed()
        self._arrived.put_nowait(None)
        if self.peer is not None:
            self.peer._post(None)
