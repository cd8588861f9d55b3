"""Settings of clients, and when a call is retried."""

from dataclasses import dataclass, field
from random import Random

import grpc

from kvmesh.errors import KvLostError, LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.settings import Options, PublicRpcSettings, channel_credentials, channel_options
from kvmesh.settings import setting

# Refused, so that nothing was done, or lost before any output. Other errors would happen again.
RETRIABLE = (OverloadedError, UnavailableError, LostError, KvLostError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """For calls that have returned nothing yet."""

    attempts_max: int = setting(4, "Tries of one call, the first included; 1: no second one.", min=1, max=100)
    pause_s: float = setting(0.2, "Pause before the second try; it doubles with each further one.", min=0)
    pause_s_max: float = setting(
        30.0, "Longest pause. A server that asks for more is not waited for: its answer is raised.", min=0
    )

    def wait_s(self, error: MeshError, attempt: int, left_s: float, *, generator: Random) -> float | None:
        """Returns the seconds until the next try; None: raise the error. `attempt` counts from 0, `left_s` is the call's own time.

        At least the server's Retry-After, plus a random part of the growing pause, so that clients refused together do not retry together.
        """
        asked_s = error.retry_after_s or 0.0
        if not isinstance(error, RETRIABLE) or attempt + 1 >= self.attempts_max or asked_s > self.pause_s_max:
            return None
        # The limit keeps the power finite.
        grown_s = min(self.pause_s_max, self.pause_s * 2.0 ** min(attempt, 62))
        wait_s = asked_s + grown_s * generator.random()
        return wait_s if wait_s < left_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Shared by both clients. TLS files and message sizes are those of `rpc`."""

    api_key: str = setting("", "Key that goes with every call. Empty: none.", secret=True)
    timeout_s: float = setting(600.0, "Longest call, all its tries together, where none is given.", min=0.001)
    uses_tls: bool = setting(False, "Encrypt, and trust the authorities that gRPC knows, where no TLS files are given.")
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rpc: PublicRpcSettings = field(default_factory=PublicRpcSettings)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns None without TLS. Reads the files."""
        found = channel_credentials(self.rpc)
        return grpc.ssl_channel_credentials() if found is None and self.uses_tls else found

    def options(self) -> Options:
        return channel_options(self.rpc)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
