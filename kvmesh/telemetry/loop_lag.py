"""Measures how late the event loop runs what is due: the time that every request of the process waits before any of its own work."""

import asyncio
import time
from collections.abc import Callable

from kvmesh.telemetry.metrics import Instruments

PERIOD_S = 0.05
"""A delay of the loop that is longer is always found; shorter ones are found in proportion."""
BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLag:
    """A part of a process; `run` measures until it is cancelled.

    The difference of the two metrics is the time for which the process waited for a CPU or for the interpreter's lock.
    """

    def __init__(self, instruments: Instruments, on_lag: Callable[[float], None] = lambda lag_s: None) -> None:
        """`on_lag` is called with each delay in seconds."""
        self._on_lag = on_lag
        self._timer: asyncio.TimerHandle | None = None
        self._lag = instruments.spreads(
            "event_loop_lag_seconds",
            help=f"Delay of a timer of the event loop, measured every {1000 * PERIOD_S:g} ms.",
            buckets=BUCKETS_S,
        ).of()
        self._work = instruments.spreads(
            "event_loop_lag_cpu_seconds",
            help="CPU time that the event loop's thread used during that delay: long work of its own.",
            buckets=BUCKETS_S,
        ).of()

    async def start(self) -> None:
        """Does nothing."""

    async def run(self) -> None:
        """Measures until cancelled."""
        self._measure_later()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def _measure_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + PERIOD_S
        self._timer = loop.call_at(due_s, self._measure, due_s, time.thread_time())

    def _measure(self, due_s: float, used_s: float) -> None:
        lag_s = max(0.0, asyncio.get_running_loop().time() - due_s)
        self._lag.observe(lag_s)
        # The CPU time counts from when the timer was set, so it may exceed the delay.
        self._work.observe(min(lag_s, time.thread_time() - used_s))
        self._measure_later()
        self._on_lag(lag_s)

    async def aclose(self) -> None:
        """Does nothing; the runner cancels `run`."""
