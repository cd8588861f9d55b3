"""Channels to peers, one per address."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from kvmesh.clock import Clock, SystemClock
from kvmesh.errors import OverloadedError, UnavailableError
from kvmesh.rpc.settings import RpcSettings, channel_credentials, channel_options

_logger = logging.getLogger(__name__)
_UNCONNECTED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)

# Wraps a channel in another one with the same methods. Unlike gRPC's interceptors it costs nothing per message of a
# stream and works on every transport.
ChannelInterceptor = Callable[[grpc.aio.Channel], grpc.aio.Channel]


class Channels(Protocol):
    """What clients need of a pool; the in-memory network has one too."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port, made when there is none."""
        ...

    def drop(self, address: str) -> Awaitable[None]:
        """Closes the channel to a peer that is gone."""
        ...

    async def aclose(self) -> None: ...


UNUSED_S = 60.0
"""A channel that is not connected and that no call asked for in this time is closed. Much longer than a call may take to connect."""


class ChannelPool:
    """Channels over TCP, with TLS where configured. Connecting happens on the first call.

    Peers come back on ever new ports. Making a channel closes those to peers that are gone; see `UNUSED_S`.
    """

    def __init__(
        self, settings: RpcSettings, interceptors: Sequence[ChannelInterceptor] = (), clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._asked_s: dict[str, float] = {}
        """When a call last asked for the channel to an address."""
        self._interceptors = tuple(interceptors)
        self._options = channel_options(settings)
        self._credentials = channel_credentials(settings)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._channels)

    async def start(self) -> None:
        """Nothing to do; makes the pool a part."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`. OverloadedError when the pool is full, UnavailableError when it is closed."""
        now_s = self._clock.now()
        known = self._channels.get(address)
        if known is not None:
            self._asked_s[address] = now_s
            return known
        if self._is_closed:
            raise UnavailableError("the channel pool is closed", reason="channels_closed")
        self._close_unused(now_s)
        if len(self._channels) >= self._settings.channels_max:
            raise OverloadedError("too many channels", reason="channels_full", retry_after_s=1.0)
        made = self._channels[address] = self._make(address)
        self._asked_s[address] = now_s
        return made

    def _close_unused(self, now_s: float) -> None:
        """Closes channels to peers that are gone. A stream keeps its channel connected, however long ago it was asked for."""
        for address, channel in list(self._channels.items()):
            if now_s - self._asked_s[address] >= UNUSED_S and channel.get_state() in _UNCONNECTED:
                self.drop(address)

    def drop(self, address: str) -> Awaitable[None]:
        """Forgets the channel at once and closes it: its calls are cancelled. The result may be awaited or ignored."""
        channel = self._channels.pop(address, None)
        self._asked_s.pop(address, None)
        closing = asyncio.get_running_loop().create_task(_close(channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def aclose(self) -> None:
        """Closes all channels; calls in flight are cancelled. Idempotent."""
        self._is_closed = True
        for address in tuple(self._channels):
            self.drop(address)
        if self._closing:
            await asyncio.wait(tuple(self._closing))

    def _make(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(address, options=self._options)
        else:
            channel = grpc.aio.secure_channel(address, self._credentials, options=self._options)
        for intercept in self._interceptors:
            channel = intercept(channel)
        return channel


async def _close(channel: grpc.aio.Channel | None) -> None:
    if channel is not None:
        await channel.close(None)
