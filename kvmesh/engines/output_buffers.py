"""Bounded buffers between an engine and the consumers of its step outputs and KV events. All methods run on one event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from kvmesh.core import KvCleared, KvEvent, LoadRecord
from kvmesh.engines.base import StepOutput
from kvmesh.errors import MeshError


class StepOutputBuffer:
    """Step outputs for one consumer. `taken` counts the outputs that the consumer has taken. Engines pause while it is full."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self.taken = 0
        self._outputs: deque[StepOutput] = deque()
        self._is_closed = False
        self._error: MeshError | None = None
        self._filled: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._take: Callable[[StepOutput], None] | None = None

    @property
    def has_room(self) -> bool:
        return len(self._outputs) < self._steps_max

    def put_nowait(self, output: StepOutput) -> None:
        """Adds an output, beyond the bound if necessary, or passes it to the consumer of `deliver`."""
        if self._take is None:
            self._outputs.append(output)
            _resolve(self._filled)
            return
        try:
            self.taken += 1
            self._take(output)
        except Exception as error:  # noqa: BLE001  # The consumer's own error, which its `deliver` raises.
            self._take = None
            if self._filled is not None and not self._filled.done():
                self._filled.set_exception(error)

    def close_nowait(self, error: MeshError | None = None) -> None:
        """Ends the iteration after the buffered outputs, with `error` if given."""
        self._is_closed, self._error = True, error
        _resolve(self._filled)
        _resolve(self._emptied)

    async def wait_room(self) -> None:
        while not self.has_room and not self._is_closed:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    async def outputs(self) -> AsyncIterator[StepOutput]:
        """All outputs in order."""
        while True:
            while self._outputs:
                output = self._outputs.popleft()
                self.taken += 1
                _resolve(self._emptied)
                yield output
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return
            self._filled = asyncio.get_running_loop().create_future()
            await self._filled

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        """Passes all outputs to `take` in order: the buffered ones now, later ones as they are added."""
        while self._outputs:
            self.taken += 1
            take(self._outputs.popleft())
        _resolve(self._emptied)
        self._take = take
        try:
            if not self._is_closed:
                self._filled = asyncio.get_running_loop().create_future()
                await self._filled
        finally:
            self._take = None
        if self._error is not None:
            raise self._error


class KvEventBuffer:
    """KV events for one reader. A snapshot replaces events that a slow reader has not taken when they exceed `blocks_max` blocks.

    `make_snapshot` returns the snapshot. None: the engine passes it to `replace` later, and events until then are in it.
    """

    def __init__(self, blocks_max: int, make_snapshot: Callable[[], list[KvEvent] | None]) -> None:
        self._blocks_max = blocks_max
        self._make_snapshot = make_snapshot
        self._events: list[KvEvent] = []
        self._blocks = 0
        self._awaits_snapshot = False
        self._is_closed = False
        self._filled: asyncio.Future[None] | None = None

    def put_nowait(self, events: Sequence[KvEvent]) -> None:
        if self._awaits_snapshot:
            return
        self._events += events
        self._blocks += sum(1 if isinstance(event, KvCleared) else len(event.block_hashes) for event in events)
        if self._blocks > self._blocks_max:
            snapshot = self._make_snapshot()
            self._awaits_snapshot = snapshot is None
            self._events, self._blocks = snapshot or [], 0
        _resolve(self._filled)

    def replace(self, snapshot: list[KvEvent]) -> None:
        """Continues with a snapshot that `make_snapshot` announced."""
        self._events, self._blocks, self._awaits_snapshot = snapshot, 0, False
        _resolve(self._filled)

    def close_nowait(self) -> None:
        """Ends the iteration after the buffered events."""
        self._is_closed = True
        _resolve(self._filled)

    async def batches(self) -> AsyncIterator[Sequence[KvEvent]]:
        """All changes in order, in batches."""
        while True:
            if self._events:
                events, self._events, self._blocks = self._events, [], 0
                yield events
            elif self._is_closed:
                return
            else:
                self._filled = asyncio.get_running_loop().create_future()
                await self._filled


class BufferedEngine:
    """The part of `Engine` that engines with one buffer for outputs and one for KV events share. By default in this process, with one rank."""

    _outputs: StepOutputBuffer
    _events: KvEventBuffer

    def load(self) -> LoadRecord:
        raise NotImplementedError

    def rank_loads(self) -> Sequence[LoadRecord]:
        return (self.load(),)

    @property
    def is_responsive(self) -> bool:
        """Always: an engine in this process reports when a process of its own ends."""
        return True

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._outputs.outputs()

    async def deliver(self, take: Callable[[StepOutput], None]) -> None:
        await self._outputs.deliver(take)

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """See Engine. A slow reader gets a cleared event and the present blocks instead of what it missed."""
        return self._events.batches()


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
