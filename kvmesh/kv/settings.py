"""Settings of KV handoffs, for all engines."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class KvSettings:
    """Time limits of a KV handoff."""

    lease_s: float = setting(30.0, "how long handed-out KV blocks are held for the decode worker", min=0.1)
    pull_timeout_s: float = setting(
        10.0,
        "longest pull; one that takes much longer than expected is abandoned sooner, and the prompt computed",
        min=0.01,
    )

    def __post_init__(self) -> None:
        if self.pull_timeout_s >= self.lease_s:
            raise ValueError("pull_timeout_s must be below lease_s")
