"""Turns of requests that wait: tenants alternate, each with its oldest request first. Not for use from several threads."""

import asyncio
from collections import deque
from collections.abc import Callable

from kvmesh.errors import OverloadedError

STARTS_PER_ITERATION = 16
"""Requests that start in one iteration of the event loop. Preparing and placing one takes about half a millisecond. With 4, a burst
reaches the workers in up to four times as many messages, which costs 10 to 20 % more CPU per token (`python -m bench.beside_commit`)."""
WAIT_S_MAX = 10.0
"""Longest wait of a request for its start; then its client retries."""


class TenantTurns:
    """Requests that wait, by tenant in the order of their turns."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Changed by this class only."""

    def add(self, tenant: str) -> asyncio.Future[None]:
        """Returns a future that `next` resolves. Cancelling it gives up the turn."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(tenant, deque()).append(turn)
        return turn

    def next(self, allows: Callable[[str], bool] = lambda tenant: True) -> bool:
        """Gives a turn to the next request of a tenant that `allows` accepts. Returns False if none waits."""
        while (tenant := next(filter(allows, self.waiting), None)) is not None:
            turns = self.waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                # Behind the other tenants.
                self.waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return True
        return False


class RequestStarts:
    """Starts few requests in each iteration of the event loop, tenants in turn.

    Requests that arrive together would otherwise start in one iteration, so that a tenant with many of them would delay every other
    tenant's requests, and the tokens of all streams, by the time that all of these starts take.
    """

    def __init__(
        self, starts_max: int = STARTS_PER_ITERATION, *, allows: Callable[[str], bool] = lambda tenant: True
    ) -> None:
        """`allows`: whether a request of the tenant may start now. Call `wake` when that may have changed."""
        self._starts_max = starts_max
        self._allows = allows
        self._started = 0
        self._is_scheduled = False
        self._turns = TenantTurns()

    async def wait(self, tenant: str) -> None:
        """Returns when a request of the tenant may start. OverloadedError if it must wait for longer than WAIT_S_MAX."""
        # A new request must not overtake those that wait, even if its tenant may start one.
        if not self._turns.waiting and self._started < self._starts_max and self._allows(tenant):
            self._started += 1
            # `_begin_iteration` resets the count.
            self._schedule()
            return
        turn = self._turns.add(tenant)
        self._schedule()
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await turn
        except TimeoutError:
            message = "the frontend is overloaded, and this tenant has more than its share of requests in flight"
            raise OverloadedError(message, reason="frontend_overloaded", retry_after_s=1.0) from None

    @property
    def has_waiting(self) -> bool:
        return bool(self._turns.waiting)

    def wake(self) -> None:
        """Starts requests that are now allowed."""
        if self._turns.waiting:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._is_scheduled = False
        self._started = 0
        while self._started < self._starts_max and self._turns.next(self._allows):
            self._started += 1
        if self._started:
            self._schedule()
