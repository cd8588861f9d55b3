"""See the package."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """See the stub."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
