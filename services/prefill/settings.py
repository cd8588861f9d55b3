"""Settings of a prefill worker."""

from dataclasses import dataclass

from kvmesh.settings import setting
from kvmesh.worker.settings import HostSettings


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(HostSettings):
    """A worker's settings and the role's own."""

    waiting_prompt_tokens_max: int = setting(
        262144, "prompt tokens that may wait; beyond it prompts are shed; 0: no limit", min=0
    )
