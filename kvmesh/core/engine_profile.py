"""A measured profile of an engine: what `kvmesh profile` writes, and simulations, workers and planners read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvmesh.core.worker import PerformanceProfile
from kvmesh.errors import InvalidRequestError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """`batch` prompts of `prompt_tokens` arrived together; of each, `uncached_tokens` were computed. All were computed after `time_s`."""

    prompt_tokens: int
    uncached_tokens: int
    batch: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """A decode step of `batch` requests that held `context_tokens` each took `step_s`, the mean of a run of steps."""

    batch: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPoint:
    """Time from the submission of a GENERATE leg with a handle until its first token."""

    prompt_tokens: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Relative errors of the fit over the points it was made of: root mean square, and largest."""

    rms: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """`fit`: the coefficients of the linear model. `machine`: where it was measured. Times include the call to the worker.

    `shares_steps`: prompts that arrive together share the fixed time of a prefill step; otherwise each has its own. `call_s`: the
    time of a call to the worker that does nothing.
    """

    version: int = VERSION
    model: str
    engine: str
    engine_version: str
    machine: Mapping[str, str] = field(default_factory=dict)
    measured_at: str = ""
    kv_tokens: int = 0
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    handoff: tuple[HandoffPoint, ...] = ()
    fit: PerformanceProfile = field(default_factory=PerformanceProfile)
    shares_steps: bool = True
    call_s: float = 0.0
    prefill_residuals: Residuals | None = None
    decode_residuals: Residuals | None = None

    @property
    def prompt_tokens_mean(self) -> float:
        """Mean length of the measured prompts."""
        return sum(point.prompt_tokens for point in self.prefill) / len(self.prefill) if self.prefill else 0.0

    @property
    def context_tokens_mean(self) -> float:
        """Mean context of the measured decode steps."""
        return sum(point.context_tokens for point in self.decode) / len(self.decode) if self.decode else 0.0


def to_text(profile: EngineProfile) -> str:
    """JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1).decode() + "\n"


def read_engine_profile(text: str | bytes, *, field: str) -> EngineProfile:
    """Raises InvalidRequestError for anything but a profile of this version."""
    try:
        # The version is read first, because a profile of another version may have fields that `EngineProfile` does not know.
        found = msgspec.json.decode(text, type=dict)
        if found.get("version") != VERSION:
            raise InvalidRequestError(
                f"the profile has version {found.get('version')!r}; this program reads {VERSION}", field=field
            )
        return msgspec.json.decode(text, type=EngineProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError) as error:
        raise InvalidRequestError(f"not a profile of `kvmesh profile`: {error}", field=field) from None
