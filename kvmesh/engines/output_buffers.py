"""Builds an engine's step outputs, and buffers them and its KV events for their consumers. All methods run on one event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.core import KvCleared, KvEvent, LoadRecord, TokenLogprob
from kvmesh.engines.base import EngineFinish, StepOutput
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
            # `deliver` awaits this future, so the error ends it. Raised here, it would end the engine's own loop.
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
        # No await between the last buffered output and this line, so outputs keep their order.
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
                # Taken before the yield: events that come during it belong to the next batch.
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


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    """Collects the entries of one StepOutput."""

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    finishes: list[EngineFinish] = field(default_factory=list)

    def add(self, key: int, token_ids: Sequence[int]) -> None:
        self.keys.append(key)
        self.token_ids.extend(token_ids)
        self.counts.append(len(token_ids))

    @property
    def has_output(self) -> bool:
        return bool(self.keys or self.finishes or self.prompt_logprobs)

    def take(self, step: int) -> StepOutput | None:
        """Returns the output; None when there are no entries."""
        if not self.has_output:
            return None
        is_plain = len(self.token_ids) == len(self.keys) and all(count == 1 for count in self.counts)
        return StepOutput(
            step=step,
            keys=self.keys,
            token_ids=self.token_ids,
            counts=None if is_plain else self.counts,
            logprobs=self.logprobs,
            finishes=self.finishes,
            prompt_logprobs=self.prompt_logprobs,
        )
