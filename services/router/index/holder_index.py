"""Which workers hold which KV blocks: chained block hash -> bit set of holders, and a longest-prefix match per holder.

A holder is one data-parallel rank of one worker; it has a bit. Sets are plain integers: blocks of a run share one integer
object, so a block held once costs its two dictionary slots and its key.

The match jumps along the chain: where the holders at both ends of a stretch are the same, it takes them for the holders of
all blocks between. That is right when everybody who holds a block holds its ancestors too. A holder that evicted a block
and kept a child of it breaks this; such a block is remembered as a *cut* of the holder, and holders with cuts are checked.

Invariants:
1. For every block in the index with a known parent, `_children` leads from the parent to it.
2. A holder that holds a block but not its parent has the parent among its cuts; a cut is never held by its holder.
3. A bit that is not in `_live` counts nowhere. It is among `traces` until a whole sweep has taken it off all sets.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from services.router.index.lookup_cache import NOBODY, Prefixes, Recall

_CHECKED_FIRST = 64


@dataclass(frozen=True, slots=True)
class Match:
    """Holders (a bit set) whose longest held prefix is `depth` blocks; depth is at least 1."""

    depth: int
    holders: int


def bits(holders: int) -> list[int]:
    """Bit numbers of a set, ascending. Reading the digits is several times faster than shifting."""
    return [bit for bit, digit in enumerate(bin(holders)[:1:-1]) if digit == "1"]


class HolderIndex:
    """The index of one tier. Block counts are per holder. Whoever owns the index gives the bits out."""

    __slots__ = (
        "_checked_at",
        "_children",
        "_counts",
        "_cut_mask",
        "_cuts",
        "_cuts_checked_at",
        "_dead",
        "_live",
        "_recall",
        "_sweeper",
        "bits_end",
        "holders",
        "holders_version",
    )

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        """By block, those of dropped holders included until they are swept. Others only read, and do not keep a view."""
        self._children: dict[int, int | set[int]] = {}
        self._counts: list[int] = []
        self.bits_end = 0
        """All bits given out so far are below it."""
        self._cuts: dict[int, set[int]] = {}
        self._cut_mask = 0
        self._checked_at: dict[int, int] = {}
        self._cuts_checked_at: dict[int, int] = {}
        self._live = 0
        self._dead = 0
        self._sweeper: Generator[None, None, None] | None = None
        self._recall = Recall()
        self.holders_version = 0
        """Counts up whenever a bit is given out: whoever remembers bits looks them up again."""

    def __len__(self) -> int:
        """Distinct blocks, those of dropped holders included until they are swept."""
        return len(self.holders)

    @property
    def traces(self) -> int:
        """Dropped holders of which something is left; their bits must not be given out again."""
        return self._dead

    def add_holder(self, bit: int) -> None:
        """Takes in a new, empty holder. Its bit is not in `traces`."""
        self.holders_version += 1
        self._counts.extend([0] * (bit + 1 - len(self._counts)))
        self.bits_end = len(self._counts)
        self._live |= 1 << bit
        self._recall.clear()

    def drop_holder(self, bit: int) -> None:
        """Forgets all of a holder's blocks in O(1); the memory comes back with `sweep`."""
        self._live &= ~(1 << bit)
        self._recall.clear()
        if self._counts[bit]:
            self._dead |= 1 << bit
        self._counts[bit] = 0
        self._forget_cuts(bit)

    def count(self, bit: int) -> int:
        """Blocks that the holder holds."""
        return self._counts[bit]

    def blocks_of(self, bit: int) -> set[int]:
        """All blocks of a holder, found by looking at every block: for checks."""
        return {block for block, holders in self.holders.items() if holders & self._live & 1 << bit}

    def holds(self, bit: int, block_hash: int) -> bool:
        """True when the holder holds the block."""
        return bool(self.holders.get(block_hash, 0) >> bit & 1)

    def has_cuts(self, bit: int) -> bool:
        """True when some held block of it may lack an ancestor."""
        return bool(self._cut_mask >> bit & 1)

    def stored(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        """The holder holds these too, each the child of the one before. Storing again changes nothing."""
        mask = 1 << bit
        if self._cut_mask & mask:
            self._heal_cuts(bit, block_hashes)
        if not self._store_new_run(bit, mask, block_hashes):
            self._store_one_by_one(bit, mask, block_hashes)
        if parent_hash is not None:
            self._link(parent_hash, block_hashes[0])
            if not self.holders.get(parent_hash, 0) & mask:
                self._add_cut(bit, parent_hash)

    def removed(self, bit: int, block_hashes: Sequence[int]) -> int:
        """The holder holds these no more. Gives how many it did not hold."""
        return len(self._remove(bit, block_hashes))

    def _remove(self, bit: int, block_hashes: Sequence[int]) -> list[int]:
        """The same. Gives those that it did not hold."""
        mask = 1 << bit
        if self._remove_run(bit, mask, block_hashes):
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
        for block in parents:
            child = children[block]
            if isinstance(child, set):
                self._after_removal(bit, mask, block)
            elif (who := holders.get(child, 0)) & mask:
                self._add_cut(bit, block)
            elif not who and block not in holders:
                del children[block]
        return unknown

    def match(self, block_hashes: Sequence[int]) -> list[Match]:
        """Leading blocks held consecutively, per holder; holders of none are left out. Deepest last."""
        return list(map(Match, *self.prefixes(block_hashes)))

    def prefixes(self, block_hashes: Sequence[int]) -> Prefixes:
        """The same as depths and sets of holders.

        Probes grow with the number of distinct depths times the logarithm of the length over that number; a prompt that begins
        like one of late and ends at the same places takes two per depth.
        """
        get = self.holders.get
        alive = get(block_hashes[0], 0) & self._live if block_hashes else 0
        if not alive:
            return NOBODY
        found = self._recall.find(block_hashes, get)
        if found is None:
            found = self._search(block_hashes, alive)
            self._recall.keep(block_hashes, found, get)
        return self._without_cuts(block_hashes, *found) if self._cut_mask else found

    def forget_lookups(self) -> None:
        """The next lookups are made anew."""
        self._recall.clear()

    def _search(self, block_hashes: Sequence[int], alive: int) -> Prefixes:
        """The jump search. `alive`: those who hold the first block, at least one."""
        get = self.holders.get
        depths: list[int] = []
        sets: list[int] = []
        low, last = 0, len(block_hashes) - 1
        # `alive` holds block `low`. Ends looked at and not yet reached, the nearest last, with those of `alive` who hold there.
        ends = [(last, get(block_hashes[last], 0))]
        while ends and alive:
            high, there = ends.pop()
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
                    if halfway != there:
                        ends.append((high, there))
                    high, there = middle, halfway
            depths.append(high)
            sets.append(alive & ~there)
            low, alive = high, there
        if alive:
            depths.append(last + 1)
            sets.append(alive)
        return tuple(depths), tuple(sets)

    def _without_cuts(self, block_hashes: Sequence[int], depths: Sequence[int], sets: Sequence[int]) -> Prefixes:
        """The same with holders that have cuts looked at block by block."""
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
        """The true depth, at most `depth`. A missing block before a held one is a cut or leads to one further on."""
        if self._cuts[bit].isdisjoint(block_hashes[:depth]):
            return depth
        get, mask = self.holders.get, 1 << bit
        return next((i for i in range(depth) if not get(block_hashes[i], 0) & mask), depth)

    def _store_new_run(self, bit: int, mask: int, block_hashes: Sequence[int]) -> bool:
        """Stores a run of blocks that nobody knows, at the speed of the dictionary. False: not such a run."""
        if not (self.holders.keys().isdisjoint(block_hashes) and self._children.keys().isdisjoint(block_hashes)):
            return False
        run = dict.fromkeys(block_hashes, mask)
        if len(run) != len(block_hashes):
            return False
        self.holders.update(run)
        self._children.update(pairwise(block_hashes))
        self._counts[bit] += len(run)
        return True

    def _remove_run(self, bit: int, mask: int, block_hashes: Sequence[int]) -> bool:
        """Removes blocks that all have the same holders, at the speed of the dictionary. False: they are not such."""
        holders, children = self.holders, self._children
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
            if isinstance(child, int) and child in run:
                if not left:
                    del children[block]
            elif child is not None:
                self._after_removal(bit, mask, block)
        return True

    def _store_one_by_one(self, bit: int, mask: int, block_hashes: Sequence[int]) -> None:
        holders = self.holders
        added = 0
        previous: int | None = None
        # Neighbours mostly have the same holders: they share one integer object, and the union is made once.
        shared_old, shared_new = 0, mask
        for block in block_hashes:
            old = holders.get(block)
            if old is None:
                holders[block] = mask
                added += 1
                if previous is not None:
                    self._link(previous, block)
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
        """Takes blocks that left the index off a large set of children, each time it has doubled."""
        if len(known) >= self._checked_at.get(parent, _CHECKED_FIRST):
            alive = {child for child in known if child in self.holders}
            self._children[parent] = alive
            self._checked_at[parent] = max(_CHECKED_FIRST, 2 * len(alive))

    def _after_removal(self, bit: int, mask: int, block: int) -> None:
        """A block with several children left a holder: a cut if it kept one of them."""
        if self._holds_child(mask, block):
            self._add_cut(bit, block)
        elif block not in self.holders:
            self._forget_childless(block)

    def _children_of(self, block: int) -> Iterable[int]:
        known = self._children.get(block, ())
        return (known,) if isinstance(known, int) else known

    def _holds_child(self, mask: int, block: int) -> bool:
        get = self.holders.get
        return any(get(child, 0) & mask for child in self._children_of(block))

    def _forget_childless(self, block: int) -> None:
        """Frees the entry of a block that left the index, unless somebody still holds a child of it."""
        if not any(child in self.holders for child in self._children_of(block)):
            self._children.pop(block, None)
            self._checked_at.pop(block, None)

    def _add_cut(self, bit: int, block: int) -> None:
        cuts = self._cuts.setdefault(bit, set())
        cuts.add(block)
        self._cut_mask |= 1 << bit
        if len(cuts) >= self._cuts_checked_at.get(bit, _CHECKED_FIRST):
            self._prune_cuts(bit)

    def _heal_cuts(self, bit: int, block_hashes: Sequence[int]) -> None:
        cuts = self._cuts[bit]
        cuts.difference_update(block_hashes)
        if not cuts:
            self._forget_cuts(bit)

    def _prune_cuts(self, bit: int) -> None:
        """Takes off cuts whose children the holder has lost since. Each time the set has doubled."""
        cuts = self._cuts[bit]
        for block in [block for block in cuts if not self._holds_child(1 << bit, block)]:
            cuts.discard(block)
            if block not in self.holders:
                self._forget_childless(block)
        self._cuts_checked_at[bit] = max(_CHECKED_FIRST, 2 * len(cuts))
        if not cuts:
            self._forget_cuts(bit)

    def _forget_cuts(self, bit: int) -> None:
        self._cuts.pop(bit, None)
        self._cuts_checked_at.pop(bit, None)
        self._cut_mask &= ~(1 << bit)

    def sweep(self, blocks_max: int) -> bool:
        """Looks at up to `blocks_max` blocks for bits of dropped holders. False: nothing is left to be swept."""
        if self._sweeper is None:
            if not self._dead:
                return False
            self._sweeper = self._swept_blocks(self._dead)
        if sum(1 for _ in islice(self._sweeper, blocks_max)) < blocks_max:
            self._sweeper = None
        return self._sweeper is not None or bool(self._dead)

    def _swept_blocks(self, dead: int) -> Generator[None, None, None]:
        """One whole sweep; yields once per block looked at. The index may change between two steps."""
        holders = self.holders
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
        self._dead &= ~dead
