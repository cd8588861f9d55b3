"""Caches lookups, with the few probes that show whether a cached one is still valid. Pure.

The result of a lookup depends on the holders of a few sentinel blocks only: the last block of each prefix that some holder has, and the
block after it. While their holders are unchanged the result is valid, also for another prompt: two probes per depth instead of two times
the logarithm of the prompt's length. Prompts that start alike mostly have their sentinels at the same places, so the cache keeps the newest
lookup by the prompt's first block. At 2 048 blocks it takes a lookup from 40 to 6 us.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

Prefixes = tuple[tuple[int, ...], tuple[int, ...]]
"""Depths, the deepest last, and for each the set of the holders whose longest cached prefix it is."""

NO_PREFIXES: Prefixes = ((), ())
"""The result when no holder is found; always this very object."""

ENTRIES_MAX = 2048
SENTINELS_MAX = 64
"""A lookup with more sentinels is not cached. Both limits together bound the memory to about 10 MB."""
_UNBOUNDED = 1 << 62


@dataclass(slots=True, eq=False, kw_only=True)
class _CachedLookup:
    """The result of a lookup. `sentinels` returns the sentinel blocks of a prompt, `holders` are their holders."""

    prefixes: Prefixes
    sentinels: Callable[[Sequence[int]], tuple[int, ...]] | None = None
    """None: the result was found once. Most are never found again, and this takes as long as a short lookup."""
    holders: tuple[int | None, ...] = ()
    blocks_min: int = 0
    blocks_max: int = 0
    """Prompts of these lengths have the sentinels, and end where it makes no difference."""


class LookupCache:
    """The cache of one index. Must be cleared when a bit is assigned or dropped."""

    __slots__ = ("_lookups",)

    def __init__(self) -> None:
        self._lookups: dict[int, _CachedLookup] = {}

    def clear(self) -> None:
        self._lookups.clear()

    def find(self, block_hashes: Sequence[int], get: Callable[[int], int | None]) -> Prefixes | None:
        """Returns the result of a lookup. None: it is not cached. `get` returns the holders of a block."""
        lookup = self._lookups.get(block_hashes[0])
        if lookup is None or (sentinels := lookup.sentinels) is None:
            return None
        if not lookup.blocks_min <= len(block_hashes) <= lookup.blocks_max:
            return None
        return lookup.prefixes if tuple(map(get, sentinels(block_hashes))) == lookup.holders else None

    def add(self, block_hashes: Sequence[int], prefixes: Prefixes, get: Callable[[int], int | None]) -> None:
        """Adds the result of a lookup; the first block has a holder."""
        lookup = self._lookups.get(block_hashes[0])
        if lookup is None or lookup.prefixes != prefixes:
            if 2 * len(prefixes[0]) < SENTINELS_MAX:
                # A least-recently-used order would cost every lookup; after a clear, a prefix is cached again by its second lookup.
                if len(self._lookups) >= ENTRIES_MAX:
                    self._lookups.clear()
                self._lookups[block_hashes[0]] = _CachedLookup(prefixes=prefixes)
            return
        count, deepest = len(block_hashes), prefixes[0][-1]
        # For each depth, the last block of the prefix (depth - 1) and the block after it (depth), which exists unless the prompt ends there.
        places = {0, *(depth - 1 for depth in prefixes[0]), *prefixes[0]} - {count}
        # For a single place (a prompt of one block) `itemgetter` would return the block instead of a tuple.
        if len(places) > 1:
            lookup.sentinels = itemgetter(*sorted(places))
            lookup.holders = tuple(map(get, lookup.sentinels(block_hashes)))
            # If a holder has the whole prompt cached, it may also have more blocks of a longer prompt. Otherwise the result is the same
            # for every longer prompt.
            lookup.blocks_min, lookup.blocks_max = (count, count) if deepest == count else (deepest + 1, _UNBOUNDED)
