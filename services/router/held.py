"""How much of a prompt each holder has, in tokens, as an array by holder bit: what all tiers and predictions say together.

A block on the device counts fully; blocks that only a slower tier has count for that tier's credit. The last token of a prompt
is always computed.
"""

from collections.abc import Sequence

import numpy as np

from kvmesh.core import Ask, KvTier
from services.router.board import Floats
from services.router.cost import CostSettings
from services.router.feed import KvIndex

_DIGITS: Floats = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float64)
"""The eight binary digits of every byte, the lowest first."""


class Overlap:
    """Looks prompts up."""

    def __init__(self, index: KvIndex, settings: CostSettings) -> None:
        self._index = index
        self._slower = (
            (index.tiers[KvTier.PEER], settings.peer_credit),
            (index.tiers[KvTier.HOST], settings.host_credit),
            (index.tiers[KvTier.DISK], settings.disk_credit),
            (index.tiers[KvTier.OBJECT], settings.object_credit),
        )

    def held_tokens(self, ask: Ask) -> Floats | None:
        """By holder bit; the last entry is 0 and stands for all bits beyond. None: nobody holds any."""
        hashes = ask.block_hashes
        if not hashes:
            return None
        index, size = self._index, ask.block_size_tokens
        depths, sets = index.device.prefixes(hashes)
        held = by_holder(depths, sets, size) if depths else None
        if len(index.predicted):
            depths, sets = index.predicted.prefixes(hashes)
            if depths:
                there = by_holder(depths, sets, size)
                held = there if held is None else np.maximum(*_as_long(held, there))
        held = self._with_slower_tiers(hashes, size, held)
        if held is not None and len(hashes) * size >= ask.prompt_tokens:
            np.minimum(held, ask.prompt_tokens - 1, held)
        return held

    def _with_slower_tiers(self, hashes: Sequence[int], size: int, held: Floats | None) -> Floats | None:
        """What a slower tier has beyond what is counted already, for its credit; the dearest tier first."""
        for tier, credit in self._slower:
            if not len(tier):
                continue
            depths, sets = tier.prefixes(hashes)
            if not depths:
                continue
            there = by_holder(depths, sets, size)
            if held is None:
                held = np.zeros(1)
            held, there = _as_long(held, there)
            held += credit * np.maximum(there - held, 0)
        return held


def by_holder(depths: Sequence[int], sets: Sequence[int], size: int) -> Floats:
    """Tokens held by holder bit, from one index: no holder is in two sets. The last entry is nobody's."""
    if len(sets) == 1 and not (holders := sets[0]) & (holders - 1):
        held = np.zeros(holders.bit_length() + 1)
        held[-2] = depths[0] * size
        return held
    # One row of zeros and ones per set; their product with the depths is several times faster than going set by set.
    width = (max([holders.bit_length() for holders in sets]) >> 3) + 1
    packed = b"".join([holders.to_bytes(width, "little") for holders in sets])
    rows = _DIGITS.take(np.frombuffer(packed, np.uint8), 0).reshape(len(sets), width * 8)
    summed: Floats = np.dot(np.array([float(depth * size) for depth in depths]), rows)
    return summed


def _as_long(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Both with as many entries as the longer one."""
    missing = len(first) - len(second)
    if missing > 0:
        return first, np.concatenate((second, np.zeros(missing)))
    return (np.concatenate((first, np.zeros(-missing))), second) if missing else (first, second)
