"""Runs parts: start in order, drain, stop in reverse. Every wait is bounded."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.event_log import event_logger
from kvmesh.lifecycle.parts import Part, PartFailedError, RunningPart, name_of
from kvmesh.settings import internal, setting

_log = event_logger(__name__)

STOP_TIMEOUT_S = 10.0
"""Longest close of one part: it closes connections and threads; requests have ended before."""
HURRY_TIMEOUT_S = 1.0
"""Longest close of one part after a second signal, and longest cleanup of a task that is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings:
    """Time limits for starting and stopping a process."""

    start_timeout_s: float = internal(300.0, "Longest start of one part. A worker adds the start of its engine.")
    drain_timeout_s: float = setting(30.0, "Longest wait for requests in flight when stopping.", min=0)


async def run_parts(
    parts: Sequence[Part],
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], Awaitable[None]] | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
    hurry: asyncio.Event | None = None,
    settings: LifecycleSettings | None = None,
) -> None:
    """Starts `parts` in order, calls `on_ready`, waits for `stop`, drains, and closes in reverse.

    1. A part is closed exactly once if its start was begun, even if the start failed.
    2. A part that fails to start or fails while running stops the rest without draining.
    3. `hurry` ends the drain and shortens every close.
    4. A cancel counts as `stop` and `hurry`: parts are closed before CancelledError is raised.

    Raises the failure as PartFailedError, several as an ExceptionGroup of them.
    """
    runner = _Runner(settings=settings or LifecycleSettings(), stop=stop, hurry=hurry or asyncio.Event())
    async with asyncio.TaskGroup() as tasks:
        try:
            if await runner.start_all(parts, tasks):
                # A stop during `on_ready` still drains, since there may be requests already.
                await runner.bounded_by_stop(_call(on_ready), "becoming ready")
                await runner.wait_stop()
                await runner.drain(drain)
        except asyncio.CancelledError:
            runner.hurry.set()
            raise
        finally:
            await runner.close_despite_cancels()
    if len(runner.failures) == 1:
        raise runner.failures[0]
    if runner.failures:
        raise ExceptionGroup("several parts failed", runner.failures)


@dataclass(kw_only=True)
class _Runner:
    settings: LifecycleSettings
    stop: asyncio.Event
    hurry: asyncio.Event
    failures: list[PartFailedError] = field(default_factory=list)
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _begun: list[tuple[Part, asyncio.Task[None] | None]] = field(default_factory=list)

    async def start_all(self, parts: Sequence[Part], tasks: asyncio.TaskGroup) -> bool:
        """Returns True when all parts run; False after a failure or `stop`."""
        for part in parts:
            # Before the start: a part whose start fails or is cancelled is closed too (invariant 1).
            self._begun.append((part, None))
            if not await self.bounded_by_stop(self._start(part), "starting", part):
                return False
            if isinstance(part, RunningPart):
                self._begun[-1] = (part, tasks.create_task(self._run(part), name=f"run {name_of(part)}"))
        return not self._failed.is_set()

    async def bounded_by_stop(self, work: Awaitable[None], phase: str, part: object = None) -> bool:
        """Runs `work` until `stop` or the failure of a running part. True when it succeeded."""
        task = asyncio.ensure_future(work)
        try:
            await self._wait_first(task, self.stop, self._failed)
        finally:
            # Read before the cancel: an error that the cancel causes is not a failure of the part.
            is_done = task.done()
            if not is_done:
                await _cancel(task, timeout_s=STOP_TIMEOUT_S)
        if is_done and (error := task.exception()) is not None:
            self._fail(part or work, phase, error)
        return is_done and not self.failures and not self.stop.is_set()

    async def wait_stop(self) -> None:
        """Waits for `stop` or the first failure."""
        await self._wait_first(None, self.stop, self._failed)

    async def drain(self, drain: Callable[[], Awaitable[None]] | None) -> None:
        """Waits for requests in flight, unless a part has failed, until `hurry`."""
        if drain is None or self._failed.is_set():
            return
        _log.info("drain_started", timeout_s=self.settings.drain_timeout_s)
        task = asyncio.ensure_future(drain())
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._wait_first(task, self.hurry, self._failed)
        except TimeoutError:
            _log.warning("drain_timed_out")
        finally:
            is_done = task.done()
            if not is_done:
                await _cancel(task, timeout_s=HURRY_TIMEOUT_S)
        if is_done and (error := task.exception()) is not None:
            self._fail(drain, "draining", error)

    async def close_despite_cancels(self) -> None:
        """Closes all parts. A cancel in the meantime shortens their closes, and is raised afterwards."""
        closing, cancel = asyncio.ensure_future(self.close_all()), None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                self.hurry.set()
                cancel = error
        if cancel is not None:
            raise cancel

    async def close_all(self) -> None:
        """Closes started parts in reverse. A part that does not close in time does not stop the others from closing."""
        while self._begun:
            # Removed before the close, so that a part is closed only once (invariant 1).
            part, running = self._begun.pop()
            task = asyncio.ensure_future(part.aclose())
            await self._wait_closed(task, part)
            # `aclose` should have ended `run`. A part whose `run` continues is cancelled.
            if running is not None and not running.done():
                await _cancel(running, timeout_s=HURRY_TIMEOUT_S)

    async def _wait_closed(self, task: "asyncio.Future[None]", part: Part) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._wait_first(task, self.hurry)
            if not task.done():
                await asyncio.wait([task], timeout=HURRY_TIMEOUT_S)
        except TimeoutError:
            pass
        if not task.done():
            await _cancel(task, timeout_s=HURRY_TIMEOUT_S)
            self._fail(part, "closing", TimeoutError("did not close in time"))
        elif not task.cancelled() and (error := task.exception()) is not None:
            self._fail(part, "closing", error)
        _log.debug("part_closed", part=name_of(part))

    async def _start(self, part: Part) -> None:
        async with asyncio.timeout(self.settings.start_timeout_s):
            await part.start()
        _log.debug("part_started", part=name_of(part))

    async def _run(self, part: RunningPart) -> None:
        try:
            await part.run()
        except Exception as error:  # noqa: BLE001 (the boundary of a part; run_parts raises the failure)
            self._fail(part, "running", error)

    def _fail(self, part: object, phase: str, error: BaseException) -> None:
        failure = PartFailedError(part, phase)
        failure.__cause__ = error
        self.failures.append(failure)
        self._failed.set()
        _log.error("part_failed", exc_info=error, part=failure.part_name, phase=phase)

    @staticmethod
    async def _wait_first(task: "asyncio.Future[None] | None", *events: asyncio.Event) -> None:
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits if task is None else [*waits, task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


async def _call(function: Callable[[], Awaitable[None]] | None) -> None:
    if function is not None:
        await function()


async def _cancel(task: "asyncio.Future[None]", *, timeout_s: float) -> None:
    # The wait is bounded, since a task may hang in its own cleanup.
    task.cancel()
    await asyncio.wait([task], timeout=timeout_s)
