"""What one worker tells of its KV cache, applied to the index in order and without loss.

Numbers: a worker's steps count up by one within an epoch (`kvmesh/worker/v1/worker.proto`). A step seen before is ignored.

| what comes | what follows |
|---|---|
| the next step | applied |
| a step further on | RECOVERING `sequence_gap`; the view stays and is resumed where it stands: the worker sends what is missing |
| a step of another epoch | RECOVERING `epoch_changed`; the worker began anew, its view is emptied, a snapshot is asked for |
| a snapshot | built beside the view, which serves placing until the last part is there and takes its place |
| a snapshot's part that is not the next | RECOVERING `snapshot_interrupted`; a snapshot is asked for again |

Steps that follow a snapshot wait at the worker, in the watch's bounded buffer; one that runs over ends the watch, and the
next begins with what is missing or a new snapshot.
"""

from collections.abc import Sequence
from enum import StrEnum

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from services.router.index.kv_index import KvIndex as KvIndex


class Trust(StrEnum):
    """How far the index of a worker can be believed."""

    EXACT = "exact"
    RECOVERING = "recovering"
    APPROXIMATE = "approximate"


class KvFeed:
    """One worker's part of the index. `bits[rank]` is its holder; it changes in place when the rank is emptied."""

    def __init__(self, index: KvIndex, *, ranks: int, tells_events: bool, remembered_blocks_max: int) -> None:
        self._index = index
        self.tells_events = tells_events
        """False: what it holds is believed, for as long as it is there."""
        self._remembered_max = remembered_blocks_max
        self._epoch = 0
        self._sequence: int | None = None
        self._heard_max = 0
        self._incoming: list[int] = []
        self._incoming_at = (0, 0)
        self._incoming_part = 0
        self.bits = [index.add_holder() for _ in range(ranks)]
        self.unknown_removals = 0
        self.gaps = 0
        self.snapshots = 0
        self.trust = Trust.RECOVERING if tells_events else Trust.APPROXIMATE
        self.reason = "no_snapshot_yet" if tells_events else "no_kv_events"

    @property
    def resume_at(self) -> tuple[int, int] | None:
        """Epoch and sequence to go on from; None: a snapshot is needed."""
        return None if self._sequence is None else (self._epoch, self._sequence)

    @property
    def blocks(self) -> int:
        """Blocks of the worker in the device tier, or those it is believed to hold when it tells nothing."""
        return sum(map(self.rank_blocks, range(len(self.bits))))

    def rank_blocks(self, rank: int) -> int:
        """The same of one rank."""
        bit = self.bits[rank]
        return self._index.device.count(bit) if self.tells_events else self._index.predicted.count(bit)

    def blocks_by_tier(self, rank: int) -> dict[KvTier, int]:
        """Blocks of one rank by tier, tiers without blocks left out."""
        bit = self.bits[rank]
        return {tier: count for tier, index in self._index.tiers.items() if (count := index.count(bit))}

    def apply(self, step: KvBatch) -> bool:
        """Applies one step. False: something is missing; the caller subscribes again, from `resume_at`."""
        if not self.tells_events:
            return True
        if step.is_snapshot:
            return self._apply_snapshot(step)
        if self._incoming:
            return self._lost("snapshot_interrupted")
        if self._sequence is None:
            return self._lost("no_snapshot_yet")
        if step.epoch != self._epoch:
            self._empty_all()
            self._sequence = None
            return self._lost("epoch_changed")
        if step.sequence <= self._sequence:
            return True
        self._heard_max = max(self._heard_max, step.sequence)
        if step.sequence != self._sequence + 1:
            return self._lost("sequence_gap")
        self._sequence = step.sequence
        self._apply_events(self.bits, step.events)
        if self._sequence == self._heard_max:
            self.trust, self.reason = Trust.EXACT, ""
        return True

    def placed(self, rank: int, block_hashes: Sequence[int], *, now: float, is_computing: bool) -> None:
        """A prompt was placed there.

        Whoever computes it is believed to have it cached when those behind it in his queue have their turn. Whoever is
        handed the KV is not: one that is sent there too may be faster than the transfer.
        """
        if not self.tells_events:
            self._index.approximate(self.bits[rank], block_hashes, now=now, blocks_max=self._remembered_max)
        elif is_computing:
            self._index.predict(self.bits[rank], block_hashes, now=now)

    def settled(self, rank: int, last_block_hash: int) -> None:
        """A prompt that was placed there came to its end: what no event told of by now is not going to come."""
        if self.tells_events:
            self._index.predicted.ended(self.bits[rank], last_block_hash)

    def drop(self) -> None:
        """Forgets everything; the feed is not used again."""
        self._drop_incoming()
        for bit in self.bits:
            self._index.drop_holder(bit)

    def _apply_snapshot(self, step: KvBatch) -> bool:
        """Parts of one snapshot carry the same numbers and are counted from 1; workers of old do not count (0)."""
        at = (step.epoch, step.sequence)
        if self._sequence is not None and step.epoch == self._epoch and step.sequence <= self._sequence:
            return True
        if not self._incoming or self._incoming_at != at or step.part == 1:
            if step.part > 1:
                return self._lost("snapshot_interrupted")
            self._begin_snapshot(step)
        elif step.part and step.part <= self._incoming_part:
            return True
        elif step.part and step.part != self._incoming_part + 1:
            return self._lost("snapshot_interrupted")
        self._incoming_part = step.part
        self._apply_events(self._incoming, step.events)
        if step.is_complete:
            self._end_snapshot(step)
        return True

    def _end_snapshot(self, step: KvBatch) -> None:
        for rank, bit in enumerate(self._incoming):
            self._index.replace_holder(self.bits[rank], bit)
            self.bits[rank] = bit
        self._incoming = []
        self._epoch, self._sequence = step.epoch, step.sequence
        self._heard_max = step.sequence
        self.snapshots += 1
        self.trust, self.reason = Trust.EXACT, ""

    def _begin_snapshot(self, step: KvBatch) -> None:
        self._drop_incoming()
        if self._sequence is not None and step.epoch != self._epoch:
            self._empty_all()
        self._sequence = None
        self._incoming = [self._index.add_holder() for _ in self.bits]
        self._incoming_at = (step.epoch, step.sequence)
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
                    # Of a snapshot nothing waits: its runs go on from one another in any order, which takes looking for.
                    store = index.stored_lazily if bits is self.bits else index.stored
                    store(bits[rank], event.block_hashes, event.parent_hash)
                    predicted.stored(self.bits[rank], event.block_hashes)
                case KvRemoved():
                    self.unknown_removals += tiers[event.tier].removed(bits[rank], event.block_hashes)
                case KvCleared():
                    self._empty(bits, rank)

    def _lost(self, reason: str) -> bool:
        self._drop_incoming()
        self.gaps += 1
        self.trust, self.reason = Trust.RECOVERING, reason
        return False

    def _empty(self, bits: list[int], rank: int) -> None:
        old, bits[rank] = bits[rank], self._index.add_holder()
        self._index.replace_holder(old, bits[rank])

    def _empty_all(self) -> None:
        """Of a process that is gone nothing remains, what was predicted of it neither."""
        for rank, bit in enumerate(self.bits):
            self._index.drop_holder(bit)
            self.bits[rank] = self._index.add_holder()

    def _drop_incoming(self) -> None:
        for bit in self._incoming:
            self._index.drop_holder(bit)
        self._incoming = []
