"""A queue that refuses instead of growing."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from kvmesh.errors import OverloadedError, UnavailableError

T = TypeVar("T")


class QueueClosedError(Exception):
    """The queue is closed and empty: no more items will come."""


class BoundedQueue(Generic[T]):
    """First in, first out, for any number of producers and consumers on one event loop.

    1. It holds at most `items_max` items.
    2. Every item put is given to exactly one `get`, in order; a cancelled `get` takes none.
    3. After `close`, items left are still given out.
    """

    def __init__(self, items_max: int, *, name: str = "queue") -> None:
        if items_max < 1:
            raise ValueError("a queue holds at least one item")
        self.items_max = items_max
        self._name = name
        self._items: deque[T] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_closed(self) -> bool:
        """True after `close`; items may be left."""
        return self._is_closed

    def put_nowait(self, item: T) -> None:
        """Adds an item. OverloadedError when full, UnavailableError when closed; the queue is unchanged then."""
        if self._is_closed:
            raise UnavailableError(f"{self._name} is closed", reason="queue_closed")
        if len(self._items) >= self.items_max:
            raise OverloadedError(f"{self._name} is full ({self.items_max})", reason="queue_full")
        self._items.append(item)
        self._wake_one()

    def get_nowait(self) -> T:
        """The next item. asyncio.QueueEmpty when there is none now, QueueClosedError when there never will be."""
        if self._items:
            return self._items.popleft()
        if self._is_closed:
            raise QueueClosedError(self._name)
        raise asyncio.QueueEmpty

    async def get(self) -> T:
        """Waits for the next item. QueueClosedError when the queue is closed and empty."""
        while not self._items and not self._is_closed:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                # The wake-up meant for this consumer goes to the next one, else an item could lie unseen.
                if waiting.done() and not waiting.cancelled():
                    self._wake_one()
                else:
                    self._waiting.remove(waiting)
                raise
        return self.get_nowait()

    def close(self) -> None:
        """Refuses further items and wakes all consumers. Idempotent."""
        self._is_closed = True
        while self._waiting:
            self._wake_one()

    def __aiter__(self) -> "BoundedQueue[T]":
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except QueueClosedError:
            raise StopAsyncIteration from None

    def _wake_one(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
