"""Calls a function at given times, accurate to microseconds, because event-loop timers have millisecond resolution. Linux only."""

import asyncio
import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class Arrivals(StrEnum):
    """Distribution of arrivals: one every 1/rate seconds, or random (Poisson)."""

    EVEN = "even"
    RANDOM = "random"


def gaps_s(arrivals: Arrivals, rate: float, generator: random.Random) -> Iterator[float]:
    """Yields the times between arrivals in seconds, endlessly."""
    while True:
        yield 1 / rate if arrivals is Arrivals.EVEN else generator.expovariate(rate)


class _Times(ctypes.Structure):
    """The kernel's itimerspec: a period (unused) and a time."""

    _fields_ = (
        ("period_s", ctypes.c_long),
        ("period_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Pacer:
    """Calls `call` in the running loop at each of its times, with that time, until it is closed.

    The kernel wakes the loop through a file descriptor. A sleeping thread would need the interpreter's lock and would take it from the loop
    under measurement.
    """

    def __init__(self, gaps: Iterator[float], call: Callable[[float], None]) -> None:
        self._gaps = gaps
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._library = ctypes.CDLL(None, use_errno=True)
        self._timer = self._library.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._due_at = time.perf_counter() + next(gaps)
        self._loop.add_reader(self._timer, self._on_time)
        self._set()

    def close(self) -> None:
        """Stops the calls."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _on_time(self) -> None:
        os.read(self._timer, 8)
        while self._due_at <= time.perf_counter():
            self._call(self._due_at)
            self._due_at += next(self._gaps)
        self._set()

    def _set(self) -> None:
        whole_s, part_s = divmod(self._due_at, 1)
        times = _Times(at_s=int(whole_s), at_ns=int(1e9 * part_s))
        if self._library.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, ctypes.byref(times), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
