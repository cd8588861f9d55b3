"""What the runner runs."""

from typing import Protocol, runtime_checkable


class Part(Protocol):
    """Something with a beginning and an end: a server, a pool, an engine, a registration."""

    async def start(self) -> None:
        """Returns when the part can be used by the parts after it. May be cancelled; `aclose` is called then too."""
        ...

    async def aclose(self) -> None:
        """Releases everything. Called once, also after a failed or cancelled `start`."""
        ...


@runtime_checkable
class RunningPart(Part, Protocol):
    """A part with work of its own between start and close."""

    async def run(self) -> None:
        """Goes on until `aclose` ends it or the runner cancels it.

        Returning early is fine; an exception stops the whole process.
        """
        ...


class PartFailedError(Exception):
    """A part could not start, failed while running, or could not be closed; `__cause__` is its exception."""

    def __init__(self, part: object, phase: str) -> None:
        self.part_name = name_of(part)
        self.phase = phase
        super().__init__(f"{self.part_name} failed while {phase}")


def name_of(part: object) -> str:
    return type(part).__name__
