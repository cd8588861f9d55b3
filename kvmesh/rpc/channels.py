"""Channels to peers, one per address."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from kvmesh.clock import Clock, SystemClock
from kvmesh.errors import OverloadedError, UnavailableError
from kvmesh.identity.certificates import Certificates, CertificateSource
from kvmesh.identity.grpc_credentials import MESH_CHANNEL_OPTIONS, mesh_channel_credentials
from kvmesh.rpc.settings import RpcSettings, channel_options

_UNCONNECTED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)

ChannelInterceptor = Callable[[grpc.aio.Channel], grpc.aio.Channel]
"""Wraps a channel. Unlike gRPC's interceptors it costs nothing per message of a stream, and it works on every transport."""


UNUSED_S = 60.0
"""An unconnected channel that no call used for this time is closed. Much longer than a call may take to connect."""


class ChannelPool:
    """Channels over TCP, with mesh TLS if `mesh` is given. A channel connects on its first call.

    Restarted peers have new ports, so creating a channel closes those that are unused for `UNUSED_S`. After a change of the
    certificates each address gets a new channel; the old one is closed when it is unconnected, so no stream ends.
    """

    def __init__(
        self,
        settings: RpcSettings,
        interceptors: Sequence[ChannelInterceptor] = (),
        clock: Clock | None = None,
        mesh: CertificateSource | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._used_s: dict[str, float] = {}
        """When a call last used the channel to an address."""
        self._interceptors = tuple(interceptors)
        self._options = channel_options(settings)
        self._mesh = mesh
        self._certificates: Certificates | None = None if mesh is None else mesh.current()
        """Those of the channels in `_channels`."""
        self._retired: dict[grpc.aio.Channel, str] = {}
        """Channels with earlier certificates, and their addresses."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._channels)

    async def start(self) -> None:
        """Part of the interface; channels connect by themselves."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`. OverloadedError when the pool is full, UnavailableError when it is closed."""
        now_s = self._clock.now()
        self._follow_certificates()
        known = self._channels.get(address)
        if known is not None:
            self._used_s[address] = now_s
            return known
        if self._is_closed:
            raise UnavailableError("the channel pool is closed", reason="channels_closed")
        self._close_unused(now_s)
        if len(self._channels) >= self._settings.channels_max:
            raise OverloadedError("too many channels", reason="channels_full", retry_after_s=1.0)
        made = self._channels[address] = self._make(address)
        self._used_s[address] = now_s
        return made

    def _close_unused(self, now_s: float) -> None:
        """Closes unconnected channels. A stream keeps its channel connected, however long ago the call was made."""
        for address, channel in list(self._channels.items()):
            if now_s - self._used_s[address] >= UNUSED_S and channel.get_state() in _UNCONNECTED:
                self.drop(address)
        for channel in [each for each in self._retired if each.get_state() in _UNCONNECTED]:
            del self._retired[channel]
            self._close(channel)

    def _follow_certificates(self) -> None:
        """Retires all channels when the certificates have changed."""
        if self._mesh is None or (newest := self._mesh.current()) is self._certificates:
            return
        self._certificates = newest
        self._retired.update((channel, address) for address, channel in self._channels.items())
        self._channels.clear()
        self._used_s.clear()

    def drop(self, address: str) -> Awaitable[None]:
        """Removes the channels to an address and closes them, which cancels their calls. The result may be awaited or ignored."""
        self._used_s.pop(address, None)
        for channel in [channel for channel, its_address in self._retired.items() if its_address == address]:
            del self._retired[channel]
            self._close(channel)
        return self._close(self._channels.pop(address, None))

    def _close(self, channel: grpc.aio.Channel | None) -> Awaitable[None]:
        closing = asyncio.get_running_loop().create_task(_close(channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def aclose(self) -> None:
        """Closes all channels; calls in flight are cancelled. Idempotent."""
        self._is_closed = True
        for address in (*self._channels, *self._retired.values()):
            self.drop(address)
        if self._closing:
            await asyncio.wait(tuple(self._closing))

    def _make(self, address: str) -> grpc.aio.Channel:
        channel = self._open(address)
        for intercept in self._interceptors:
            channel = intercept(channel)
        return channel

    def _open(self, address: str) -> grpc.aio.Channel:
        """Creates a channel without interceptors."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        credentials = mesh_channel_credentials(self._certificates)
        return grpc.aio.secure_channel(address, credentials, options=[*self._options, *MESH_CHANNEL_OPTIONS])


async def _close(channel: grpc.aio.Channel | None) -> None:
    if channel is not None:
        await channel.close(None)
