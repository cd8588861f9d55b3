"""Reads a request stream ahead, so that whoever waits for the next message can be told that no more will be answered.

gRPC offers no way to end a stream from outside its handler: cancelling the handler's task leaves the call open.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Messages of one stream in order, at most `messages_max` ahead of the consumer."""

    def __init__(self, requests: AsyncIterator[T], *, messages_max: int) -> None:
        self._messages: deque[T] = deque()
        self._messages_max = messages_max
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self.is_ended = False
        self._reading = asyncio.create_task(self._read(requests), name="inbox")
        self._reading.add_done_callback(lambda _: self._arrived.set())

    def end(self) -> None:
        """No more messages are given out, also not those read ahead."""
        self.is_ended = True
        self._arrived.set()

    async def messages(self) -> AsyncIterator[T]:
        """All messages until the stream ends or `end` is called. Raises what reading raised."""
        while not self.is_ended:
            while self._messages and not self.is_ended:
                self._room.set()
                yield self._messages.popleft()
            if self._reading.done() and not self._messages:
                self._reading.result()
                return
            self._arrived.clear()
            if not self._messages and not self._reading.done() and not self.is_ended:
                await self._arrived.wait()

    def close(self) -> None:
        """Stops reading."""
        self._reading.cancel()

    async def _read(self, requests: AsyncIterator[T]) -> None:
        async for message in requests:
            self._messages.append(message)
            self._arrived.set()
            while len(self._messages) >= self._messages_max:
                self._room.clear()
                await self._room.wait()
