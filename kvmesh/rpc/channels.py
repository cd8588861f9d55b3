"""Channels to peers, one per address."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from kvmesh.clock import Clock, SystemClock
from kvmesh.errors import OverloadedError, UnavailableError
from kvmesh.identity.certificates import Certificates, CertificateSource, mesh_channel_credentials, mesh_channel_options
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.settings import RpcSettings, channel_options
from kvmesh.rpc.tls_relay import TlsRelay

_WORKERS = (MeshRole.PREFILL, MeshRole.DECODE)
_UNCONNECTED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)

RoleOf = Callable[[str], MeshRole | None]
"""The role that the registry lists at an address."""
_Key = tuple[str, MeshRole]

ChannelInterceptor = Callable[[grpc.aio.Channel], grpc.aio.Channel]
"""Wraps a channel. Unlike gRPC's interceptors it costs nothing per message of a stream, and it works on every transport."""


UNUSED_S = 60.0
"""An unconnected channel that no call used for this time is closed. Much longer than a call may take to connect."""


class ChannelPool:
    """Channels over TCP, with mesh TLS if `mesh` is given. A channel connects on its first call.

    If certificates distinguish services, a server must have the role that the caller names. Workers can change their role, so for them
    the registry's role counts (`role_of`), as long as it is a worker role.

    Restarted peers have new ports, so creating a channel closes those that are unused for `UNUSED_S`. After a change of the
    certificates each address gets a new channel; the old one is closed when it is unconnected, so no stream ends.
    """

    def __init__(
        self,
        *,
        settings: RpcSettings,
        interceptors: Sequence[ChannelInterceptor] = (),
        clock: Clock | None = None,
        mesh: CertificateSource | None = None,
        role_of: RoleOf | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._role_of = role_of
        self._used_s: dict[_Key, float] = {}
        """When a call last used the channel to an address."""
        self._interceptors = tuple(interceptors)
        self._options = channel_options(settings)
        self._mesh = mesh
        self._certificates: Certificates | None = None
        """Those of the channels in `_channels`."""
        self._retired: dict[grpc.aio.Channel, str] = {}
        """Channels with earlier certificates, and their addresses."""
        self._channels: dict[_Key, grpc.aio.Channel] = {}
        self._relay = TlsRelay(settings)
        self._relayed: dict[grpc.aio.Channel, str] = {}
        """Channels through the relay, and their targets."""
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._channels)

    async def start(self) -> None:
        """Part of the interface; channels connect by themselves."""

    def channel(self, address: str, role: MeshRole = MeshRole.DECODE) -> grpc.aio.Channel:
        """Returns the channel to the server with `role` at `address`; DECODE is any worker that the registry lists there.

        OverloadedError when the pool is full, UnavailableError when it is closed.
        """
        now_s = self._clock.now()
        self._follow_certificates()
        key = (address, self._expected(address, role))
        known = self._channels.get(key)
        if known is not None:
            self._used_s[key] = now_s
            return known
        if self._is_closed:
            raise UnavailableError("the channel pool is closed", reason="channels_closed")
        self._close_unused(now_s)
        if len(self._channels) >= self._settings.channels_max:
            raise OverloadedError("too many channels", reason="channels_full", retry_after_s=1.0)
        made = self._channels[key] = self._make(*key)
        self._used_s[key] = now_s
        return made

    def _expected(self, address: str, role: MeshRole) -> MeshRole:
        """Returns the role that the server must have. If certificates do not distinguish roles, an address has one channel."""
        if self._certificates is None or not self._certificates.names.server_uri(role):
            return MeshRole.DECODE
        listed = self._role_of(address) if self._role_of is not None and role in _WORKERS else None
        return listed if listed in _WORKERS else role

    def _close_unused(self, now_s: float) -> None:
        """Closes unconnected channels. A stream keeps its channel connected, however long ago the call was made."""
        for key, channel in list(self._channels.items()):
            if now_s - self._used_s[key] >= UNUSED_S and channel.get_state() in _UNCONNECTED:
                self._drop(key)
        for channel in [each for each in self._retired if each.get_state() in _UNCONNECTED]:
            del self._retired[channel]
            self._close(channel)

    def _follow_certificates(self) -> None:
        """Retires all channels when the certificates have changed."""
        # A source returns the same object while the certificates are unchanged.
        if self._mesh is None or (newest := self._mesh.current()) is self._certificates:
            return
        self._certificates = newest
        self._retired.update((channel, address) for (address, _), channel in self._channels.items())
        self._channels.clear()
        self._used_s.clear()

    def drop(self, address: str) -> Awaitable[object]:
        """Removes the channels to an address and closes them, which cancels their calls. The result may be awaited or ignored."""
        for channel in [channel for channel, its_address in self._retired.items() if its_address == address]:
            del self._retired[channel]
            self._close(channel)
        closing = [self._drop(key) for key in [key for key in self._channels if key[0] == address]]
        return asyncio.gather(*closing)

    def _drop(self, key: _Key) -> Awaitable[None]:
        self._used_s.pop(key, None)
        return self._close(self._channels.pop(key, None))

    def _close(self, channel: grpc.aio.Channel | None) -> Awaitable[None]:
        target = self._relayed.pop(channel, "") if channel is not None else ""
        closing = asyncio.get_running_loop().create_task(self._close_both(channel, target))
        # asyncio has only weak references to tasks.
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def aclose(self) -> None:
        """Closes all channels; calls in flight are cancelled. Idempotent."""
        self._is_closed = True
        for address in {*(address for address, _ in self._channels), *self._retired.values()}:
            self.drop(address)
        if self._closing:
            await asyncio.wait(tuple(self._closing))
        await self._relay.aclose()

    def _make(self, address: str, role: MeshRole) -> grpc.aio.Channel:
        target = self._relayed_target(address, role)
        channel = grpc.aio.insecure_channel(target, options=self._options) if target else self._open(address, role)
        for intercept in self._interceptors:
            channel = intercept(channel)
        if target:
            # By the wrapped channel: `_close` gets that one.
            self._relayed[channel] = target
        return channel

    def _relayed_target(self, address: str, role: MeshRole) -> str:
        """Returns an empty text if gRPC can verify the server by its name, or there is no mesh TLS."""
        if self._certificates is None or self._certificates.names.server_name(role):
            return ""
        return self._relay.open(address, self._certificates, self._certificates.names.server_uri(role))

    def _open(self, address: str, role: MeshRole) -> grpc.aio.Channel:
        """Creates a channel without interceptors."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        credentials = mesh_channel_credentials(self._certificates)
        name = mesh_channel_options(self._certificates.names.server_name(role))
        return grpc.aio.secure_channel(address, credentials, options=[*self._options, *name])

    async def _close_both(self, channel: grpc.aio.Channel | None, target: str) -> None:
        if channel is not None:
            await channel.close(None)
        await self._relay.close(target)
