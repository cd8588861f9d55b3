"""A worker's performance profile: the engine's figures, overridden by the settings."""

from dataclasses import dataclass, fields, replace

from kvmesh.core import PerformanceProfile
from kvmesh.settings import setting


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Measured figures of a worker, which routers use. Figures that are not set come from the engine, or routers learn them."""

    prefill_base_s: float | None = setting(None, "seconds of a prefill that do not depend on its length", min=0)
    prefill_s_per_token: float | None = setting(None, "seconds per prompt token to compute", min=1e-12)
    prefill_s_per_token_pair: float | None = setting(
        None, "seconds per prompt token to compute and token of context before it", min=0
    )
    decode_step_base_s: float | None = setting(None, "seconds of a decode step whatever the batch", min=0)
    decode_s_per_request: float | None = setting(None, "seconds that each running request adds to a step", min=0)
    decode_s_per_kv_token: float | None = setting(None, "seconds that each token held in KV adds to a step", min=0)
    kv_bytes_per_token: int | None = setting(None, "bytes of KV per token", min=1)
    transfer_bytes_per_s: float | None = setting(
        None, "bytes of KV per second that it receives", unit="bytes per second", min=1
    )
    itl_target_s: float | None = setting(None, "inter-token latency it should keep", min=1e-6)


def profile_of(engine: PerformanceProfile | None, settings: ProfileSettings) -> PerformanceProfile | None:
    """Returns None if neither the engine nor the settings give a figure."""
    given = {each.name: getattr(settings, each.name) for each in fields(ProfileSettings)}
    profile = replace(
        engine or PerformanceProfile(), **{name: value for name, value in given.items() if value is not None}
    )
    return None if profile == PerformanceProfile() else profile
