"""Which workers have which KV blocks cached: chained block hash -> bit set of holders, with a longest-prefix match per holder.

A holder is one data-parallel rank of one worker; it has one bit. Sets are plain integers. The blocks of a run share one integer object,
so a block with one holder costs its two dictionary slots and its key.

The match jumps along the chain: where both ends of a stretch have the same holders, they are taken as the holders of all blocks between.
That is correct if every holder of a block holds the block's ancestors too. A holder that evicted a block and kept a child of it breaks
this. Such a block is recorded as a *cut* of the holder, and holders with cuts are checked block by block.

Invariants:
1. For every block in the index with a known parent, `_children` leads from the parent to it.
2. A holder that holds a block but not its parent has the parent among its cuts; a cut is never held by its holder.
3. A bit that is not in `_live` counts nowhere. It is among `traces` until a whole sweep has removed it from all sets.
"""

from collections.abc import Generator, Iterable, Sequence
from itertools import islice, pairwise

from services.router.index.lookup_cache import NO_PREFIXES, LookupCache, Prefixes

_PRUNE_FIRST = 64
"""Size at which a set of children or cuts is pruned for the first time; later each time it has doubled."""


def bits(holders: int) -> list[int]:
    """Returns the bit numbers of a set, ascending. Reading the digits is several times faster than shifting."""
    # Reversed and without the prefix `0b`: bit 0 comes first.
    return [bit for bit, digit in enumerate(bin(holders)[:1:-1]) if digit == "1"]


