"""Detects caches that can never match: zero overlap by construction, not by chance. Pure; times are arguments.

A worker that computed a prompt caches its first block and names it in its events. When prompts with the same first block are placed
again and again and the worker's events never name it, frontend and engine compute different hashes. Chance is ruled out: prompts that
come once do not count, nor workers whose index is not exact; a cache that is nearly full may have evicted the block, so many more
misses are needed then.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

REPEATS = 20
"""Prompts that repeat a first block on one worker without a match before that is a fault."""
SETTLE_S = 2.0
"""Age of a placement from which on the worker's cache events must have named its blocks."""
FULL_FACTOR = 10
"""Times as many misses are needed of a cache that is or was nearly full."""
PREFIXES_MAX = 512
"""First blocks remembered for each worker: enough to see repeats, 50 kB."""
FULL_FRACTION = 0.9
"""A cache filled so far may have evicted blocks."""


class OverlapFault(StrEnum):
    """Why nothing can ever match."""

    BLOCK_SIZE = "block_size_mismatch"
    HASHES = "hash_mismatch"
    NO_BLOCKS = "no_blocks_reported"


ADVICE = {
    OverlapFault.BLOCK_SIZE: "frontend and worker cut prompts into blocks of different sizes",
    OverlapFault.HASHES: "the worker's cache events never name the blocks of the prompts that it computes: frontend and engine use "
    "different hash seeds, salts or chat templates",
    OverlapFault.NO_BLOCKS: "the worker announces cache events and names no block: its prefix caching is off",
}


@dataclass(slots=True, eq=False, kw_only=True)
class OverlapWatch:
    """The overlap of one worker process."""

    fault: OverlapFault | None = None
    has_matched: bool = False
    was_full: bool = False
    misses: int = 0
    first_blocks: "OrderedDict[int, float]" = field(default_factory=OrderedDict)
    """First blocks of prompts placed on the worker, with the time of the placement."""

    def on_block_size(self, *, is_same: bool) -> bool:
        """Compares the block sizes of prompt and worker. True: the fault is new."""
        if is_same:
            if self.fault is OverlapFault.BLOCK_SIZE:
                self.fault = None
            return False
        is_new = self.fault is not OverlapFault.BLOCK_SIZE
        self.fault = OverlapFault.BLOCK_SIZE
        return is_new

    def is_repeat(self, first_hash: int, now: float) -> bool:
        """Returns whether a prompt with this first block was placed here long enough ago that the worker's events must have named it."""
        placed_at = self.first_blocks.get(first_hash)
        # The time of the earlier placement stays: otherwise prompts that come more often than this would never count as repeats.
        if placed_at is not None and now - placed_at < SETTLE_S:
            return False
        self.first_blocks[first_hash] = now
        self.first_blocks.move_to_end(first_hash)
        if len(self.first_blocks) > PREFIXES_MAX:
            self.first_blocks.popitem(last=False)
        return placed_at is not None

    def on_repeat(self, *, is_cached: bool, cached_blocks: int, blocks_total: int) -> bool:
        """Records a repeat that was placed. Returns True if the fault is new.

        `is_cached`: the worker's events named the first block, so hashes agree from then on. `cached_blocks`: blocks its events named.
        """
        if is_cached:
            self.has_matched, self.fault, self.misses = True, None, 0
            self.first_blocks.clear()
            return False
        self.was_full = self.was_full or cached_blocks >= FULL_FRACTION * blocks_total
        self.misses += 1
        if self.fault is not None or self.misses < REPEATS * (FULL_FACTOR if self.was_full else 1):
            return False
        self.fault = OverlapFault.HASHES if cached_blocks else OverlapFault.NO_BLOCKS
        return True
