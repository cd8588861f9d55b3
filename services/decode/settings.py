"""Settings of a decode worker."""

from dataclasses import dataclass

from kvmesh.settings import setting
from kvmesh.worker.settings import HostSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(HostSettings):
    """A worker's settings and the role's own."""

    waiting_requests_max: int = setting(
        1024, "requests that may wait for a place in the batch; beyond it they are shed; 0: no limit", min=0
    )
