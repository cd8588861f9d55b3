"""An event loop on virtual time: nothing ready means that the clock jumps to the next timer.

Hours pass in milliseconds and a run repeats exactly. Real sockets and threads have no place on it: a loop with
nothing ready and no timer has nothing to wait for and raises DeadlockError.
"""

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits and nothing is scheduled that could wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Where a real selector would sleep, time jumps. Nothing is ever ready but what the loop put there itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop's own wake-up pipe is looked at, so that signals and Ctrl-C work.
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


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **options: _NumberedTask(next(numbers), work, loop=loop, **options))

    def time(self) -> float:
        return self._jumping.now_s

    def stand_still(self, duration_s: float) -> None:
        """As a process that is stopped and continued: time has passed, and everything that is due comes at once and late."""
        self._jumping.now_s += duration_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
