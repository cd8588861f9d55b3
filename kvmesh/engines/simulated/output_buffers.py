"""Buffers of step outputs and of KV events between the engine and their consumers."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from kvmesh.core import KvEvent
from kvmesh.engines.base import StepOutput
from kvmesh.errors import MeshError


class StepOutlet:
    """A bounded buffer of step outputs; the engine pauses while it is full."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self._outputs: deque[StepOutput] = deque()
        self._closed = False
        self._error: MeshError | None = None
        self._filled: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._take: Callable[[StepOutput], None] | None = None

    @property
    def has_room(self) -> bool:
        """True when the engine may go on."""
        return len(self._outputs) < self._steps_max

    def put_nowait(self, output: StepOutput) -> None:
        """Adds an output, beyond the bound if necessary, or passes it to the consumer of `deliver`."""
        if self._take is None:
            self._outputs.append(output)
            _resolve(self._filled)
            return
        try:
            self._take(output)
        except Exception as error:  # noqa: BLE001  # The consumer's own, raised in its `deliver`.
            self._take = None
            if self._filled is not None and not self._filled.done():
                self._filled.set_exception(error)

    def close_nowait(self, error: MeshError | None = None) -> None:
        """Ends the outputs after those in the buffer, with `error` if given."""
        self._closed, self._error = True, error
        _resolve(self._filled)
        _resolve(self._emptied)

    async def wait_room(self) -> None:
        """Until the consumer has taken enough."""
        while not self.has_room and not self._closed:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """All outputs in order."""
        while True:
            while self._outputs:
                output = self._outputs.popleft()
                _resolve(self._emptied)
                yield output
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        """Passes all outputs to `take` in order: the buffered ones now, later ones as they are added."""
        while self._outputs:
            take(self._outputs.popleft())
        _resolve(self._emptied)
        self._take = take
        try:
            if not self._closed:
                self._filled = asyncio.get_running_loop().create_future()
                await self._filled
        finally:
            self._take = None
        if self._error is not None:
            raise self._error


class EventOutlet:
    """KV events for one reader. Events that a slow reader has not taken are replaced by a snapshot when they become too many."""

    def __init__(self, blocks_max: int, snapshot: Callable[[], list[KvEvent]]) -> None:
        self._blocks_max = blocks_max
        self._snapshot = snapshot
        self._events: list[KvEvent] = []
        self._blocks = 0
        self._closed = False
        self._filled: asyncio.Future[None] | None = None

    def put_nowait(self, events: list[KvEvent], blocks: int) -> None:
        """Adds changes of so many blocks."""
        self._events += events
        self._blocks += blocks
        if self._blocks > self._blocks_max:
            self._events, self._blocks = self._snapshot(), 0
        _resolve(self._filled)

    def close_nowait(self) -> None:
        """Ends the reader after what is there."""
        self._closed = True
        _resolve(self._filled)

    async def batches(self) -> AsyncIterator[Sequence[KvEvent]]:
        """All changes in order, in batches."""
        while True:
            if self._events:
                events, self._events, self._blocks = self._events, [], 0
                yield events
            elif self._closed:
                return
            else:
                self._filled = asyncio.get_running_loop().create_future()
                await self._filled


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
