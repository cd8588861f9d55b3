"""Publishes the contents of a worker's KV cache: a snapshot on subscription, then changes; a history for subscribers that resume.

`KvLog` is plain state; `KvEventFeed` adds the subscribers. `sequence` counts batches within the epoch from 1. A snapshot carries the
sequence of the last batch it contains.

A snapshot costs one copy of the dictionaries (30 ms for a million blocks) when a subscriber joins. Its parts are made one at a time, as
fast as the subscriber reads. Changes that happen during this wait in the subscriber's buffer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from kvmesh.errors import MeshError, OverloadedError
from kvmesh.worker.cached_blocks import Cached, CachedBlocks, CachedRuns

EVENTS_PER_MESSAGE = 4096
BLOCKS_PER_MESSAGE = 2048
"""A router applies a message without yielding, in about 1 ms, during which it places nothing. The contract allows 65 536 per event."""

HISTORY_BATCHES_MAX = 4096
"""Batches kept for routers that resume."""
HISTORY_BLOCKS_MAX = 1 << 15
"""Block changes kept in them, at some 40 bytes each. A router that missed more gets a snapshot, which is at most as long as the cache."""
WATCH_BUFFER_BATCHES = 8192
"""Batches that a slow router may lag behind before its watch is ended."""
EVENT_BLOCKS = 4
"""An event takes as much memory as this many blocks. With short prompts there is an event for every one or two blocks."""


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
    """Splits events with more than `blocks_max` blocks."""
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


_Places = dict[tuple[int, KvTier], Cached]
"""By (rank, tier)."""


@dataclass(slots=True, kw_only=True)
class KvLog:
    """Cached blocks by (rank, tier) and the newest batches.

    Invariant: the snapshot equals the result of applying every batch since the epoch began, in order.
    """

    epoch: int
    history_max: int
    message_blocks_max: int = BLOCKS_PER_MESSAGE
    stores_whole_runs: bool = False
    """See `KvEventFeed.expect_whole_runs`."""
    history_blocks_max: int = HISTORY_BLOCKS_MAX
    sequence: int = 0
    _places: _Places = field(default_factory=dict)
    _history: deque[KvBatch] = field(default_factory=deque)
    _history_blocks: int = 0

    def append(self, events: Sequence[KvEvent]) -> KvBatch:
        """Applies changes and returns their batch."""
        for event in events:
            self._apply(event)
        self.sequence += 1
        batch = KvBatch(epoch=self.epoch, sequence=self.sequence, events=tuple(events))
        self._history.append(batch)
        self._history_blocks += _weight(batch)
        while len(self._history) > self.history_max or self._history_blocks > self.history_blocks_max:
            self._history_blocks -= _weight(self._history.popleft())
        return batch

    def _apply(self, event: KvEvent) -> None:
        match event:
            case KvStored():
                place = (event.data_parallel_rank, event.tier)
                if (cached := self._places.get(place)) is None:
                    cached = self._places[place] = CachedRuns() if self.stores_whole_runs else CachedBlocks()
                cached.store(event.block_hashes, event.parent_hash)
            case KvRemoved():
                if (cached := self._places.get((event.data_parallel_rank, event.tier))) is not None:
                    cached.remove(event.block_hashes)
            case KvCleared():
                for key in [key for key in self._places if key[0] == event.data_parallel_rank]:
                    del self._places[key]

    def since(self, epoch: int | None, sequence: int | None) -> Iterator[KvBatch]:
        """Returns the first batches for a subscriber: those it missed, or a snapshot if the history lacks some.

        A snapshot shows the cache at the time of this call, however late it is read.
        """
        if epoch == self.epoch and sequence is not None and sequence <= self.sequence:
            missed = [batch for batch in self._history if batch.sequence > sequence]
            # Fewer: the history has lost some of them.
            if len(missed) == self.sequence - sequence:
                return iter(missed)
        copies = {key: cached.copy() for key, cached in self._places.items()}
        return self._snapshot(self.sequence, copies)

    def _snapshot(self, sequence: int, places: _Places) -> Iterator[KvBatch]:
        parts = split_events(_runs(places), self.message_blocks_max)
        part: list[KvEvent] = next(parts, [])
        for number in count(1):
            # One part ahead, to know which part is the last.
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

    def blocks_count(self) -> int:
        """Cached blocks over all ranks and tiers."""
        return sum(len(cached) for cached in self._places.values())


def _weight(batch: KvBatch) -> int:
    """Size of a batch in blocks, see EVENT_BLOCKS."""
    blocks = sum(0 if isinstance(event, KvCleared) else len(event.block_hashes) for event in batch.events)
    return blocks + EVENT_BLOCKS * len(batch.events)


def _runs(places: _Places) -> Iterator[KvStored]:
    for (rank, tier), cached in places.items():
        for run, parent in cached.runs():
            yield KvStored(block_hashes=run, parent_hash=parent, tier=tier, data_parallel_rank=rank)


class KvEventFeed:
    """The log and its subscribers. One task appends; each subscriber has a bounded buffer."""

    def __init__(
        self,
        *,
        epoch: int,
        history_max: int = HISTORY_BATCHES_MAX,
        buffer_max: int = WATCH_BUFFER_BATCHES,
        message_blocks_max: int = BLOCKS_PER_MESSAGE,
    ) -> None:
        self._log = KvLog(epoch=epoch, history_max=history_max, message_blocks_max=message_blocks_max)
        self._buffer_max = buffer_max
        self._watchers: dict[int, asyncio.Queue[KvBatch | None]] = {}
        self._next_watcher = 0
        self._closed: MeshError | None = None

    def append_nowait(self, events: Sequence[KvEvent]) -> None:
        """Applies changes and sends them to all watchers. Ends a watcher whose buffer is full."""
        for part in split_events(events, self._log.message_blocks_max):
            self._publish(self._log.append(part))

    def close_nowait(self, error: MeshError) -> None:
        """Ends all watches with `error` after their buffered batches, and later watches immediately. Only the first call has an effect."""
        self._closed = self._closed or error
        watchers, self._watchers = self._watchers, {}
        for queue in watchers.values():
            queue.put_nowait(None)

    def expect_whole_runs(self) -> None:
        """Declares that the engine never stores a block twice and never removes a block before its successors.

        Whole runs are kept then, instead of single blocks. Call it before the first event.
        """
        self._log.stores_whole_runs = True

    @property
    def at(self) -> tuple[int, int]:
        """Epoch and sequence of the newest batch."""
        return self._log.epoch, self._log.sequence

    def end_watches_nowait(self) -> None:
        """Ends all watches as if their buffers were full. They subscribe again."""
        for number in list(self._watchers):
            self._watchers.pop(number).put_nowait(None)

    def watchers_count(self) -> int:
        return len(self._watchers)

    def _publish(self, batch: KvBatch) -> None:
        for number, queue in list(self._watchers.items()):
            if queue.qsize() >= self._buffer_max:
                # A batch that is left out would make the watcher's view wrong, so the watch ends and the router subscribes again.
                del self._watchers[number]
                queue.put_nowait(None)
            else:
                queue.put_nowait(batch)

    def blocks_count(self) -> int:
        """Cached blocks over all ranks and tiers."""
        return self._log.blocks_count()

    async def watch(self, epoch: int | None = None, sequence: int | None = None) -> AsyncIterator[KvBatch]:
        """Yields the batches that the subscriber missed or a snapshot, then every batch in order. OverloadedError if its buffer
        overflows."""
        if self._closed is not None:
            raise self._closed
        queue: asyncio.Queue[KvBatch | None] = asyncio.Queue()
        number = self._next_watcher
        self._next_watcher += 1
        # No await between the two statements: the watcher misses no batch and gets none twice.
        first = self._log.since(epoch=epoch, sequence=sequence)
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
