"""A worker's KV cache as others see it: epoch, sequence, snapshot on subscribe, history for those who resume.

The log is a pure value; `KvFeed` adds the watchers. `sequence` counts batches within the epoch from 1; a snapshot carries the
sequence of the last batch it contains.

A subscriber with a snapshot costs the worker one copy of its dictionaries (30 ms for a million blocks) when it subscribes, and
then a part at a time, as fast as the subscriber reads. What happens meanwhile waits in the subscriber's buffer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.errors import MeshError, OverloadedError

EVENTS_PER_MESSAGE = 4096
BLOCKS_PER_MESSAGE = 2048
"""A router applies a message in one go, about 1 ms, which placing has to wait. The contract allows 65 536 per event."""

RUN_BLOCKS_MAX = 1024


def split_events(events: Iterable[KvEvent], blocks_max: int = BLOCKS_PER_MESSAGE) -> Iterator[list[KvEvent]]:
    """The events in order, in parts that one message may hold: at most 4 096 events and, together, `blocks_max` blocks."""
    part: list[KvEvent] = []
    room = blocks_max
    for event in _short_runs(events, blocks_max):
        blocks = 0 if isinstance(event, KvCleared) else len(event.block_hashes)
        if part and (len(part) == EVENTS_PER_MESSAGE or blocks > room):
            yield part
            part, room = [], blocks_max
        part.append(event)
        room -= blocks
    if part:
        yield part


def _short_runs(events: Iterable[KvEvent], blocks_max: int) -> Iterator[KvEvent]:
    """The same changes in runs of at most `blocks_max` blocks."""
    for event in events:
        if isinstance(event, KvCleared) or len(event.block_hashes) <= blocks_max:
            yield event
            continue
        for start in range(0, len(event.block_hashes), blocks_max):
            run = event.block_hashes[start : start + blocks_max]
            if isinstance(event, KvRemoved) or not start:
                yield replace(event, block_hashes=run)
            else:
                yield replace(event, block_hashes=run, parent_hash=event.block_hashes[start - 1])


_Blocks = dict[tuple[int, KvTier], dict[int, int | None]]
"""Block -> the block before it, by (rank, tier), in the order of storing."""


@dataclass(slots=True)
class KvLog:
    """Cached blocks by (rank, tier) and the newest batches.

    Invariant: the snapshot equals the result of applying every batch since the epoch began, in order.
    """

    epoch: int
    history_max: int
    message_blocks_max: int = BLOCKS_PER_MESSAGE
    sequence: int = 0
    _parents: _Blocks = field(default_factory=dict)
    _history: deque[KvBatch] = field(default_factory=deque)

    def append(self, events: Sequence[KvEvent]) -> KvBatch:
        """Applies changes and gives the batch that tells of them."""
        for event in events:
            self._apply(event)
        self.sequence += 1
        batch = KvBatch(epoch=self.epoch, sequence=self.sequence, events=tuple(events))
        self._history.append(batch)
        if len(self._history) > self.history_max:
            self._history.popleft()
        return batch

    def _apply(self, event: KvEvent) -> None:
        match event:
            case KvStored():
                blocks = self._parents.setdefault((event.data_parallel_rank, event.tier), {})
                parent = event.parent_hash
                for block_hash in event.block_hashes:
                    blocks[block_hash] = parent
                    parent = block_hash
            case KvRemoved():
                blocks = self._parents.get((event.data_parallel_rank, event.tier), {})
                for block_hash in event.block_hashes:
                    blocks.pop(block_hash, None)
            case KvCleared():
                for key in [key for key in self._parents if key[0] == event.data_parallel_rank]:
                    del self._parents[key]

    def since(self, epoch: int | None, sequence: int | None) -> Iterator[KvBatch]:
        """What a subscriber must hear first: the batches it missed, or a snapshot when they are not all here.

        A snapshot is of this moment, however late it is read.
        """
        if epoch == self.epoch and sequence is not None and sequence <= self.sequence:
            missed = [batch for batch in self._history if batch.sequence > sequence]
            if len(missed) == self.sequence - sequence:
                return iter(missed)
        copies = {key: blocks.copy() for key, blocks in self._parents.items()}
        return self._snapshot(self.sequence, copies)

    def _snapshot(self, sequence: int, blocks: _Blocks) -> Iterator[KvBatch]:
        parts = split_events(self._runs(blocks), self.message_blocks_max)
        part: list[KvEvent] = next(parts, [])
        for number in count(1):
            following = next(parts, None)
            yield KvBatch(
                epoch=self.epoch,
                sequence=sequence,
                events=part,
                is_snapshot=True,
                is_complete=following is None,
                part=number,
            )
            if following is None:
                return
            part = following

    def _runs(self, blocks_by_place: _Blocks) -> Iterator[KvStored]:
        for (rank, tier), blocks in blocks_by_place.items():
            run: list[int] = []
            first_parent: int | None = None
            for block_hash, parent in blocks.items():
                if run and parent == run[-1] and len(run) < RUN_BLOCKS_MAX:
                    run.append(block_hash)
                    continue
                if run:
                    yield KvStored(block_hashes=run, parent_hash=first_parent, tier=tier, data_parallel_rank=rank)
                run, first_parent = [block_hash], parent
            if run:
                yield KvStored(block_hashes=run, parent_hash=first_parent, tier=tier, data_parallel_rank=rank)

    def blocks_count(self) -> int:
        """Cached blocks over all ranks and tiers."""
        return sum(len(blocks) for blocks in self._parents.values())


class KvFeed:
    """The log and its watchers. One task appends; any number watch, each behind a bounded buffer."""

    def __init__(
        self, *, epoch: int, history_max: int, buffer_max: int, message_blocks_max: int = BLOCKS_PER_MESSAGE
    ) -> None:
        self._log = KvLog(epoch=epoch, history_max=history_max, message_blocks_max=message_blocks_max)
        self._buffer_max = buffer_max
        self._watchers: dict[int, asyncio.Queue[KvBatch | None]] = {}
        self._next_watcher = 0
        self._closed: MeshError | None = None

    def append_nowait(self, events: Sequence[KvEvent]) -> None:
        """Applies changes and tells all watchers; one that lags behind its buffer is ended."""
        for part in split_events(events, self._log.message_blocks_max):
            self._tell(self._log.append(part))

    def close_nowait(self, error: MeshError) -> None:
        """Ends all watches with `error` after what is in their buffers, and every later one at once. The first call counts."""
        self._closed = self._closed or error
        watchers, self._watchers = self._watchers, {}
        for queue in watchers.values():
            queue.put_nowait(None)

    @property
    def at(self) -> tuple[int, int]:
        """Epoch and sequence of the newest batch."""
        return self._log.epoch, self._log.sequence

    def watchers_count(self) -> int:
        """Open watches."""
        return len(self._watchers)

    def _tell(self, batch: KvBatch) -> None:
        for number, queue in list(self._watchers.items()):
            if queue.qsize() >= self._buffer_max:
                del self._watchers[number]
                queue.put_nowait(None)
            else:
                queue.put_nowait(batch)

    def blocks_count(self) -> int:
        """Cached blocks over all ranks and tiers."""
        return self._log.blocks_count()

    async def watch(self, epoch: int | None = None, sequence: int | None = None) -> AsyncIterator[KvBatch]:
        """What the subscriber missed, then every batch in order. OverloadedError when it does not keep up."""
        if self._closed is not None:
            raise self._closed
        queue: asyncio.Queue[KvBatch | None] = asyncio.Queue()
        number = self._next_watcher
        self._next_watcher += 1
        first = self._log.since(epoch, sequence)
        self._watchers[number] = queue
        try:
            for batch in first:
                yield batch
            while (item := await queue.get()) is not None:
                yield item
            if self._closed is not None:
                raise self._closed
            raise OverloadedError(
                "the watcher did not keep up; subscribe again", reason="watcher_too_slow", retry_after_s=0.1
            )
        finally:
            self._watchers.pop(number, None)
