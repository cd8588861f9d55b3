"""Limits the share of the event loop that reading large request bodies takes.

Large bodies are parsed and validated one at a time, tenants in turn, and after each the next waits for a multiple of the time that it
took. So however many large bodies arrive, all other work has most of the loop, and no tenant's bodies wait for all of another's.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvmesh.errors import OverloadedError
from services.frontend.pipeline.tenant_turns import TenantTurns

Result = TypeVar("Result")
LARGE_BYTES = 65_536
PAUSE_FACTOR = 3.0
"""Large bodies take at most a quarter of the loop."""


class LargeBodies:
    """The turns of large bodies. `bytes_max`: of the bodies that wait, all tenants together; one tenant may hold a quarter of it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting = TenantTurns()
        self._bytes: dict[str, int] = {}
        self._is_busy = False
        self.decompressing = asyncio.Semaphore(1)
        """One body at a time: zlib releases the interpreter's lock, but takes a core."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait or are being read."""
        return sum(self._bytes.values())

    async def run(self, tenant: str, size_bytes: int, read: Callable[[], Result]) -> Result:
        """Calls `read` when it is the body's turn; for a small one at once. OverloadedError if too much waits."""
        if size_bytes <= LARGE_BYTES:
            return read()
        async with self.turn(tenant, size_bytes):
            return read()

    @asynccontextmanager
    async def turn(self, tenant: str, size_bytes: int) -> AsyncIterator[None]:
        """Waits for the turn of a large body."""
        of_tenant = self._bytes.get(tenant, 0) + size_bytes
        if of_tenant > self._bytes_max // 4 or self.waiting_bytes + size_bytes > self._bytes_max:
            raise OverloadedError("too many large requests at a time", reason="bodies_full", retry_after_s=1.0)
        self._bytes[tenant] = of_tenant
        try:
            await self._wait_turn(tenant)
            began_s = time.perf_counter()
            try:
                yield
            finally:
                pause_s = PAUSE_FACTOR * (time.perf_counter() - began_s)
                asyncio.get_running_loop().call_later(pause_s, self._next)
        finally:
            self._bytes[tenant] -= size_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]

    async def _wait_turn(self, tenant: str) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn = self._waiting.add(tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        self._is_busy = self._waiting.next()
