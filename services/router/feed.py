"""What one worker tells of its KV cache, applied to the index in order and without loss.

Numbers: a worker's steps count up by one within an epoch (`kvmesh/worker/v1/worker.proto`). A step that is not the next one
means that something was lost; the feed then forgets the worker's blocks and asks for a snapshot. A step seen before is
ignored.
"""

from collections.abc import Sequence
from enum import StrEnum

from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier
from services.router.index import HolderIndex


class Trust(StrEnum):
    """How far the index of a worker can be believed."""

    EXACT = "exact"
    RECOVERING = "recovering"
    APPROXIMATE = "approximate"


class KvIndex:
    """One holder index per tier. Placing matches against the device tier."""

    def __init__(self) -> None:
        self.tiers: dict[KvTier, HolderIndex] = {KvTier.DEVICE: HolderIndex()}

    @property
    def device(self) -> HolderIndex:
        """The index of blocks that an engine can use without moving them."""
        return self.tiers[KvTier.DEVICE]

    def tier(self, tier: KvTier) -> HolderIndex:
        """A tier's index, made on first use."""
        if tier not in self.tiers:
            self.tiers[tier] = HolderIndex()
        return self.tiers[tier]

    def sweep(self, blocks_max: int) -> bool:
        """Frees memory of forgotten holders, a stretch at a time. False: nothing left."""
        left = [tier.sweep(blocks_max) for tier in self.tiers.values()]
        return any(left)


class KvFeed:
    """One worker's part of the index. `bits[rank]` is its holder in the device tier; it changes when the rank is emptied."""

    def __init__(self, index: KvIndex, *, ranks: int, tells_events: bool, remembered_blocks_max: int) -> None:
        self._index = index
        self._tells_events = tells_events
        self._remembered_max = remembered_blocks_max
        self._holders: dict[tuple[int, KvTier], int] = {}
        self._epoch = 0
        self._sequence: int | None = None
        self._is_in_snapshot = False
        self.bits = [self._bit(rank, KvTier.DEVICE) for rank in range(ranks)]
        self.unknown_removals = 0
        self.gaps = 0
        self.trust = Trust.RECOVERING if tells_events else Trust.APPROXIMATE
        self.reason = "no_snapshot_yet" if tells_events else "no_kv_events"

    @property
    def resume_at(self) -> tuple[int, int] | None:
        """Epoch and sequence to go on from; None: a snapshot is needed."""
        return None if self._sequence is None or self._is_in_snapshot else (self._epoch, self._sequence)

    @property
    def blocks(self) -> int:
        """Blocks of the worker in the device tier."""
        return sum(self._index.device.count(bit) for bit in self.bits)

    def blocks_by_tier(self, rank: int) -> dict[KvTier, int]:
        """Blocks of one rank in each tier that it has ever told of."""
        return {tier: self._index.tier(tier).count(bit) for (of, tier), bit in self._holders.items() if of == rank}

    def apply(self, step: KvBatch) -> bool:
        """Applies one step. False: a gap; the caller subscribes again, from `resume_at`."""
        if not self._tells_events:
            return True
        if step.is_snapshot:
            self._apply_snapshot(step)
            return True
        if self._sequence is None or self._is_in_snapshot or step.epoch != self._epoch:
            return self._lost("epoch_changed" if self._sequence is not None else "no_snapshot_yet")
        if step.sequence <= self._sequence:
            return True
        if step.sequence != self._sequence + 1:
            return self._lost("sequence_gap")
        self._sequence = step.sequence
        self._apply_events(step.events)
        return True

    def remember(self, rank: int, block_hashes: Sequence[int]) -> None:
        """For an engine that tells nothing: takes a prompt placed there for cached. Starts anew when memory is full.

        A worker that holds more than its cache can would be believed to hold everything; forgetting all at once is crude
        but never believes more blocks than the worker has.
        """
        if not block_hashes or self._tells_events:
            return
        if self._index.device.count(self.bits[rank]) + len(block_hashes) > self._remembered_max:
            self._empty(rank)
        self._index.device.stored(self.bits[rank], block_hashes[: self._remembered_max])

    def drop(self) -> None:
        """Forgets everything; the feed is not used again."""
        for (_, tier), bit in self._holders.items():
            self._index.tier(tier).drop_holder(bit)
        self._holders.clear()

    def _apply_snapshot(self, step: KvBatch) -> None:
        if not self._is_in_snapshot or (step.epoch, step.sequence) != (self._epoch, self._sequence):
            self._empty_all()
            self._epoch, self._sequence = step.epoch, step.sequence
        self._apply_events(step.events)
        self._is_in_snapshot = not step.is_complete
        self.trust = Trust.EXACT if step.is_complete else Trust.RECOVERING
        self.reason = "" if step.is_complete else "snapshot_in_progress"

    def _apply_events(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            rank = event.data_parallel_rank
            if rank >= len(self.bits):
                continue
            match event:
                case KvStored():
                    bit = self._bit(rank, event.tier)
                    self._index.tier(event.tier).stored(bit, event.block_hashes, event.parent_hash)
                case KvRemoved():
                    bit = self._bit(rank, event.tier)
                    self.unknown_removals += self._index.tier(event.tier).removed(bit, event.block_hashes)
                case KvCleared():
                    self._empty(rank)

    def _lost(self, reason: str) -> bool:
        self._empty_all()
        self._sequence = None
        self._is_in_snapshot = False
        self.gaps += 1
        self.trust, self.reason = Trust.RECOVERING, reason
        return False

    def _bit(self, rank: int, tier: KvTier) -> int:
        key = (rank, tier)
        if key not in self._holders:
            self._holders[key] = self._index.tier(tier).add_holder()
        return self._holders[key]

    def _empty(self, rank: int) -> None:
        for key in [key for key in self._holders if key[0] == rank]:
            self._index.tier(key[1]).drop_holder(self._holders.pop(key))
        self.bits[rank] = self._bit(rank, KvTier.DEVICE)

    def _empty_all(self) -> None:
        for rank in range(len(self.bits)):
            self._empty(rank)
