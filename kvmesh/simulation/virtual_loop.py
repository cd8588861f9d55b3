"""An event loop on virtual time: nothing ready means that the clock jumps to the next timer.

Hours pass in milliseconds and a run repeats exactly. Real sockets and threads have no place on it: a loop with
nothing ready and no timer has nothing to wait for and raises DeadlockError.

Several processes share the loop. `process_context` marks the tasks of one; `pause` stops them as SIGSTOP does: nothing of the process
runs, its timers fire late, and what others send it waits.
"""

import asyncio
import contextvars
import heapq
import itertools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
POLL_EVERY = 64
"""Iterations of the loop from one poll of its wake-up pipe to the next."""
_PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process", default="")


def process_context(process: str = "") -> contextvars.Context:
    """Returns a new, otherwise empty context.

    Tasks and timers created in it belong to the process. Others, such as the arrival of a message at a machine, belong to no process.
    """
    context = contextvars.Context()
    context.run(_PROCESS.set, process)
    return context


def current_process() -> str:
    """Returns an empty name outside of processes."""
    return _PROCESS.get()


class DeadlockError(RuntimeError):
    """Every task waits and nothing is scheduled that could wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Where a real selector would sleep, time jumps. Nothing is ever ready but what the loop put there itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = selectors.DefaultSelector()
        self._selects = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._selects += 1
        if self._selects % POLL_EVERY == 0 or timeout is None:
            # Polls the loop's own wake-up pipe, so that signals and Ctrl-C work.
            events = self._real.select(0)
            if events:
                return events
        if timeout is None:
            raise DeadlockError("nothing is ready and nothing is scheduled: every task waits for ever")
        self.now_s += max(0.0, timeout)
        return []


class _NumberedTask(asyncio.Task[Any]):
    """Hashed by its number within the loop and not by its address: asyncio keeps tasks in sets (a task group cancels its
    tasks in the order of one), and a run must repeat exactly."""

    def __init__(self, number: int, *args: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class _Handle(asyncio.Handle):
    """Waits while its process is paused."""

    __slots__ = ()
    _loop: "VirtualLoop"
    _context: contextvars.Context

    def _run(self) -> None:
        if not self._loop.holds(self, self._context):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    """The same for a timer."""

    __slots__ = ()
    _loop: "VirtualLoop"
    _context: contextvars.Context

    def _run(self) -> None:
        if not self._loop.holds(self, self._context):
            super()._run()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._paused: dict[str, list[asyncio.Handle]] = {}
        """Due callbacks of each paused process, in order."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **options: _NumberedTask(next(numbers), work, loop=loop, **options))

    def time(self) -> float:
        return self._jumping.now_s

    # asyncio has no other seam between a callback that is due and its call.

    def _call_soon(
        self, callback: Callable[..., Any], args: Any, context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        # As `BaseEventLoop.call_at` does: the loop counts cancelled timers with this flag, and removes them when they are many.
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def holds(self, handle: asyncio.Handle, context: contextvars.Context) -> bool:
        """Keeps a handle of a paused process until `resume`. False for other handles."""
        if not self._paused or (held := self._paused.get(context.get(_PROCESS, ""))) is None:
            return False
        held.append(handle)
        return True

    def pause(self, process: str) -> None:
        """Stops a process. It must not be paused."""
        assert process and process not in self._paused
        self._paused[process] = []

    def is_paused(self, process: str) -> bool:
        return process in self._paused

    def resume(self, process: str) -> None:
        """Continues a process: callbacks that became due while it was paused run now, in order."""
        self._ready.extend(self._paused.pop(process, ()))

    def stand_still(self, duration_s: float) -> None:
        """Behaves like a process that is stopped and continued: time has passed, and all due callbacks run together and late."""
        self._jumping.now_s += duration_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
