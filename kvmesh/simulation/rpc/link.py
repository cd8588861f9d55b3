"""The connection between all clients and one address: latency and partitions."""

import asyncio
from collections.abc import Callable

from kvmesh.simulation.virtual_loop import process_context

# Timers of asyncio fire up to its clock's resolution early.
_RESOLUTION_S = 1e-9


def has_come(at_s: float) -> bool:
    """Whether the loop's time has reached `at_s`."""
    return at_s - asyncio.get_running_loop().time() <= _RESOLUTION_S


class MemoryLink:
    """Delays by `latency_s()` per crossing; while it is down, everything waits."""

    def __init__(self, latency_s: Callable[[], float] | None) -> None:
        self.is_up = True
        self.extra_s = 0.0
        """Added to each crossing: a slow path."""
        # Distinguishes a partition from the one before.
        self.partitions = 0
        self._latency_s = latency_s
        # A dict keeps the order of arrival, which a set would not: a run must repeat exactly.
        self._waiting: dict[Callable[[], None], None] = {}

    def arrival_s(self) -> float:
        """The loop's time at which something sent now arrives."""
        now = asyncio.get_running_loop().time()
        return now + self.extra_s + (0.0 if self._latency_s is None else max(0.0, self._latency_s()))

    def deliver(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the other side, after the latency and once the link is up."""
        if not self.is_up:
            self.when_up(callback)
            return
        at_s = self.arrival_s()
        if has_come(at_s):
            callback()
        else:
            asyncio.get_running_loop().call_at(at_s, self._arrived, callback, context=process_context())

    def when_up(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the link comes up again."""
        self._waiting[callback] = None

    def set_up(self, is_up: bool) -> None:
        """Takes the link down or up. When it is up, everything that waited arrives in the order it was sent."""
        self.partitions += self.is_up and not is_up
        self.is_up = is_up
        while self.is_up and self._waiting:
            callback = next(iter(self._waiting))
            del self._waiting[callback]
            callback()

    def _arrived(self, callback: Callable[[], None]) -> None:
        if self.is_up:
            callback()
        else:
            self.when_up(callback)
