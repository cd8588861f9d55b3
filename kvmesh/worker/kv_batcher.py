"""An engine's KV events, gathered over a short time: a message per step costs worker and routers more than what is in it."""

import asyncio
from collections.abc import Callable, Sequence

from kvmesh.core import KvEvent

INTERVAL_S = 0.02
"""Time over which events are collected: a message per engine step costs both sides more."""
EVENTS_MAX = 4096
"""Events that wait at most; a router applies a message in one go."""


class KvChanges:
    """Passes changes on in order and together, `interval_s` after the first of them.

    Not at once after a time of quiet either: that would be just when a prompt's first token is on its way, and no router
    needs to hear of what it has placed itself any sooner.

    Invariant: while something waits, a timer runs that will pass it on.
    """

    def __init__(self, give: Callable[[Sequence[KvEvent]], None], interval_s: float = INTERVAL_S) -> None:
        self._give = give
        self._interval_s = interval_s
        self._events: list[KvEvent] = []
        self._timer: asyncio.TimerHandle | None = None

    def put_nowait(self, events: Sequence[KvEvent]) -> None:
        self._events.extend(events)
        if not self._interval_s or len(self._events) >= EVENTS_MAX:
            self.flush_nowait()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.flush_nowait)

    def flush_nowait(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if not self._events:
            return
        events, self._events = self._events, []
        self._give(events)
