"""Time as an argument: decisions take `now`, long-lived objects take a Clock."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol

LATE_S = 0.2
"""A timer that fires so much late shows that the process was paused: stopped, suspended, or without CPU."""
WAKING_S = 1.0
"""After a pause of the process, messages that arrived during the pause wait in the sockets.

They are read within this time, before a peer counts as silent.
"""


class Clock(Protocol):
    """A source of time that tests and simulations replace."""

    def now(self) -> float:
        """Returns the seconds on a monotonic scale with an arbitrary zero."""
        ...

    def wall(self) -> float:
        """Returns the seconds since the Unix epoch, for people and for other machines."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Waits `delay_s` seconds of this clock; 0 or less yields once. Can be cancelled."""
        ...


class SystemClock:
    """The running event loop's time, so that a loop on virtual time carries everything with it."""

    def now(self) -> float:
        """Returns the running loop's time, or the monotonic clock outside a loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))


def stood_still(due_s: float, now_s: float) -> bool:
    """Returns True if a timer that was due at `due_s` fires so late that the process was paused.

    Part of the time was not silence of the peer.
    """
    return now_s - due_s >= LATE_S


class AwakeTimer:
    """Calls `on_time` after `limit_s`, not counting time in which this process was paused, up to `limit_s` of it."""

    __slots__ = ("_left_s", "_loop", "_on_time", "_timer")

    def __init__(self, limit_s: float, on_time: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s = limit_s
        self._on_time = on_time
        self._timer: asyncio.TimerHandle | None = None
        self._wait(limit_s)

    def cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _wait(self, wait_s: float) -> None:
        self._timer = self._loop.call_later(wait_s, self._on_timer, self._loop.time() + wait_s)

    def _on_timer(self, due_s: float) -> None:
        self._timer = None
        now_s = self._loop.time()
        if self._left_s <= 0 or not stood_still(due_s=due_s, now_s=now_s):
            self._on_time()
            return
        more_s = min(self._left_s, max(now_s - due_s, WAKING_S))
        self._left_s -= more_s
        self._wait(more_s)


class awake_timeout:  # noqa: N801 (used like asyncio.timeout)
    """`asyncio.timeout` that does not count time in which this process was paused, up to `limit_s` of it."""

    __slots__ = ("_limit_s", "_timeout", "_timer")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._timer = AwakeTimer(self._limit_s, partial(_expire, self._timeout))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)


def _expire(timeout: asyncio.Timeout) -> None:
    # Not a method: the timer must not refer to the object that has it, or each use would leave a reference cycle.
    timeout.reschedule(asyncio.get_running_loop().time())
