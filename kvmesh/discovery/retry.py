"""Pauses between attempts: exponential backoff with jitter, and a sleep that an event ends early."""

import asyncio
from collections.abc import Callable

from kvmesh.clock import Clock


class Backoff:
    """Doubles from `first_s` to `max_s`. A random part of each delay, at most half, is subtracted, so that clients spread out."""

    def __init__(self, *, first_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._random = random
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Returns the delay after one more failure."""
        delay_s = min(self._ceiling_s, self._max_s) * (1.0 - 0.5 * self._random())
        self._ceiling_s = min(self._ceiling_s * 2.0, self._max_s)
        return delay_s

    def reset(self) -> None:
        """Call this after a success."""
        self._ceiling_s = self._first_s


async def sleep_unless(clock: Clock, delay_s: float, event: asyncio.Event) -> bool:
    """Sleeps for `delay_s` or until `event` is set. Returns whether the event is set. Leaves no task behind when cancelled."""
    if event.is_set():
        return True
    sleeper = asyncio.ensure_future(clock.sleep(delay_s))
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((sleeper, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeper.cancel()
        waiter.cancel()
    return event.is_set()
