"""Collects an engine's KV events over a short time. A message per engine step costs worker and routers more than its events."""

import asyncio
from collections.abc import Callable, Sequence

from kvmesh.core import KvEvent

INTERVAL_S = 0.02
"""Time over which events are collected."""
EVENTS_MAX = 4096
"""Events that wait at most. A router applies a message without yielding."""


class KvEventBatcher:
    """Passes events on in order, as one batch `interval_s` after the first of them.

    The first event after a quiet time waits too: it occurs when a prompt's first token is about to be sent, and routers already know
    their own placements.

    Invariant: while events wait, a timer runs that passes them on.
    """

    def __init__(self, publish: Callable[[Sequence[KvEvent]], None], interval_s: float = INTERVAL_S) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._events: list[KvEvent] = []
        self._timer: asyncio.TimerHandle | None = None

    def put_nowait(self, events: Sequence[KvEvent]) -> None:
        """Adds events; passes all on when too many wait."""
        self._events.extend(events)
        if not self._interval_s or len(self._events) >= EVENTS_MAX:
            self.flush_nowait()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.flush_nowait)

    def flush_nowait(self) -> None:
        """Passes on the events that wait."""
        # Both are taken before `_publish`, which may add events.
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if not self._events:
            return
        events, self._events = self._events, []
        self._publish(events)
