"""Docker compose as an orchestrator: `docker compose up --scale`."""

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.errors import UnavailableError
from kvmesh.settings import setting

OUTPUT_SHOWN = 400
ACCEPTED_S = 2.0
"""A command that has not failed after this time counts as accepted, and continues: containers may drain for long."""
RUNS = frozenset({"running", "restarting", "created", "paused"})
"""States of containers that are there or will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeSettings:
    """The connector `compose`."""

    command: tuple[str, ...] = setting(("docker", "compose"), "The command, word by word.")
    project: str = setting("", "Name of the project. Empty: that of the folder.")
    files: tuple[str, ...] = setting((), "Compose files. Empty: those of the folder.")


class ComposeOrchestrator:
    """One project. A unit is a service. One command runs at a time; a size that arrives in the meantime is set afterwards."""

    name = "compose"

    def __init__(self, settings: ComposeSettings) -> None:
        self._settings = settings
        self._wanted: dict[str, int] = {}
        self._running: asyncio.Task[None] | None = None
        self._failure: UnavailableError | None = None

    async def resize(self, unit: str, workers: int) -> None:
        """Raises UnavailableError if this command, or the one before, failed."""
        self._raise_failure()
        if self._wanted.get(unit) == workers and self._running is None:
            wanted, _ = await self._count(unit)
            if wanted == workers:
                return
        self._wanted[unit] = workers
        if self._running is None:
            self._running = asyncio.create_task(self._apply())
        # `wait_for` would cancel the command at the timeout.
        await asyncio.wait({self._running}, timeout=ACCEPTED_S)
        self._raise_failure()

    async def sizes(self, unit: str) -> tuple[int, int]:
        """Returns the wanted and the running number.

        The wanted one is the last that was set while a command runs, and otherwise the number of containers.
        """
        there, running = await self._count(unit)
        return (self._wanted[unit] if self._running is not None and unit in self._wanted else there), running

    async def aclose(self) -> None:
        """Ends a command that still runs; compose continues with the containers when it is called again."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _apply(self) -> None:
        """Runs commands until all services have the size that was set last."""
        done: dict[str, int] = {}
        try:
            while waiting := {unit: size for unit, size in self._wanted.items() if done.get(unit) != size}:
                scales = [word for unit, size in waiting.items() for word in ("--scale", f"{unit}={size}")]
                await self._run("up", "--detach", "--no-deps", "--no-recreate", "--no-build", *scales, *waiting)
                done.update(waiting)
        except UnavailableError as error:
            self._failure = error
            self._wanted.clear()
        finally:
            # There was no await since the loop found nothing to do, so a size that is set later starts a new task.
            self._running = None

    async def _count(self, unit: str) -> tuple[int, int]:
        text = await self._run("ps", "--all", "--format", "json", unit)
        try:
            states = [str(each["State"]) for each in _objects(text) if each["Service"] == unit]
        except (ValueError, KeyError, TypeError) as error:
            raise UnavailableError(f"docker compose ps did not print JSON: {error}", reason="bad_answer") from None
        return sum(state in RUNS for state in states), states.count("running")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _run(self, *words: str) -> str:
        settings = self._settings
        options = [*(("--project-name", settings.project) if settings.project else ())]
        options += [word for file in settings.files for word in ("--file", file)]
        command = [*settings.command, *options, *words]
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        except OSError as error:
            raise UnavailableError(f"{settings.command[0]} cannot be started: {error}", reason="no_compose") from None
        output, errors = await _finish(process)
        if process.returncode:
            text = errors.decode(errors="replace").strip()[-OUTPUT_SHOWN:]
            raise UnavailableError(f"{' '.join(settings.command)} {words[0]} failed: {text}", reason="compose_failed")
        return output.decode(errors="replace")


async def _finish(process: Process) -> tuple[bytes, bytes]:
    """Waits for the end of a process. Cancelling ends it."""
    try:
        return await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        # Shielded: the process is waited for even if a second cancel ends this await.
        await asyncio.shield(process.wait())
        raise


def _objects(text: str) -> Sequence[dict[str, object]]:
    """Returns one JSON object per line, or, from older versions, one array."""
    if text.lstrip().startswith("["):
        found: list[dict[str, object]] = json.loads(text)
        return found
    return [json.loads(line) for line in text.splitlines() if line.strip()]
