"""Settings of gRPC servers and channels, and gRPC's own names for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvmesh.identity.certificates import CertificateSource, mesh_server_credentials
from kvmesh.network.names import LOOPBACK
from kvmesh.settings import internal, setting

Options = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcSettings:
    """What a process's gRPC server and its channels share."""

    host: str = setting("", "Address the server listens on; empty: that of `address`.")
    advertise_host: str = setting("", "Host that others reach this process at; empty: the one it listens on.")
    port: int = setting(0, "Port the server listens on; 0: a free one.", min=0, max=65535)
    message_bytes_max: int = setting(
        64 << 20,
        "Largest message either way; opaque KV handles and media are the largest.",
        min=1024,
        max=(1 << 31) - 1,
    )
    streams_max: int = internal(4096, "Concurrent calls per connection.")
    request_bytes_max: int = internal(0, "Largest message that the server receives; 0: message_bytes_max.")
    connections_max: int = internal(0, "Connections of the server; more are closed at once. 0: no limit.")
    handshake_timeout_s: float = internal(20.0, "Longest handshake of a new connection, TLS included.")
    # gRPC also sets it as TCP_USER_TIMEOUT: a connection on which data was sent over a cut path ends after it. Else the connection would
    # stay for as long as TCP repeats the data, ever more rarely, and be unusable for many seconds after the path heals.
    keepalive_timeout_s: float = internal(
        2.0, "Longest wait for the answer to a ping, and for sent data to be acknowledged."
    )
    reconnect_min_s: float = internal(0.1, "First pause before connecting again; workers restart fast.")
    reconnect_max_s: float = internal(1.0, "Longest pause before connecting again.")
    connect_timeout_s: float = internal(
        3.0,
        "Longest try to connect, TLS and the peer's first word included; a busy peer takes a while to say it.",
    )
    channels_max: int = internal(4096, "Channels to different peers at a time.")
    grace_s: float = setting(5.0, "Time for calls in flight when the server stops.", min=0)

    @property
    def has_channelz(self) -> bool:
        """Whether the server serves gRPC's own statistics of this process."""
        return True

    @property
    def listen_host(self) -> str:
        return self.host or LOOPBACK

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.listen_host


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicRpcSettings(RpcSettings):
    """With TLS towards clients. Services of the mesh have mesh TLS instead (`kvmesh/identity/settings.py`)."""

    tls_certificate_file: str = setting("", "PEM certificate chain of this process. Empty: no TLS.")
    tls_key_file: str = setting("", "PEM key of the certificate.")
    tls_authority_file: str = setting(
        "",
        "PEM certificates that peers must be signed by. Given: peers must show theirs (mTLS). Not the mesh's authority: that one's"
        " certificates are for services.",
    )
    tls_server_name: str = setting("", "Name that servers' certificates bear. Empty: the host in the address.")

    def __post_init__(self) -> None:
        """Certificate and key go together; an authority without them can only be a client's."""
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            raise ValueError("tls_certificate_file and tls_key_file are given together or not at all")

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_certificate_file or self.tls_authority_file)

    @property
    def has_channelz(self) -> bool:
        """Its statistics have the addresses of the mesh's services and of all clients."""
        return False


KEEPALIVE_S = 20.0
"""Silence after which a peer is pinged. Finds peers that vanished without a word, and is below the idle limits of firewalls and NAT."""
STREAM_WINDOW_BYTES = 4096
"""Bytes of a stream that a client's process holds, beyond the message that it reads: about six step frames of 32 streams.

Reading one message of a stream takes two to three iterations of the event loop, which are long in a process that lacks CPU time. With
gRPC's window of 64 KiB and more, a thousand step frames or load records would queue up and arrive seconds late. With a small window the
sender waits, and merges its data into one message. For a longer message gRPC widens the window, which costs both sides a message: with
512 bytes a mesh used 5 % more CPU per token, and the first token of a single request came 5 % later.
"""


def _common_options(settings: RpcSettings, *, received_bytes_max: int) -> Options:
    return [
        ("grpc.max_receive_message_length", received_bytes_max),
        ("grpc.max_send_message_length", settings.message_bytes_max),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_metadata_size", 32 * 1024),
    ]


def server_options(settings: RpcSettings) -> Options:
    return [
        *_common_options(settings, received_bytes_max=settings.request_bytes_max or settings.message_bytes_max),
        ("grpc.max_concurrent_streams", settings.streams_max),
        ("grpc.server_handshake_timeout_ms", round(settings.handshake_timeout_s * 1000)),
        # Bit 0 is the identity: kvmesh compresses nothing, and gRPC would decompress a message before its sender is known.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
        # Two processes on one port would share the requests without anyone noticing.
        ("grpc.so_reuseport", 0),
        # Peers ping each KEEPALIVE_S; half of it leaves room for their clocks.
        ("grpc.http2.min_ping_interval_without_data_ms", round(KEEPALIVE_S * 500)),
        ("grpc.enable_channelz", int(settings.has_channelz)),
        *([("grpc.max_allowed_incoming_connections", settings.connections_max)] if settings.connections_max else []),
    ]


def channel_options(settings: RpcSettings) -> Options:
    name = settings.tls_server_name if isinstance(settings, PublicRpcSettings) else ""
    return [
        *_common_options(settings, received_bytes_max=settings.message_bytes_max),
        # In spite of its name: it bounds a try to connect, and a try that failed sooner is not waited for.
        ("grpc.min_reconnect_backoff_ms", round(settings.connect_timeout_s * 1000)),
        ("grpc.initial_reconnect_backoff_ms", round(settings.reconnect_min_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(settings.reconnect_max_s * 1000)),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        # It would widen the window to what the network could carry.
        ("grpc.http2.bdp_probe", 0),
        # Without it a new channel inherits the back-off of an earlier one to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        # Retries are the caller's decision: it knows whether anything was done.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        *([("grpc.ssl_target_name_override", name)] if name else []),
    ]


def server_credentials(settings: RpcSettings, mesh: CertificateSource | None = None) -> grpc.ServerCredentials | None:
    """Credentials for the server's port, None without TLS. `mesh`: mesh TLS. Reads the files."""
    if mesh is not None:
        return mesh_server_credentials(mesh)
    if not isinstance(settings, PublicRpcSettings) or not settings.tls_certificate_file:
        return None
    authority = _read(settings.tls_authority_file)
    pair = (Path(settings.tls_key_file).read_bytes(), Path(settings.tls_certificate_file).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=authority is not None)


def channel_credentials(settings: PublicRpcSettings) -> grpc.ChannelCredentials | None:
    """Credentials of channels to frontends, None without TLS. Reads the files."""
    if not settings.has_tls:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(settings.tls_authority_file),
        private_key=_read(settings.tls_key_file),
        certificate_chain=_read(settings.tls_certificate_file),
    )


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
