"""One direction of one call."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kvmesh.simulation.virtual_loop import process_context

# Timers of asyncio fire up to its clock's resolution early.
_RESOLUTION_S = 1e-9


def has_come(at_s: float) -> bool:
    """Returns whether the loop's time has reached `at_s`."""
    return at_s - asyncio.get_running_loop().time() <= _RESOLUTION_S


class MemoryLink:
    """Delays by `latency_s()` per crossing; while it is down, everything waits."""

    def __init__(self, latency_s: Callable[[], float] | None) -> None:
        self.is_up = True
        self.extra_s = 0.0
        """Added to each crossing: a slow path."""
        # Distinguishes a partition from the one before.
        self.partitions = 0
        self._latency_s = latency_s
        # A dict keeps the order of arrival, which a set would not: a run must repeat exactly.
        self._waiting: dict[Callable[[], None], None] = {}

    def arrival_s(self) -> float:
        """Returns the loop's time at which something sent now arrives."""
        now = asyncio.get_running_loop().time()
        return now + self.extra_s + (0.0 if self._latency_s is None else max(0.0, self._latency_s()))

    def deliver(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the other side, after the latency and once the link is up."""
        if not self.is_up:
            self.when_up(callback)
            return
        at_s = self.arrival_s()
        if has_come(at_s):
            callback()
        else:
            asyncio.get_running_loop().call_at(at_s, self._arrived, callback, context=process_context())

    def when_up(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the link comes up again."""
        self._waiting[callback] = None

    def set_up(self, is_up: bool) -> None:
        """Takes the link down or up. When it is up, everything that waited arrives in the order it was sent."""
        self.partitions += self.is_up and not is_up
        self.is_up = is_up
        # A callback may take the link down again.
        while self.is_up and self._waiting:
            callback = next(iter(self._waiting))
            del self._waiting[callback]
            callback()

    def _arrived(self, callback: Callable[[], None]) -> None:
        if self.is_up:
            callback()
        else:
            self.when_up(callback)


class PipeEndedError(Exception):
    """The pipe has ended."""


class Pipe:
    """Messages in order, at most `items_max` unread, then the sender's final value.

    1. `on_last` is called once with the final value, when all messages before it are received.
    2. `discard` drops everything and fails the tasks that wait at either end.
    3. One sender and one receiver at a time.
    """

    def __init__(self, link: MemoryLink, items_max: int, on_last: Callable[[Any], None]) -> None:
        self._link = link
        self._items_max = items_max
        self._on_last = on_last
        self._items: deque[tuple[float, Any]] = deque()
        self._last: tuple[float, Any] | None = None
        self._is_over = False
        self._arrival_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def send(self, item: Any) -> None:
        """Waits for room. Raises PipeEndedError when the receiver is gone or `end` was called."""
        while len(self._items) >= self._items_max and not self._is_over:
            self._writer = _next(self._writer)
            await self._writer
        if self._is_over or self._last is not None:
            raise PipeEndedError
        self._items.append((self._next_arrival_s(), item))
        self._settle()

    def end(self, last: Any) -> None:
        """Sends the final value; only the first call has an effect."""
        if self._last is None and not self._is_over:
            self._last = (self._next_arrival_s(), last)
            self._settle()

    def discard(self) -> None:
        self._is_over = True
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
        _wake(self._reader)
        _wake(self._writer)

    async def receive(self) -> Any:
        """Returns the next message. PipeEndedError after the last one, and when discarded."""
        while not self._items or not self._is_here(self._items[0][0]):
            if self._is_over:
                raise PipeEndedError
            self._reader = _next(self._reader)
            await self._reader
        _, item = self._items.popleft()
        _wake(self._writer)
        self._settle()
        return item

    def _next_arrival_s(self) -> float:
        # Messages do not overtake each other, whatever the latencies drawn for them.
        self._arrival_s = max(self._arrival_s, self._link.arrival_s())
        return self._arrival_s

    def _is_here(self, at_s: float) -> bool:
        return self._link.is_up and has_come(at_s)

    def _settle(self) -> None:
        head = self._items[0] if self._items else self._last
        if head is None or self._is_over:
            return
        if not self._link.is_up:
            self._link.when_up(self._settle)
        elif not has_come(head[0]):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(head[0], self._settle, context=process_context())
        elif self._items:
            _wake(self._reader)
        else:
            self._is_over = True
            _wake(self._reader)
            self._on_last(head[1])


def _next(waiting: "asyncio.Future[None] | None") -> "asyncio.Future[None]":
    # gRPC fails the second of two concurrent reads or writes as well.
    if waiting is not None and not waiting.done():
        raise RuntimeError("two tasks read, or two tasks write, on one call at the same time")
    return asyncio.get_running_loop().create_future()


def _wake(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
