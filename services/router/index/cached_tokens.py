"""How many tokens of a prompt each candidate has cached, over all tiers and predictions. Pure.

A block on the device counts fully; a block that only a slower tier has counts for that tier's credit. The last token of a prompt is
always computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.core import Ask, KvTier
from services.router.index.kv_index import KvIndex
from services.router.index.lookup_cache import NO_PREFIXES, Prefixes

Floats = NDArray[np.float64]

_BITS_OF_BYTES: Floats = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
    np.float64
)
"""The eight bits of every byte, the lowest first."""


CACHED_FLOATS_MAX = 1 << 20
"""Bound of the cache: 8 MiB."""
ENTRY_FLOATS = 128
"""Size of an entry in addition to its arrays: 1 KiB."""


@dataclass(slots=True, eq=False, kw_only=True)
class CandidateTokens:
    """Tokens of a prompt that each candidate of a pool has cached. Read only."""

    prefill: Floats
    decode: Floats
    decode_max: float


class Holders(Protocol):
    """The candidates of a pool, as holders of blocks."""

    key: object
    """Represents the pool in the cache, which must not keep unused pools alive."""
    no_tokens: CandidateTokens

    def select_tokens(self, by_bit: Floats, *, block_size_tokens: int, holders_version: int) -> CandidateTokens:
        """Returns the tokens of the candidates, given those of all holders."""
        ...


Key = tuple[object, int, int, Prefixes, Prefixes, tuple[Prefixes, ...]]


class CachedTokens:
    """Combines the lookups of all tiers.

    Prompts with a common prefix find the same holders at the same depths until an event or a placement changes that, so the arrays are
    cached by what the lookups found: this saves a third of a decision. The cache is emptied when a holder is added, because entries with
    holders that left would never be used again.
    """

    def __init__(self, index: KvIndex, tier_credits: Mapping[KvTier, float]) -> None:
        """A block on several tiers counts for the one with the highest credit, as an engine loads it from the fastest."""
        self._index = index
        by_credit = sorted(tier_credits.items(), key=lambda item: -item[1])
        self._slower = [(index.tiers[tier], credit) for tier, credit in by_credit]
        # The dictionaries themselves, which their indexes never replace: while slower tiers are empty, a decision only checks these.
        self._slower_blocks = [blocks for tier, _ in self._slower for blocks in (tier.holders, tier.heads)]
        """Mostly empty, all of them."""
        self._cache: dict[Key, CandidateTokens] = {}
        self._holders_version = index.device.holders_version

    def __len__(self) -> int:
        """Entries of the cache."""
        return len(self._cache)

    def of(self, ask: Ask, pool: Holders) -> CandidateTokens:
        """Returns what the candidates of a pool have cached of the prompt."""
        hashes, index = ask.block_hashes, self._index
        if not hashes:
            return pool.no_tokens
        device, predicted = index.device.prefixes(hashes), index.predicted.prefixes(hashes)
        slower: tuple[Prefixes, ...] = ()
        if any(self._slower_blocks):
            slower = tuple([tier.prefixes(hashes) for tier, _ in self._slower])
        if device is NO_PREFIXES and predicted is NO_PREFIXES and all(found is NO_PREFIXES for found in slower):
            return pool.no_tokens
        version = index.device.holders_version
        if self._holders_version != version:
            self._holders_version = version
            self._cache.clear()
        size = ask.block_size_tokens
        # A prompt that is held as a whole, and ends with a block: its last token is computed.
        tokens_max = ask.prompt_tokens - 1 if len(hashes) * size >= ask.prompt_tokens else -1
        # Depths and sets of holders stand for the prompt: prompts that find the same ones share an entry.
        key = (pool.key, size, tokens_max, device, predicted, slower)
        tokens = self._cache.get(key)
        if tokens is None:
            width = (index.device.bits_end >> 3) + 1
            # There are at most as many candidates as bits.
            if (len(self._cache) + 1) * (8 * width + ENTRY_FLOATS) > CACHED_FLOATS_MAX:
                self._cache.clear()
            by_bit = self._combine(deepest_prefixes(device, predicted), slower, block_size_tokens=size, width=width)
            if tokens_max >= 0:
                np.minimum(by_bit, tokens_max, by_bit)
            tokens = pool.select_tokens(by_bit, block_size_tokens=size, holders_version=version)
            self._cache[key] = tokens
        return tokens

    def _combine(self, prefixes: Prefixes, slower: Sequence[Prefixes], *, block_size_tokens: int, width: int) -> Floats:
        tokens = covered = tokens_by_bit(prefixes, block_size_tokens, width=width)
        for found, (_, credit) in zip(slower, self._slower, strict=False):
            # What a faster tier covers has counted already, though perhaps in part.
            depths = np.maximum(tokens_by_bit(found, block_size_tokens, width=width), covered)
            tokens = tokens + credit * (depths - covered)
            covered = depths
        return tokens


def tokens_by_bit(prefixes: Prefixes, block_size_tokens: int, width: int) -> Floats:
    """Returns the tokens by holder bit, as many as `width` bytes have bits. No holder is in two of the sets."""
    depths, sets = prefixes
    if not depths:
        return np.zeros(width * 8)
    # One row of zeros and ones per set, times the depths: several times faster than one set after the other.
    packed = b"".join([holders.to_bytes(width, "little") for holders in sets])
    rows = _BITS_OF_BYTES.take(np.frombuffer(packed, np.uint8), 0).reshape(len(sets), width * 8)
    tokens: Floats = np.array(depths, np.float64).dot(rows)
    tokens *= block_size_tokens
    return tokens


def deepest_prefixes(known: Prefixes, predicted: Prefixes) -> Prefixes:
    """Both together; a holder stays in one set, the one with its greater depth."""
    depths, sets = list(known[0]), list(known[1])
    # Predicted sets are disjoint, so those that are appended below need no comparison with each other.
    of_known = range(len(depths))
    for depth, holders in zip(*predicted, strict=True):
        for i in of_known:
            if depths[i] >= depth:
                holders &= ~sets[i]
        if holders:
            for i in of_known:
                sets[i] &= ~holders
            depths.append(depth)
            sets.append(holders)
    return tuple(depths), tuple(sets)
