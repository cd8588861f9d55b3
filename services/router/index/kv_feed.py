"""Applies the cache events of one worker to the index, in order and without loss.

A worker numbers its batches of events within an epoch (`kvmesh/worker/v1/worker.proto`). A batch that was applied before is ignored.

| batch | what follows |
|---|---|
| the next one | applied |
| a later one | RECOVERING `sequence_gap`; the index is kept, and the worker is asked for the missing batches |
| one of another epoch | RECOVERING `epoch_changed`; the process was replaced: its blocks are removed, and a snapshot is requested |
| a snapshot | built beside the known blocks, which serve placements until the last part replaces them |
| a part of a snapshot that is not the next | RECOVERING `snapshot_interrupted`; a snapshot is requested again |

Batches that follow a snapshot wait in the bounded buffer at the worker. A full buffer ends the stream, and the next one starts with the
missing batches or a new snapshot.
"""

from collections.abc import Sequence
from enum import StrEnum

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from services.router.index.kv_index import KvIndex


class Trust(StrEnum):
    """How far the index of a worker can be trusted."""

    EXACT = "exact"
    RECOVERING = "recovering"
    APPROXIMATE = "approximate"


class KvFeed:
    """One worker's part of the index. `bits[rank]` is the holder of a rank; it changes in place when the cache is cleared."""

    def __init__(self, index: KvIndex, *, ranks: int, sends_events: bool, cache_blocks_max: int) -> None:
        self._index = index
        self.sends_events = sends_events
        """False: its blocks are predicted from placements."""
        self._cache_blocks_max = cache_blocks_max
        self._epoch = 0
        self._sequence: int | None = None
        # The newest batch that arrived, applied or not: after a gap, the feed is exact again when it has applied this batch.
        self._sequence_max = 0
        # Holders of the snapshot that is arriving, one per rank; empty if there is none. `_incoming_at` is its epoch and sequence number.
        self._incoming: list[int] = []
        self._incoming_at = (0, 0)
        self._incoming_part = 0
        self.bits = [index.add_holder() for _ in range(ranks)]
        self._is_dropped = False
        self.gaps = 0
        self.snapshots = 0
        self.trust = Trust.RECOVERING if sends_events else Trust.APPROXIMATE
        self.reason = "no_snapshot_yet" if sends_events else "no_kv_events"

    @property
    def resume_at(self) -> tuple[int, int] | None:
        """Epoch and sequence number to resume after. None: a snapshot is needed."""
        return None if self._sequence is None else (self._epoch, self._sequence)

    @property
    def blocks(self) -> int:
        """Number of the worker's blocks cached on the device. For a worker without events: of predicted blocks."""
        return sum(map(self.rank_blocks, range(len(self.bits))))

    def rank_blocks(self, rank: int) -> int:
        """Returns the same for one rank."""
        bit = self.bits[rank]
        return self._index.device.count(bit) if self.sends_events else self._index.predicted.count(bit)

    def blocks_by_tier(self, rank: int) -> dict[KvTier, int]:
        """Cached blocks of one rank by tier; tiers without blocks are left out."""
        bit = self.bits[rank]
        return {tier: count for tier, index in self._index.tiers.items() if (count := index.count(bit))}

    def apply(self, batch: KvBatch) -> bool:
        """Applies one batch. False: batches are missing, and the caller must subscribe again with `resume_at`; or the feed was dropped."""
        if self._is_dropped:
            # A task that watches a worker that has left ends a moment later. The holders may belong to another worker by now.
            return False
        if not self.sends_events:
            return True
        if batch.is_snapshot:
            return self._apply_snapshot(batch)
        # A worker sends changes only after the last part of a snapshot, so a part is missing.
        if self._incoming:
            return self._recover("snapshot_interrupted")
        if self._sequence is None:
            return self._recover("no_snapshot_yet")
        if batch.epoch != self._epoch:
            self._replace_holders()
            self._sequence = None
            return self._recover("epoch_changed")
        if batch.sequence <= self._sequence:
            return True
        self._sequence_max = max(self._sequence_max, batch.sequence)
        if batch.sequence != self._sequence + 1:
            return self._recover("sequence_gap")
        self._sequence = batch.sequence
        self._apply_events(self.bits, batch.events)
        if self._sequence == self._sequence_max:
            self.trust, self.reason = Trust.EXACT, ""
        return True

    def on_placed(self, rank: int, block_hashes: Sequence[int], *, now: float, is_computing: bool) -> None:
        """A prompt was placed on a rank.

        The worker that computes it is predicted to have it cached for later requests in its queue. The worker that receives the KV is
        not: a later request may overtake the transfer.
        """
        if not self.sends_events:
            self._index.approximate(self.bits[rank], block_hashes, now=now, blocks_max=self._cache_blocks_max)
        elif is_computing:
            self._index.predict(self.bits[rank], block_hashes, now=now)

    def on_settled(self, rank: int, last_block_hash: int) -> None:
        """The request is over: blocks that no event named by now will not be cached."""
        if self.sends_events:
            self._index.predicted.end(self.bits[rank], last_block_hash)

    def drop(self) -> None:
        """Removes all blocks. Batches that still come are ignored."""
        if self._is_dropped:
            return
        self._is_dropped = True
        self._drop_incoming()
        for bit in self.bits:
            self._index.drop_holder(bit)

    def _apply_snapshot(self, batch: KvBatch) -> bool:
        """Applies a part of a snapshot. The parts of one have the same epoch and sequence number, and are numbered from 1."""
        at = (batch.epoch, batch.sequence)
        if self._sequence is not None and batch.epoch == self._epoch and batch.sequence <= self._sequence:
            return True
        if not self._incoming or self._incoming_at != at or batch.part == 1:
            if batch.part > 1:
                return self._recover("snapshot_interrupted")
            self._begin_snapshot(batch)
        # Part 0: the worker does not number parts, so missing ones cannot be detected.
        elif batch.part and batch.part <= self._incoming_part:
            return True
        elif batch.part and batch.part != self._incoming_part + 1:
            return self._recover("snapshot_interrupted")
        self._incoming_part = batch.part
        self._apply_events(self._incoming, batch.events)
        if batch.is_complete:
            self._end_snapshot(batch)
        return True

    def _end_snapshot(self, batch: KvBatch) -> None:
        for rank, bit in enumerate(self._incoming):
            self._index.replace_holder(old=self.bits[rank], new=bit)
            self.bits[rank] = bit
        self._incoming = []
        self._epoch, self._sequence = batch.epoch, batch.sequence
        self._sequence_max = batch.sequence
        self.snapshots += 1
        self.trust, self.reason = Trust.EXACT, ""

    def _begin_snapshot(self, batch: KvBatch) -> None:
        self._drop_incoming()
        if self._sequence is not None and batch.epoch != self._epoch:
            # The blocks of the earlier process are gone. Those of the same process serve placements until the last part.
            self._replace_holders()
        self._sequence = None
        # `_sequence` None: if the stream breaks before the last part, `resume_at` asks for a new snapshot.
        self._incoming = [self._index.add_holder() for _ in self.bits]
        self._incoming_at = (batch.epoch, batch.sequence)
        self.trust, self.reason = Trust.RECOVERING, "snapshot_in_progress"

    def _apply_events(self, bits: list[int], events: Sequence[KvEvent]) -> None:
        tiers, predicted = self._index.tiers, self._index.predicted
        for event in events:
            rank = event.data_parallel_rank
            if rank >= len(bits):
                continue
            match event:
                case KvStored():
                    index = tiers[event.tier]
                    # The runs of a snapshot continue each other in any order, which pending runs would have to be searched for.
                    store = index.store_lazily if bits is self.bits else index.store
                    store(bits[rank], event.block_hashes, event.parent_hash)
                    # Predictions stay with the present holder until `replace_holder` moves them at the end of a snapshot.
                    predicted.confirm(self.bits[rank], event.block_hashes)
                case KvRemoved():
                    tiers[event.tier].remove(bits[rank], event.block_hashes)
                case KvCleared():
                    self._replace_holder(bits, rank)

    def _recover(self, reason: str) -> bool:
        self._drop_incoming()
        self.gaps += 1
        self.trust, self.reason = Trust.RECOVERING, reason
        return False

    def _replace_holder(self, bits: list[int], rank: int) -> None:
        old, bits[rank] = bits[rank], self._index.add_holder()
        self._index.replace_holder(old=old, new=bits[rank])

    def _replace_holders(self) -> None:
        """Removes all blocks and predictions of a process that was replaced."""
        for rank, bit in enumerate(self.bits):
            self._index.drop_holder(bit)
            self.bits[rank] = self._index.add_holder()

    def _drop_incoming(self) -> None:
        for bit in self._incoming:
            self._index.drop_holder(bit)
        self._incoming = []
