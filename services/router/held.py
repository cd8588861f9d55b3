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
from services.router.index import HolderIndex, Match


class Overlap:
    """Looks prompts up."""

    def __init__(self, index: KvIndex, settings: CostSettings) -> None:
        self._index = index
        self._credits = (
            (KvTier.PEER, settings.peer_credit),
            (KvTier.HOST, settings.host_credit),
            (KvTier.DISK, settings.disk_credit),
            (KvTier.OBJECT, settings.object_credit),
        )

    def held_tokens(self, ask: Ask) -> Floats | None:
        """By holder bit; the last entry is 0 and stands for all bits beyond. None: nobody holds any."""
        hashes = ask.block_hashes
        if not hashes:
            return None
        index, size = self._index, ask.block_size_tokens
        found = index.device.match(hashes)
        held = by_holder(found, size) if found else None
        predicted: HolderIndex | None = getattr(index, "predicted", None)
        if predicted is not None and len(predicted) and (found := predicted.match(hashes)):
            there = by_holder(found, size)
            held = there if held is None else np.maximum(*_as_long(held, there))
        if len(index.tiers) > 1:
            held = self._with_slower_tiers(hashes, size, held)
        return None if held is None else np.minimum(held, ask.prompt_tokens - 1, held)

    def _with_slower_tiers(self, hashes: Sequence[int], size: int, held: Floats | None) -> Floats | None:
        """What a slower tier has beyond what is counted already, for its credit; the dearest tier first."""
        for tier, credit in self._credits:
            known = self._index.tiers.get(tier)
            if known is None or not len(known) or not (found := known.match(hashes)):
                continue
            there = by_holder(found, size)
            if held is None:
                held = np.zeros(1)
            held, there = _as_long(held, there)
            held += credit * np.maximum(there - held, 0)
        return held


def by_holder(found: Sequence[Match], size: int) -> Floats:
    """Tokens held by holder bit, from one index: its matches have no holder in common. The last entry is nobody's."""
    if len(found) == 1 and not (holders := found[0].holders) & (holders - 1):
        held = np.zeros(holders.bit_length() + 1)
        held[-2] = found[0].depth * size
        return held
    # One row of bits per match; a product with the depths is several times faster than indexing row by row.
    width = (max([match.holders.bit_length() for match in found]) >> 3) + 1
    packed = b"".join([match.holders.to_bytes(width, "little") for match in found])
    rows = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").reshape(len(found), width * 8)
    depths: Floats = np.array([match.depth * size for match in found], dtype=np.float64)
    return depths @ rows


def _as_long(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Both with as many entries as the longer one."""
    missing = len(first) - len(second)
    if missing > 0:
        return first, np.concatenate((second, np.zeros(missing)))
    return (np.concatenate((first, np.zeros(-missing))), second) if missing else (first, second)
