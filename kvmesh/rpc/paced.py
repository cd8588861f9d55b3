"""Limits how often a stream is written to, so that items queued between two writes share a message."""

import asyncio
from collections.abc import Callable
from typing import Any

from grpc.aio import AioRpcError

DEFAULT_PACE_S = 0.002


class PacedWrites:
    """Writes a message soon after each `wake`, and at most one per `pace_s`.

    A message has a fixed cost at both ends, which is larger than the cost of its content. The first message after a pause is written
    immediately.
    """

    def __init__(self, call: Any, *, pace_s: float = DEFAULT_PACE_S) -> None:
        self._call = call
        self._pace_s = pace_s
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        self._wakeup.set()

    async def run(self, take: Callable[[], Any], first: Any = None) -> None:
        """Runs until the stream ends or the task is cancelled. `take` returns the next message; `first` is written before all others."""
        loop, next_s = asyncio.get_running_loop(), 0.0
        try:
            if first is not None:
                await self._call.write(first)
            while True:
                await self._wakeup.wait()
                if (early_s := next_s - loop.time()) > 0:
                    await asyncio.sleep(early_s)
                # Before `take`: an item that is queued during the write must wake the loop again.
                self._wakeup.clear()
                await self._call.write(take())
                # From the end of the write, which waits for gRPC's flow control.
                next_s = loop.time() + self._pace_s
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader gets the same error and raises it.
