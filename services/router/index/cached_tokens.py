"""How much of a prompt each holder has, in tokens, as an array by holder bit: what all tiers and predictions say together.

A block on the device counts fully; blocks that only a slower tier has count for that tier's credit. The last token of a prompt
is always computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmesh.core import Ask, KvTier
from services.router.index.kv_feed import KvIndex
from services.router.index.lookup_cache import NOBODY, Prefixes
from services.router.workers.board import Floats, Positions
from services.router.workers.cost_settings import CostSettings

_DIGITS: Floats = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float64)
"""The eight binary digits of every byte, the lowest first."""


REMEMBERED_FLOATS_MAX = 1 << 20
"""Bound of the remembered lookups, in floats: 8 MiB."""
ENTRY_FLOATS = 128
"""What an entry takes beside its arrays: its key, the objects and the array headers, about 1 KiB."""


@dataclass(slots=True, eq=False)
class Held:
    """Tokens by holder bit, and what of that is the candidates' of the pool that asked last (`Pool.held`)."""

    by_bit: Floats
    block_size_tokens: int
    bits: Positions | None = None
    """Those of the pool's candidates."""
    tokens: Floats | None = None
    """By candidate, the prefill side first; None: nobody of the pool holds any."""
    decode_most: float = 0.0
    """The most of a decode candidate."""


class Overlap:
    """Looks prompts up.

    Prompts that begin alike find the same holders at the same depths until an event or a placement changes that, so what a lookup
    comes to is remembered by what it found. All of it is dropped when a holder joins: what was found of the holders that left
    before is never found again, and would stay for as long as the bound allows.
    """

    def __init__(self, index: KvIndex, settings: CostSettings) -> None:
        self._index = index
        tiers = (KvTier.PEER, KvTier.HOST, KvTier.DISK, KvTier.OBJECT)
        self._slower = [index.tiers[tier] for tier in tiers]
        self._slower_blocks = [blocks for tier in self._slower for blocks in (tier.holders, tier.heads)]
        self._credits = (settings.peer_credit, settings.host_credit, settings.disk_credit, settings.object_credit)
        self._remembered: dict[tuple[int, int, int, Prefixes, Prefixes, Sequence[Prefixes]], Held] = {}
        self._holders_version = index.device.holders_version

    def forget(self) -> None:
        """Drops all remembered lookups."""
        self._remembered.clear()

    def __len__(self) -> int:
        """Lookups that are remembered."""
        return len(self._remembered)

    def held_tokens(self, ask: Ask) -> Held | None:
        """Not to be written to. None: nobody holds any."""
        hashes = ask.block_hashes
        if not hashes:
            return None
        index, size = self._index, ask.block_size_tokens
        known, believed = index.device.prefixes(hashes), index.predicted.prefixes(hashes)
        slower: Sequence[Prefixes] = ()
        if any(self._slower_blocks):
            slower = tuple([tier.prefixes(hashes) for tier in self._slower])
        if known is NOBODY and believed is NOBODY and all(found is NOBODY for found in slower):
            return None
        tokens_max = ask.prompt_tokens - 1 if len(hashes) * size >= ask.prompt_tokens else -1
        if self._holders_version != index.device.holders_version:
            self._holders_version = index.device.holders_version
            self._remembered.clear()
        found = (size, index.device.bits_end, tokens_max, known, believed, slower)
        held = self._remembered.get(found)
        if held is None:
            width = (index.device.bits_end >> 3) + 1
            if (len(self._remembered) + 1) * (16 * width + ENTRY_FLOATS) > REMEMBERED_FLOATS_MAX:
                self._remembered.clear()
            by_bit = self._by_bit(known, believed, slower, size, width)
            if tokens_max >= 0:
                np.minimum(by_bit, tokens_max, by_bit)
            held = self._remembered[found] = Held(by_bit, size)
        return held

    def _by_bit(self, known: Prefixes, believed: Prefixes, slower: Sequence[Prefixes], size: int, width: int) -> Floats:
        """What a slower tier has beyond what is counted already counts for its credit; the dearest tier comes first."""
        if believed is not NOBODY:
            known = with_predicted(known, believed)
        held = np.zeros(width * 8) if known is NOBODY else by_holder(*known, size, width)
        for found, credit in zip(slower, self._credits, strict=False):
            if found is not NOBODY:
                there = by_holder(*found, size, width)
                held += credit * np.maximum(there - held, 0)
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
    summed: Floats = np.array(depths, np.float64).dot(rows)
    summed *= size
    return summed


def with_predicted(known: Prefixes, believed: Prefixes) -> Prefixes:
    """What is believed beside what is known. A holder stays in one set, that of its greater depth."""
    depths, sets = list(known[0]), list(known[1])
    before = range(len(depths))
    for depth, holders in zip(*believed, strict=True):
        for i in before:
            if depths[i] >= depth:
                holders &= ~sets[i]
        if holders:
            for i in before:
                sets[i] &= ~holders
            depths.append(depth)
            sets.append(holders)
    return tuple(depths), tuple(sets)
