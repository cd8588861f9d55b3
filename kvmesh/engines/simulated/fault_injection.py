"""Faults that tests inject into a simulated engine. Random ones are drawn from the settings' seed."""

from dataclasses import dataclass
from random import Random

from kvmesh.errors import LostError, MeshError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """No step for `duration_s` of the engine's clock."""

    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """That fraction of submissions is refused as overloaded; 0 ends it."""

    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseKv:
    """The blocks of the next `handles` handles are freed and overwritten at once; what was in them is gone."""

    handles: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Die:
    """The engine is gone: `steps` raises LostError, its KV memory cannot be read any more."""

    message: str = "the simulated engine died"


Fault = Stall | Refuse | LoseKv | Die


class FaultState:
    """Which faults are on."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._refused_fraction = 0.0
        self._handles_to_lose = 0
        self._stall_s = 0.0
        self.death: LostError | None = None

    def inject(self, fault: Fault) -> None:
        match fault:
            case Stall():
                self._stall_s += fault.duration_s
            case Refuse():
                self._refused_fraction = fault.fraction
            case LoseKv():
                self._handles_to_lose += fault.handles
            case Die():
                self.die_of(LostError(fault.message, reason="engine_died"))

    def die_of(self, error: MeshError | None) -> None:
        """Remembers the first cause of death, as the error that the consumer of steps gets."""
        if self.death is None and error is not None:
            self.death = LostError(error.message, reason=error.reason)

    def check_submit(self) -> None:
        """OverloadedError for the refused ones."""
        if self._refused_fraction and self._random.random() < self._refused_fraction:
            raise OverloadedError("refused by an injected fault", reason="fault", retry_after_s=0.1)

    def take_stall_s(self) -> float:
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def takes_handle(self) -> bool:
        """True when the handle just made is to be lost."""
        if not self._handles_to_lose:
            return False
        self._handles_to_lose -= 1
        return True