class HolderIndex:
    """The index of one tier. The owner of the index assigns the bits."""

    __slots__ = (
        "_children",
        "_counts",
        "_cut_mask",
        "_cuts",
        "_cuts_pruned_at",
        "_dead",
        "_live",
        "_lookup_cache",
        "_pruned_at",
        "_sweeper",
        "bits_end",
        "holders",
        "holders_version",
    )

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        """By block, including bits of dropped holders until they are swept. Read only for others."""
        # By parent: its only child, or the set of its children. A set for each block would cost more memory than all other entries of the block.
        self._children: dict[int, int | set[int]] = {}
        self._counts: list[int] = []
        self.bits_end = 0
        """All bits assigned so far are smaller."""
        self._cuts: dict[int, set[int]] = {}
        self._cut_mask = 0
        self._pruned_at: dict[int, int] = {}
        self._cuts_pruned_at: dict[int, int] = {}
        self._live = 0
        self._dead = 0
        self._sweeper: Generator[None, None, None] | None = None
        self._lookup_cache = LookupCache()
        self.holders_version = 0
        """Increases when a bit is assigned. Callers that keep bits of holders must read them again then."""

    def __len__(self) -> int:
        """Distinct blocks, including those of dropped holders until they are swept."""
        return len(self.holders)

    @property
    def traces(self) -> int:
        """Dropped holders that are not fully swept; their bits must not be assigned again."""
        return self._dead

    def add_holder(self, bit: int) -> None:
        """Adds an empty holder. Its bit must not be in `traces`."""
        self.holders_version += 1
        self._counts.extend([0] * (bit + 1 - len(self._counts)))
        self.bits_end = len(self._counts)
        self._live |= 1 << bit
        self._lookup_cache.clear()

    def drop_holder(self, bit: int) -> None:
        """Drops a holder with all its blocks in O(1); `sweep` frees the memory."""
        # Cached results contain live holders only. Their sentinels compare sets that still contain the dropped bit, so they show no change.
        self._live &= ~(1 << bit)
        self._lookup_cache.clear()
        # A holder without blocks leaves no trace, so its bit needs no sweep.
        if self._counts[bit]:
            self._dead |= 1 << bit
        self._counts[bit] = 0
        self._forget_cuts(bit)

    def count(self, bit: int) -> int:
        return self._counts[bit]

    def holds(self, bit: int, block_hash: int) -> bool:
        return bool(self.holders.get(block_hash, 0) >> bit & 1)

    def has_cuts(self, bit: int) -> bool:
        """Returns True when a block of the holder may lack an ancestor."""
        return bool(self._cut_mask >> bit & 1)

    def store(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        """Adds blocks to a holder, each the child of the one before. Idempotent."""
        mask = 1 << bit
        if self._cut_mask & mask:
            self._heal_cuts(bit, block_hashes)
        if not self._store_new_run(bit, mask=mask, block_hashes=block_hashes):
            self._store_one_by_one(bit, mask=mask, block_hashes=block_hashes)
        if parent_hash is not None:
            self._link(parent=parent_hash, child=block_hashes[0])
            if not self.holders.get(parent_hash, 0) & mask:
                self._add_cut(bit, block=parent_hash)

    def remove(self, bit: int, block_hashes: Sequence[int]) -> int:
        """Removes blocks from a holder. Returns how many it did not hold."""
        return len(self._remove(bit, block_hashes))

    def _remove(self, bit: int, block_hashes: Sequence[int]) -> list[int]:
        """Removes blocks from a holder. Returns those that it did not hold."""
        mask = 1 << bit
        if self._remove_run(bit, mask=mask, block_hashes=block_hashes):
            return []
        holders, children = self.holders, self._children
        parents: list[int] = []
        unknown: list[int] = []
        for block in block_hashes:
            old = holders.get(block, 0)
            if not old & mask:
                unknown.append(block)
                continue
            if old == mask:
                del holders[block]
            else:
                holders[block] = old ^ mask
            if block in children:
                parents.append(block)
        self._counts[bit] -= len(block_hashes) - len(unknown)
        # After the loop above: whether a block becomes a cut depends on its children, which the same event may remove.
        for block in parents:
            child = children[block]
            if isinstance(child, set):
                self._after_removal(bit, mask=mask, block=block)
            # The same as `_after_removal` for a single child, which is the usual case, without its calls.
            elif (who := holders.get(child, 0)) & mask:
                self._add_cut(bit, block=block)
            elif not who and block not in holders:
                del children[block]
        return unknown

    def prefixes(self, block_hashes: Sequence[int]) -> Prefixes:
        """Returns the longest cached prefixes, as depths and sets of holders.

        Takes about depths * log(length / depths) probes for that many distinct depths; two per depth when the lookup cache has an
        earlier prompt whose holders end at the same places.
        """
        get = self.holders.get
        alive = get(block_hashes[0], 0) & self._live if block_hashes else 0
        if not alive:
            return NO_PREFIXES
        found = self._lookup_cache.find(block_hashes, get)
        if found is None:
            found = self._search(block_hashes, alive)
            self._lookup_cache.add(block_hashes, found, get)
        # Cuts are applied after the cache: a cut may lie between the sentinels of a cached lookup.
        return self._without_cuts(block_hashes, *found) if self._cut_mask else found

    def _search(self, block_hashes: Sequence[int], alive: int) -> Prefixes:
        """Searches by jumps. `alive`: the holders of the first block; at least one."""
        get = self.holders.get
        depths: list[int] = []
        sets: list[int] = []
        low, last = 0, len(block_hashes) - 1
        # The holders in `alive` hold block `low`. `ends` are later blocks that were already probed, with their holders; the nearest is last.
        ends = [(last, get(block_hashes[last], 0))]
        while ends and alive:
            high, there = ends.pop()
            # A holder with a cut may hold this block although its prefix ended before.
            there &= alive
            if there == alive:
                low = high
                continue
            while high - low > 1:
                middle = (low + high) >> 1
                halfway = get(block_hashes[middle], 0) & alive
                if halfway == alive:
                    low = middle
                else:
                    # With equal sets at `middle` and `high`, no prefix ends between them, and `high` needs no second look.
                    if halfway != there:
                        ends.append((high, there))
                    high, there = middle, halfway
            # `low` and `high` are neighbours here: these holders have the blocks before `high`, and not `high`.
            depths.append(high)
            sets.append(alive & ~there)
            low, alive = high, there
        if alive:
            depths.append(last + 1)
            sets.append(alive)
        return tuple(depths), tuple(sets)

    def _without_cuts(self, block_hashes: Sequence[int], depths: Sequence[int], sets: Sequence[int]) -> Prefixes:
        exact: dict[int, int] = {}
        for found, holders in zip(depths, sets, strict=True):
            sure = holders & ~self._cut_mask
            if sure:
                exact[found] = exact.get(found, 0) | sure
            for bit in bits(holders & self._cut_mask):
                depth = self._checked_depth(bit, block_hashes, found)
                exact[depth] = exact.get(depth, 0) | 1 << bit
        order = tuple(sorted(exact))
        return order, tuple([exact[depth] for depth in order])

    def _checked_depth(self, bit: int, block_hashes: Sequence[int], depth: int) -> int:
        """Returns the exact depth, at most `depth`. A missing block before a cached one is a cut, or a cut follows."""
        if self._cuts[bit].isdisjoint(block_hashes[:depth]):
            return depth
        get, mask = self.holders.get, 1 << bit
        return next((i for i in range(depth) if not get(block_hashes[i], 0) & mask), depth)

    def _store_new_run(self, bit: int, mask: int, block_hashes: Sequence[int]) -> bool:
        """Stores a run of blocks that are all new, at the speed of the dictionary. False: they are not."""
        # A block that left the index may have an entry in `_children` while a child of it is cached; the update below would overwrite that
        # entry.
        if not (self.holders.keys().isdisjoint(block_hashes) and self._children.keys().isdisjoint(block_hashes)):
            return False
        run = dict.fromkeys(block_hashes, mask)
        # A block that occurs twice may have two children here. Only the slow way keeps both.
        if len(run) != len(block_hashes):
            return False
        self.holders.update(run)
        self._children.update(pairwise(block_hashes))
        self._counts[bit] += len(run)
        return True

    def _remove_run(self, bit: int, mask: int, block_hashes: Sequence[int]) -> bool:
        """Removes blocks that all have the same holders, at the speed of the dictionary. False: they have not."""
        holders, children = self.holders, self._children
        # Neighbours mostly share one integer object (see `_store_one_by_one`), and `count` compares identity before equality.
        shared = holders.get(block_hashes[0], 0) if block_hashes else 0
        left = shared ^ mask
        if not shared & mask or list(map(holders.get, block_hashes)).count(shared) != len(block_hashes):
            return False
        run = dict.fromkeys(block_hashes, left)
        if len(run) != len(block_hashes):
            return False
        if left:
            holders.update(run)
        else:
            for block in run:
                del holders[block]
        self._counts[bit] -= len(run)
        for block, child in zip(run, list(map(children.get, run)), strict=True):
            # A block that is removed with its only child is no cut. Its link stays while other holders have the block.
            if isinstance(child, int) and child in run:
                if not left:
                    del children[block]
            elif child is not None:
                self._after_removal(bit, mask=mask, block=block)
        return True

    def _store_one_by_one(self, bit: int, mask: int, block_hashes: Sequence[int]) -> None:
        holders = self.holders
        added = 0
        previous: int | None = None
        # Neighbours mostly have the same holders: they share one integer object, and the union is computed once.
        shared_old, shared_new = 0, mask
        for block in block_hashes:
            old = holders.get(block)
            if old is None:
                holders[block] = mask
                added += 1
                # Only for new blocks: a hash determines its parent, so a known block is linked already.
                if previous is not None:
                    self._link(parent=previous, child=block)
            elif not old & mask:
                if old != shared_old:
                    shared_old, shared_new = old, old | mask
                holders[block] = shared_new
                added += 1
            previous = block
        self._counts[bit] += added

    def _link(self, parent: int, child: int) -> None:
        known = self._children.get(parent)
        if known is None:
            self._children[parent] = child
        elif isinstance(known, set):
            known.add(child)
            self._prune_children(parent, known)
        elif known != child:
            self._children[parent] = {known, child}

    def _prune_children(self, parent: int, known: set[int]) -> None:
        if len(known) >= self._pruned_at.get(parent, _PRUNE_FIRST):
            alive = {child for child in known if child in self.holders}
            self._children[parent] = alive
            self._pruned_at[parent] = max(_PRUNE_FIRST, 2 * len(alive))

    def _after_removal(self, bit: int, mask: int, block: int) -> None:
        """A block with several children was removed from a holder: a cut, if the holder kept a child."""
        if self._holds_child(mask, block=block):
            self._add_cut(bit, block=block)
        elif block not in self.holders:
            self._forget_childless(block)

    def _children_of(self, block: int) -> Iterable[int]:
        known = self._children.get(block, ())
        return (known,) if isinstance(known, int) else known

    def _holds_child(self, mask: int, block: int) -> bool:
        get = self.holders.get
        return any(get(child, 0) & mask for child in self._children_of(block))

    def _forget_childless(self, block: int) -> None:
        """Frees the entry of a block that left the index, unless a child of it is still cached somewhere."""
        if not any(child in self.holders for child in self._children_of(block)):
            self._children.pop(block, None)
            self._pruned_at.pop(block, None)

    def _add_cut(self, bit: int, block: int) -> None:
        cuts = self._cuts.setdefault(bit, set())
        cuts.add(block)
        self._cut_mask |= 1 << bit
        if len(cuts) >= self._cuts_pruned_at.get(bit, _PRUNE_FIRST):
            self._prune_cuts(bit)

    def _heal_cuts(self, bit: int, block_hashes: Sequence[int]) -> None:
        cuts = self._cuts[bit]
        cuts.difference_update(block_hashes)
        if not cuts:
            self._forget_cuts(bit)

    def _prune_cuts(self, bit: int) -> None:
        """Removes cuts whose children the holder has lost since."""
        cuts = self._cuts[bit]
        for block in [block for block in cuts if not self._holds_child(1 << bit, block=block)]:
            cuts.discard(block)
            if block not in self.holders:
                self._forget_childless(block)
        self._cuts_pruned_at[bit] = max(_PRUNE_FIRST, 2 * len(cuts))
        if not cuts:
            self._forget_cuts(bit)

    def _forget_cuts(self, bit: int) -> None:
        self._cuts.pop(bit, None)
        self._cuts_pruned_at.pop(bit, None)
        self._cut_mask &= ~(1 << bit)

    def sweep(self, blocks_max: int) -> bool:
        """Removes bits of dropped holders from up to `blocks_max` blocks. False: nothing is left to sweep."""
        if self._sweeper is None:
            if not self._dead:
                return False
            self._sweeper = self._swept_blocks(self._dead)
        if sum(1 for _ in islice(self._sweeper, blocks_max)) < blocks_max:
            self._sweeper = None
        return self._sweeper is not None or bool(self._dead)

    def _swept_blocks(self, dead: int) -> Generator[None, None, None]:
        """One whole sweep; yields once per block. The index may change between two steps."""
        holders = self.holders
        # A dropped holder stores nothing more, so blocks that are added during the sweep do not have its bit.
        for block in list(holders):
            old = holders.get(block, 0)
            if old & dead:
                if old & ~dead:
                    holders[block] = old & ~dead
                else:
                    del holders[block]
            yield
        for block in list(self._children):
            if block not in holders and block in self._children:
                self._forget_childless(block)
            yield
        # Holders that were dropped during this sweep stay, and need a sweep of their own.
        self._dead &= ~dead
