"""The index of all KV blocks: one index per tier, and the predicted blocks.

A holder is one data-parallel rank of one worker. It has one bit, the same in every index, so that the lookups of all tiers can be
combined. A holder whose cache was cleared gets another bit.
"""

from collections.abc import Mapping, Sequence

from kvmesh.core import KvTier
from services.router.core_settings import IndexSettings
from services.router.index.holder_index import HolderIndex
from services.router.index.lazy_index import LazyIndex
from services.router.index.predicted_index import Lifetime, PredictedIndex

PLACEMENTS_MAX = 65_536
"""Placements with predicted blocks, of workers with cache events and of those without: as many as a router may have reservations."""
PREDICTED_BLOCKS_MAX = 1_048_576
"""Blocks of those placements, each counted once: 40 to 80 MB."""


class KvIndex:
    """The indexes and the bits of their holders. Feeds apply the workers' events; `predict` and `approximate` take placements."""

    def __init__(self, settings: IndexSettings) -> None:
        self.tiers: Mapping[KvTier, LazyIndex] = {tier: LazyIndex() for tier in KvTier}
        self.device = self.tiers[KvTier.DEVICE]
        """The tier whose blocks an engine can use without moving them."""
        self.predicted = PredictedIndex(blocks_max=PREDICTED_BLOCKS_MAX)
        """Placements that no event has confirmed yet, and those of engines without events."""
        self._indexes: Sequence[HolderIndex | PredictedIndex] = (*self.tiers.values(), self.predicted)
        self._predicted_lifetime = Lifetime(ttl_s=settings.predicted_s, placements_max=PLACEMENTS_MAX)
        self._approximate_lifetime = Lifetime(ttl_s=settings.approximate_s, placements_max=PLACEMENTS_MAX)
        self._bits = 0
        self._retired = 0

    def add_holder(self) -> int:
        reusable = self._retired
        for index in self._indexes:
            reusable &= ~index.traces
        if reusable:
            # The lowest one: sets, and the arrays that have one value per bit, stay short.
            bit = (reusable & -reusable).bit_length() - 1
            self._retired ^= 1 << bit
        else:
            bit = self._bits
            self._bits += 1
        for index in self._indexes:
            index.add_holder(bit)
        return bit

    def drop_holder(self, bit: int) -> None:
        """Removes a holder in O(1); `sweep` frees its memory."""
        for index in self._indexes:
            index.drop_holder(bit)
        self._retired |= 1 << bit

    def replace_holder(self, old: int, new: int) -> None:
        """Drops `old`; its predictions become those of `new`."""
        self.predicted.rename(old=old, new=new)
        self.drop_holder(old)
        # `add_holder` increased it too, but for a snapshot that was before the worker changed to the new bit.
        self.device.holders_version += 1

    def predict(self, bit: int, block_hashes: Sequence[int], *, now: float) -> None:
        """A prompt was placed on a holder with events. Nothing is predicted if its blocks are known to be cached."""
        if block_hashes and not self.device.holds(bit, block_hashes[-1]):
            self.predicted.add(bit, block_hashes, now=now, lifetime=self._predicted_lifetime)

    def approximate(self, bit: int, block_hashes: Sequence[int], *, now: float, blocks_max: int) -> None:
        """A prompt was placed on a holder without events, whose cache has `blocks_max` blocks."""
        self.predicted.add(
            bit, block_hashes, now=now, lifetime=self._approximate_lifetime, holder_blocks_max=max(1, blocks_max)
        )

    def sweep(self, blocks_max: int) -> bool:
        """Frees memory of dropped holders, `blocks_max` blocks of each index at a time. False: nothing is left."""
        left = [index.sweep(blocks_max) for index in self._indexes]
        return any(left)

    def expire(self, now: float) -> None:
        """Removes predictions whose time is over; adding one does so too."""
        self.predicted.expire(now)
