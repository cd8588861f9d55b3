"""Time as an argument: decisions take `now`, long-lived objects take a Clock."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests and simulations replace."""

    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary zero."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people and for other machines."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Waits `delay_s` seconds of this clock; 0 or less yields once. Can be cancelled."""
        ...


class SystemClock:
    """The running event loop's time, so that a loop on virtual time carries everything with it."""

    def now(self) -> float:
        """The running loop's time, or the monotonic clock outside a loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    def wall(self) -> float:
        """The machine's wall clock."""
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(max(0.0, delay_s))
