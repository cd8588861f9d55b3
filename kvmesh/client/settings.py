"""How a client reaches a mesh."""

from dataclasses import dataclass, field

import grpc

from kvmesh.client.retries import RetryPolicy
from kvmesh.rpc.settings import Options, RpcSettings, channel_credentials, channel_options
from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Shared by both clients. TLS files and message sizes are those of `rpc`."""

    api_key: str = setting("", "Key that goes with every call. Empty: none.", secret=True)
    timeout_s: float = setting(600.0, "Longest call, all its tries together, where none is given.", min=0.001)
    uses_tls: bool = setting(False, "Encrypt, and trust the authorities that gRPC knows, where no TLS files are given.")
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rpc: RpcSettings = field(default_factory=RpcSettings)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Reads the files."""
        found = channel_credentials(self.rpc)
        return grpc.ssl_channel_credentials() if found is None and self.uses_tls else found

    def options(self) -> Options:
        """gRPC's own settings."""
        return channel_options(self.rpc)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
