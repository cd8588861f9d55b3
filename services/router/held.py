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
from services.router.index import Match

_DIGITS: Floats = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float64)
"""The eight binary digits of every byte, the lowest first."""


REMEMBERED_FLOATS_MAX = 1 << 20
"""Of arrays that are kept because lookups give the same again and again: 8 MiB."""


class Overlap:
    """Looks prompts up.

    Prompts that begin alike find the same holders at the same depths until an event or a placement changes that, so what a lookup
    comes to is remembered by what it found.
    """

    def __init__(self, index: KvIndex, settings: CostSettings) -> None:
        self._index = index
        self._tiers = [index.tiers[tier] for tier in (KvTier.PEER, KvTier.HOST, KvTier.DISK, KvTier.OBJECT)]
        self._remembered: dict[tuple[int, ...], Floats] = {}
        self._credits = (settings.peer_credit, settings.host_credit, settings.disk_credit, settings.object_credit)

    def held_tokens(self, ask: Ask) -> Floats | None:
        """By holder bit. None: nobody holds any."""
        hashes = ask.block_hashes
        if not hashes:
            return None
        index, size = self._index, ask.block_size_tokens
        width = (index.device.bits_end >> 3) + 1
        depths, sets = index.device.prefixes(hashes)
        if len(index.predicted):
            add_predicted(depths, sets, index.predicted.match(hashes))
        held = self._by_holder(depths, sets, size, width) if depths else None
        if any(map(len, self._tiers)):
            held = self._with_slower_tiers(hashes, size, held, width)
        if held is not None and len(hashes) * size >= ask.prompt_tokens:
            held = np.minimum(held, ask.prompt_tokens - 1)
        return held

    def _by_holder(self, depths: Sequence[int], sets: Sequence[int], size: int, width: int) -> Floats:
        """As `by_holder`; not to be written to."""
        if len(sets) == 1:
            return by_holder(depths, sets, size, width)
        found = (size, width, *depths, *sets)
        held = self._remembered.get(found)
        if held is None:
            if (len(self._remembered) + 1) * 8 * width > REMEMBERED_FLOATS_MAX:
                self._remembered.clear()
            held = self._remembered[found] = by_holder(depths, sets, size, width)
            held.flags.writeable = False
        return held

    def _with_slower_tiers(self, hashes: Sequence[int], size: int, held: Floats | None, width: int) -> Floats | None:
        """What a slower tier has beyond what is counted already, for its credit; the dearest tier first."""
        for tier, credit in zip(self._tiers, self._credits, strict=True):
            depths, sets = tier.prefixes(hashes)
            if depths:
                there = by_holder(depths, sets, size, width)
                before = np.zeros(width * 8) if held is None else held
                held = before + credit * np.maximum(there - before, 0)
        return held


def by_holder(depths: Sequence[int], sets: Sequence[int], size: int, width: int) -> Floats:
    """Tokens held by holder bit, from one index: no holder is in two sets. As long as `width` bytes have bits."""
    if len(sets) == 1 and not (holders := sets[0]) & (holders - 1):
        held = np.zeros(width * 8)
        held[holders.bit_length() - 1] = depths[0] * size
        return held
    # One row of zeros and ones per set; their product with the depths is several times faster than going set by set.
    packed = b"".join([holders.to_bytes(width, "little") for holders in sets])
    rows = _DIGITS.take(np.frombuffer(packed, np.uint8), 0).reshape(len(sets), width * 8)
    summed: Floats = np.dot(np.array([float(depth * size) for depth in depths]), rows)
    return summed


def add_predicted(depths: list[int], sets: list[int], found: Sequence[Match]) -> None:
    """Adds what is believed to what is known. A holder stays in one set, that of its greater depth."""
    known = range(len(depths))
    for match in found:
        depth, holders = match.depth, match.holders
        for i in known:
            if depths[i] >= depth:
                holders &= ~sets[i]
        if holders:
            for i in known:
                sets[i] &= ~holders
            depths.append(depth)
            sets.append(holders)
