"""Spaces the writes of a stream in time, so that what is queued meanwhile shares a message."""

import asyncio
from collections.abc import Callable
from typing import Any

from grpc.aio import AioRpcError

DEFAULT_PACE_S = 0.002


class PacedWrites:
    """Writes what `take` gives, soon after each `wake`; one message, then `pace_s` without another one.

    A message costs both its ends a fixed price, more than what is in it. The first one after a pause goes out at once, so pace
    costs time only where messages would come close together.
    """

    def __init__(self, call: Any, take: Callable[[], Any], *, pace_s: float = DEFAULT_PACE_S) -> None:
        self._call = call
        self._take = take
        self._pace_s = pace_s
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        self._wakeup.set()

    async def run(self, first: Any = None) -> None:
        """Until the stream ends or it is cancelled. `first` is a message of its own before all others."""
        loop, next_s = asyncio.get_running_loop(), 0.0
        try:
            if first is not None:
                await self._call.write(first)
            while True:
                await self._wakeup.wait()
                if (early_s := next_s - loop.time()) > 0:
                    await asyncio.sleep(early_s)
                self._wakeup.clear()
                await self._call.write(self._take())
                next_s = loop.time() + self._pace_s
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader sees the same end and tells everybody.
