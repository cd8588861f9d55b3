"""Messages of several requests on one stream."""

import asyncio
from typing import Any

from grpc.aio import ServicerContext


class StreamWriter:
    """gRPC takes one message at a time: the others wait, and the texts of those that wait are merged meanwhile.

    A message that gRPC has begun with is written to its end even when its request is cancelled: until then no status can
    be sent, so whoever ends the stream calls `settle` first.
    """

    def __init__(self, context: ServicerContext[Any, Any]) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        """Returns when gRPC has taken it."""
        async with self._lock:
            await self.settle()
            self._under_way = asyncio.ensure_future(self._context.write(message))
            await asyncio.shield(self._under_way)

    async def settle(self) -> None:
        """Waits for the message that is being written; what became of it is told to its writer."""
        if self._under_way is not None and not self._under_way.done():
            await asyncio.wait({self._under_way})
