"""Notices that prompts and cache can never meet: overlap that is zero by construction, not by chance. Pure.

The first block of a prompt that a worker has computed is in its cache, and so in the events that it tells. When the same
first block is asked for again and again and the worker's events never name it, then frontend and engine do not mean the
same thing by a hash. Chance is ruled out: a prompt that never came twice says nothing, nor does a worker whose blocks are
not exactly known, and while a cache has never been full nothing was evicted from it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.settings import setting

FULL_FACTOR = 10
"""With a cache that is or was nearly full, misses may be evictions: so many times as many are needed."""


class OverlapFault(StrEnum):
    """Why nothing can ever match."""

    BLOCK_SIZE = "block_size_mismatch"
    HASHES = "hash_mismatch"
    NO_BLOCKS = "no_blocks_told"


ADVICE = {
    OverlapFault.BLOCK_SIZE: "frontend and worker cut prompts into blocks of different size",
    OverlapFault.HASHES: "the worker tells of blocks, and never of those that prompts name: the hash seed, the salt or "
    "the template that the frontend and the engine use differ",
    OverlapFault.NO_BLOCKS: "the worker says that it tells its cache and tells of no block: its prefix caching is off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """When zero overlap counts as a fault of the set-up."""

    repeats: int = setting(
        20,
        "Prompts that begin like an earlier one on the same worker and match nothing, until it is called a fault.",
        min=1,
    )
    prefixes_max: int = setting(512, "Beginnings of prompts remembered for each worker.", min=1)
    settle_s: float = setting(
        2.0, "A prompt placed less than this ago may not have been told of yet and says nothing.", min=0
    )
    full_fraction: float = setting(
        0.9, "A cache filled so far may have evicted blocks, so that misses are weaker evidence.", min=0.01, max=1
    )


@dataclass(slots=True, eq=False, kw_only=True)
class OverlapWatch:
    """One worker, since its process began."""

    fault: OverlapFault | None = None
    has_matched: bool = False
    was_full: bool = False
    misses: int = 0
    placed: "OrderedDict[int, float]" = field(default_factory=OrderedDict)


def size_mismatch(watch: OverlapWatch, ask_block_size: int, worker_block_size: int) -> bool:
    """True when this is news: hashes of one block size cannot match blocks of another."""
    if ask_block_size == worker_block_size:
        if watch.fault is OverlapFault.BLOCK_SIZE:
            watch.fault = None
        return False
    is_news = watch.fault is not OverlapFault.BLOCK_SIZE
    watch.fault = OverlapFault.BLOCK_SIZE
    return is_news


def is_repeat(watch: OverlapWatch, settings: OverlapSettings, first_hash: int, now: float) -> bool:
    """Remembers how a prompt begins that is placed on the worker. True: one that began so was placed there before, and long enough
    ago that the worker must have told of it."""
    placed = watch.placed
    before = placed.get(first_hash)
    if before is not None and now - before < settings.settle_s:
        return False
    placed[first_hash] = now
    placed.move_to_end(first_hash)
    if len(placed) > settings.prefixes_max:
        placed.popitem(last=False)
    return before is not None


def repeated(
    watch: OverlapWatch, settings: OverlapSettings, *, is_held: bool, blocks_told: int, blocks_total: int
) -> bool:
    """A repeat was placed on a worker whose blocks are exactly known. True: a fault is found just now.

    `is_held`: the worker's own events name the prompt's first block. Once that was so, hashes agree for good.
    """
    if is_held:
        watch.has_matched, watch.fault, watch.misses = True, None, 0
        watch.placed.clear()
        return False
    watch.was_full = watch.was_full or blocks_told >= settings.full_fraction * blocks_total
    watch.misses += 1
    if watch.fault is not None or watch.misses < settings.repeats * (FULL_FACTOR if watch.was_full else 1):
        return False
    watch.fault = OverlapFault.HASHES if blocks_told else OverlapFault.NO_BLOCKS
    return True
