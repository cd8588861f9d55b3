"""Limits the share of the event loop that reading large request bodies takes.

Large bodies are parsed and validated one at a time, tenants in turn, and after each the next waits for a multiple of the time that it
took. So however many large bodies arrive, all other work has most of the loop, and no tenant's bodies wait for all of another's.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvmesh.errors import OverloadedError
from services.frontend.pipeline.tenant_turns import TenantTurns

LARGE_BYTES = 65_536
PAUSE_FACTOR = 3.0
"""Large bodies take at most a quarter of the loop."""
ARRIVING_FACTOR = 4
"""How much more may arrive than wait: clients are slower than the parser."""


class HeldBytes:
    """Bytes that tenants hold. `most`: of all together; one tenant may hold a quarter of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self._bytes.values())

    def add(self, tenant: str, size_bytes: int) -> None:
        """Raises OverloadedError if it would be too much."""
        of_tenant = self._bytes.get(tenant, 0) + size_bytes
        if of_tenant > self._most // 4 or self.total + size_bytes > self._most:
            raise OverloadedError("too many large requests at a time", reason="bodies_full", retry_after_s=1.0)
        self._bytes[tenant] = of_tenant

    def remove(self, tenant: str, size_bytes: int) -> None:
        left = self._bytes.pop(tenant, 0) - size_bytes
        if left:
            self._bytes[tenant] = left


class LargeBodies:
    """The turns of large bodies. `bytes_max`: of the bodies that wait, all tenants together; one tenant may hold a quarter of it.

    `ARRIVING_FACTOR` times as much may arrive at a time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._waiting = TenantTurns()
        self._waiting_bytes = HeldBytes(bytes_max)
        self._arriving_bytes = HeldBytes(ARRIVING_FACTOR * bytes_max)
        self._is_busy = False
        self.decompressing = asyncio.Semaphore(1)
        """One body at a time: zlib releases the interpreter's lock, but takes a core."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait or are being read."""
        return self._waiting_bytes.total

    @contextmanager
    def arriving(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Counts a body while it arrives. The function takes its size so far, and raises OverloadedError if too much arrives."""
        held = 0

        def grow(size_bytes: int) -> None:
            nonlocal held
            if size_bytes > LARGE_BYTES:
                self._arriving_bytes.add(tenant, size_bytes - held)
                held = size_bytes

        try:
            yield grow
        finally:
            if held:
                self._arriving_bytes.remove(tenant, held)

    @asynccontextmanager
    async def turn(self, tenant: str, size_bytes: int) -> AsyncIterator[None]:
        """Waits for the turn of a large body. The block must not await. OverloadedError if too much waits."""
        self._waiting_bytes.add(tenant, size_bytes)
        try:
            await self._wait_turn(tenant)
            began_s = time.perf_counter()
            try:
                yield
            finally:
                pause_s = PAUSE_FACTOR * (time.perf_counter() - began_s)
                # `_is_busy` stays true during the pause.
                asyncio.get_running_loop().call_later(pause_s, self._next)
        finally:
            self._waiting_bytes.remove(tenant, size_bytes)

    async def _wait_turn(self, tenant: str) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn = self._waiting.add(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn was given to this task before the cancel. Without passing it on, no other body would get one.
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        self._is_busy = self._waiting.next()
