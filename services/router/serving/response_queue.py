"""Responses that wait to be written to one Route stream.

gRPC has no way to end a stream from outside its handler: cancelling the handler's task leaves the call open. So the handler writes what
it takes from this queue, and returns when the queue has ended.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.core import Placement
from kvmesh.errors import MeshError


class AskResponse(NamedTuple):
    """The answer to an ask."""

    ask_id: int
    outcome: Placement | MeshError


class QueuedNotice(NamedTuple):
    """Says that asks are queued."""

    ask_ids: Sequence[int]


class ResponseQueue:
    """The responses of one stream, in order. `responses_max` limits only callers that use `wait_room`."""

    def __init__(self, *, responses_max: int) -> None:
        self._responses: deque[AskResponse | QueuedNotice] = deque()
        self._responses_max = responses_max
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        """Resolved to wake the task in `take`."""
        self._room = asyncio.Event()
        self.asks_queued = 0
        """Asks of this stream in the router's queue: their answers come although the frontend sends nothing more."""
        self._is_closed = False
        self.is_ended = False

    @property
    def is_empty(self) -> bool:
        return not self._responses

    @property
    def has_room(self) -> bool:
        return len(self._responses) < self._responses_max

    def put_nowait(self, response: AskResponse | QueuedNotice) -> None:
        self._responses.append(response)
        self._wake()

    def add_queued(self, change: int) -> None:
        self.asks_queued += change
        self._wake()

    async def wait_room(self) -> None:
        """Waits until fewer than `responses_max` responses are left."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """The frontend sends nothing more: `take` ends when no ask is queued."""
        self._is_closed = True
        self._wake()

    def end(self) -> None:
        """Makes `take` end after the queued responses."""
        self.is_ended = True
        self._wake()

    async def take(self, responses_max: int) -> Sequence[AskResponse | QueuedNotice]:
        """Waits for responses and returns 1 to `responses_max` of them. Empty: there are no more. Only one task may wait."""
        while not self._responses:
            if self.is_ended or (self._is_closed and not self.asks_queued):
                return ()
            self._reader = self._loop.create_future()
            await self._reader
        responses = [self._responses.popleft() for _ in range(min(responses_max, len(self._responses)))]
        self._room.set()
        return responses

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        # The future of a cancelled `take` is done.
        if reader is not None and not reader.done():
            reader.set_result(None)
