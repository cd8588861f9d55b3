"""All that is known and believed of who holds what: one index per tier and the predicted one, with one bit per holder in all.

A holder is one data-parallel rank of one worker. Its bit means the same in every index, so that what a lookup in one tier
gives can be laid over what it gives in another. A holder that is emptied gets another bit.
"""

from collections.abc import Mapping, Sequence

from kvmesh.core import KvTier
from services.router.index.holder_index import HolderIndex
from services.router.index.lazy_index import LazyIndex
from services.router.index.predicted_index import Lifetime, PredictedIndex

PREDICTED = Lifetime(ttl_s=10.0, placements_max=65_536)
"""Until the worker's own event comes: queue and prefill take so long at most, or the prediction was wrong."""

APPROXIMATE = Lifetime(ttl_s=120.0, placements_max=65_536)
"""In place of events that never come: about the time a prefix stays in a busy cache."""

BELIEVED_BLOCKS_MAX = 1_048_576


class KvIndex:
    """Bits and indexes. `placed` tells of own placements; the tiers are told by feeds."""

    def __init__(
        self,
        *,
        predicted: Lifetime = PREDICTED,
        approximate: Lifetime = APPROXIMATE,
        believed_blocks_max: int = BELIEVED_BLOCKS_MAX,
    ) -> None:
        self.tiers: Mapping[KvTier, LazyIndex] = {tier: LazyIndex() for tier in KvTier}
        self.device = self.tiers[KvTier.DEVICE]
        """Blocks that an engine can use without moving them."""
        self.predicted = PredictedIndex(blocks_max=believed_blocks_max)
        """Own placements that no event has confirmed yet, and those that stand for the caches of silent engines."""
        self._indexes: Sequence[HolderIndex | PredictedIndex] = (*self.tiers.values(), self.predicted)
        self._predicted_lifetime = predicted
        self._approximate_lifetime = approximate
        self._bits = 0
        self._retired = 0

    def add_holder(self) -> int:
        """A bit for a new, empty holder."""
        reusable = self._retired
        for index in self._indexes:
            reusable &= ~index.traces
        if reusable:
            bit = (reusable & -reusable).bit_length() - 1
            self._retired ^= 1 << bit
        else:
            bit = self._bits
            self._bits += 1
        for index in self._indexes:
            index.add_holder(bit)
        return bit

    def drop_holder(self, bit: int) -> None:
        """Forgets a holder in O(1); `sweep` gives the memory back."""
        for index in self._indexes:
            index.drop_holder(bit)
        self._retired |= 1 << bit

    def replace_holder(self, old: int, new: int) -> None:
        """`new` takes the place of `old`, which is dropped: what was predicted for `old` holds for `new`."""
        self.predicted.rename(old, new)
        self.drop_holder(old)
        self.device.holders_version += 1

    def predict(self, bit: int, block_hashes: Sequence[int], *, now: float) -> None:
        """A prompt was placed on a holder that tells its events. Nothing is believed of what it told already."""
        if block_hashes and not self.device.holds(bit, block_hashes[-1]):
            self.predicted.add(bit, block_hashes, now=now, lifetime=self._predicted_lifetime)

    def approximate(self, bit: int, block_hashes: Sequence[int], *, now: float, blocks_max: int) -> None:
        """A prompt was placed on a holder that tells nothing and has so many blocks."""
        self.predicted.add(
            bit, block_hashes, now=now, lifetime=self._approximate_lifetime, holder_blocks_max=max(1, blocks_max)
        )

    def sweep(self, blocks_max: int) -> bool:
        """Frees memory of forgotten holders, a stretch at a time. False: nothing left."""
        left = [index.sweep(blocks_max) for index in self._indexes]
        return any(left)

    def expire(self, now: float) -> None:
        """Ends beliefs whose time is over; placing does so too."""
        self.predicted.expire(now)
