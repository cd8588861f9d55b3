"""What is said on one stream, in order: whoever says something never waits, whoever hears asks may.

gRPC offers no way to end a stream from outside its handler: cancelling the handler's task leaves the call open. So the handler
gives out what is in here, and ends when it is told to.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages of one stream. `messages_max` is kept by those who wait for room before they say more."""

    def __init__(self, *, messages_max: int) -> None:
        self._messages: deque[T] = deque()
        self._messages_max = messages_max
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        """Of who waits in `take`."""
        self._room = asyncio.Event()
        self.awaited = 0
        """Messages that will be said although the other side says nothing more."""
        self.is_closed = False
        self.is_ended = False

    @property
    def is_idle(self) -> bool:
        """True when everything is sent."""
        return not self._messages

    @property
    def has_room(self) -> bool:
        """True while less than `messages_max` messages are unsent."""
        return len(self._messages) < self._messages_max

    def put_nowait(self, message: T) -> None:
        """Says something."""
        self._messages.append(message)
        self._wake()

    def expect(self, change: int) -> None:
        """So many more, or less, messages are awaited."""
        self.awaited += change
        self._wake()

    async def wait_room(self) -> None:
        """Until less than `messages_max` messages are unsent."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """The other side says nothing more: `take` ends after what is awaited."""
        self.is_closed = True
        self._wake()

    def end(self) -> None:
        """`take` ends after what has been said."""
        self.is_ended = True
        self._wake()

    async def take(self, most: int) -> Sequence[T]:
        """What is said, 1 to `most` messages, as soon as there is any; none: that was all. One task only may wait."""
        while not self._messages:
            if self.is_ended or (self.is_closed and not self.awaited):
                return ()
            self._reader = self._loop.create_future()
            await self._reader
        messages = [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
        self._room.set()
        return messages

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
