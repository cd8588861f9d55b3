"""Keeps several processes of one program running: starts them, restarts them when they die, ends them together."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvmesh.clock import Clock
from kvmesh.errors import InternalError
from kvmesh.event_log import event_logger
from kvmesh.lifecycle.process import PARENT_VARIABLE
from kvmesh.settings import internal

_log = event_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Restarts of dead processes. Pauses double from the first to the longest."""

    restart_min_s: float = internal(0.1, "First pause before the restart of a dead process.")
    restart_max_s: float = internal(10.0, "Longest pause before a restart.")
    steady_s: float = internal(
        10.0, "A process that lived this long counts as healthy: its pauses start from the first again."
    )
    deaths_max: int = internal(
        8, "Early deaths in a row, of all processes, while none is healthy. Then the whole program ends."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStatistics:
    """`running`: process ids by number; 0: the process is being restarted."""

    running: tuple[int, ...]
    restarts: int


class Supervisor:
    """Runs each command as one process.

    1. A command has at most one process at a time.
    2. No process outlives `run`, and none outlives this process.
    3. `stop` sends SIGTERM to all, `hurry` sends it again. Processes that are left after `stop_timeout_s` are killed.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        clock: Clock,
        stop_timeout_s: float,
        settings: SupervisorSettings | None = None,
    ) -> None:
        self._commands = tuple(commands)
        self._clock = clock
        self._stop_timeout_s = stop_timeout_s
        self._settings = settings or SupervisorSettings()
        self._children: list[asyncio.subprocess.Process | None] = [None] * len(self._commands)
        self._started_s = [0.0] * len(self._commands)
        self._early_deaths = 0
        self._restarts = 0

    def statistics(self) -> SupervisorStatistics:
        return SupervisorStatistics(
            running=tuple(child.pid if child is not None else 0 for child in self._children), restarts=self._restarts
        )

    async def run(self, *, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Runs until `stop`. InternalError when no process stays alive; it ends all processes first."""
        gave_up = asyncio.Event()
        keepers = [
            asyncio.create_task(self._keep(number, stop, gave_up), name=f"process-{number}")
            for number in range(len(self._commands))
        ]
        try:
            await self._wait_any(stop, gave_up)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
            # After the keepers have ended, which would restart what ends.
            await self._end_all(hurry)
        for keeper in keepers:
            if not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error
        if gave_up.is_set():
            raise InternalError(f"{self._early_deaths} processes died early; see their messages")

    async def _keep(self, number: int, stop: asyncio.Event, gave_up: asyncio.Event) -> None:
        pause_s = self._settings.restart_min_s
        while not stop.is_set():
            status = await self._run_once(number)
            lived_s = self._clock.now() - self._started_s[number]
            _log.error("process_died", process=number, status=status, lived_s=round(lived_s, 3))
            if lived_s >= self._settings.steady_s:
                pause_s = self._settings.restart_min_s
            if self._is_hopeless(lived_s):
                gave_up.set()
                return
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.restart_max_s)
            self._restarts += 1

    async def _run_once(self, number: int) -> int:
        """Starts a process and waits for its end. After a cancel, `_end_all` ends the process."""
        # Shielded, so that `_end_all` finds a process that starts during the cancel.
        child = await asyncio.shield(asyncio.ensure_future(self._start(number)))
        status = await child.wait()
        self._children[number] = None
        return status

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        self._started_s[number] = self._clock.now()
        child = await asyncio.create_subprocess_exec(
            *self._commands[number],
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            # Ctrl-C in a terminal reaches this process only, which signals the others once.
            start_new_session=True,
        )
        self._children[number] = child
        _log.info("process_started", process=number, pid=child.pid)
        return child

    def _is_hopeless(self, lived_s: float) -> bool:
        """Returns True when processes keep dying and none is healthy."""
        now_s, steady_s = self._clock.now(), self._settings.steady_s
        is_healthy = any(
            child is not None and now_s - started_s >= steady_s
            for child, started_s in zip(self._children, self._started_s, strict=True)
        )
        self._early_deaths = 0 if is_healthy or lived_s >= steady_s else self._early_deaths + 1
        return self._early_deaths >= self._settings.deaths_max

    async def _end_all(self, hurry: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(child.wait()) for child in self._children if child is not None]
        if not waits:
            return
        self._signal_all(signal.SIGTERM)
        hurried = asyncio.ensure_future(hurry.wait())
        all_ended = asyncio.ensure_future(asyncio.wait(waits))
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await asyncio.wait([all_ended, hurried], return_when=asyncio.FIRST_COMPLETED)
                if not all_ended.done():
                    self._signal_all(signal.SIGTERM)
                    await asyncio.shield(all_ended)
        except TimeoutError:
            _log.warning("processes_killed", timeout_s=self._stop_timeout_s)
        finally:
            hurried.cancel()
            # Also after a cancel: no process outlives `run` (invariant 2).
            self._signal_all(signal.SIGKILL)
        await all_ended

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child is not None and child.returncode is None:
                with suppress(ProcessLookupError):
                    child.send_signal(number)

    @staticmethod
    async def _wait_any(*events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
