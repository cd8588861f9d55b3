"""Parts: what `run_parts` starts and stops."""

from typing import Protocol, runtime_checkable


class Part(Protocol):
    """Something that is started and closed: a server, a pool, an engine, a registration."""

    async def start(self) -> None:
        """Returns when later parts can use this one. May be cancelled; then `aclose` is called, too."""
        ...

    async def aclose(self) -> None:
        """Releases everything. Called once, also after a failed or cancelled `start`."""
        ...


@runtime_checkable
class RunningPart(Part, Protocol):
    """A part with work of its own between start and close."""

    async def run(self) -> None:
        """Runs until `aclose` ends it or the runner cancels it. It may return early. An exception stops the whole process."""
        ...


class PartFailedError(Exception):
    """A part failed to start, to run or to close. `__cause__` is its exception."""

    def __init__(self, part: object, phase: str) -> None:
        self.part_name = name_of(part)
        self.phase = phase
        super().__init__(f"{self.part_name} failed while {phase}")


def name_of(part: object) -> str:
    return type(part).__name__
