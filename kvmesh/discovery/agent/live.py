"""The state on a clock: applies due changes, and wakes the callers that wait for changes."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvmesh.clock import Clock
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.retry import sleep_unless

T = TypeVar("T")

# Longest sleep when nothing is due. A change ends it early.
_IDLE_S = 3600.0


class LiveState:
    """Owns an AgentState. Every change goes through `change`, every wait through `wait_change`. `is_closing`: waits end immediately."""

    def __init__(self, state: AgentState, clock: Clock) -> None:
        self.state = state
        self._clock = clock
        # A dict keeps the order of arrival; with a set, simulated runs would not be reproducible.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._has_changed = asyncio.Event()
        self.is_closing = False

    @property
    def waiting(self) -> int:
        """Callers of `wait_change`."""
        return len(self._waiters)

    def change(self, decide: Callable[[AgentState, float], T]) -> T:
        """Applies what is due, then `decide`, and wakes all waiters if anything changed."""
        before = self.state.index
        now = self._clock.now()
        try:
            self.state.advance(now)
            return decide(self.state, now)
        finally:
            # Also if `decide` raises, because `advance` may have changed something.
            # A heartbeat without a change of status brings no deadline nearer, so `run` need not recompute its sleep.
            if self.state.index != before:
                self.wake()
                self._has_changed.set()

    async def wait_change(self) -> None:
        """Waits for any change or for `close`."""
        if self.is_closing:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    async def run(self) -> None:
        """Applies what is due. Runs until cancelled."""
        while True:
            self.change(lambda state, now: None)
            # After `change`, which may set it.
            self._has_changed.clear()
            deadline = self.state.next_deadline()
            pause_s = _IDLE_S if deadline is None else max(0.0, deadline - self._clock.now())
            await sleep_unless(self._clock, pause_s, self._has_changed)

    def close(self) -> None:
        self.is_closing = True
        self.wake()

    def wake(self) -> None:
        """Resumes all waiters. Each compares its own index again: changes are rare, so one list of waiters will do."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
