"""Prompts that are predicted to be cached because requests were placed: bounded in time and in number. Pure; times are arguments.

For a worker with cache events a placement is predicted to be cached until the worker's own event arrives, so the second of a burst of
equal prompts finds the first. For a worker without events, placements take the place of its cache: for longer, and for no more blocks
than it has (approximate mode).

Block hashes are chained, so two prompts that are equal at one position are equal before it. Placements therefore form a radix tree: its
nodes are stretches of blocks, split where prompts differ. To add, match or remove a placement takes a binary search in each stretch on its
path, whatever its length in blocks.

Invariants:
1. A placement ends exactly at the end of its stretch. `counts[bit]` of a stretch are the placements of `bit` that end in it or below it, and
   `holders` are the bits with a count.
2. A stretch without holders is not in the tree. `count(bit)` is the length of all stretches that have `bit`.
3. A placement is in its holder's records and in one queue, or in neither. Queues are in the order of their ends.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from services.router.index.lookup_cache import NO_PREFIXES, Prefixes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetime:
    """How long placements are kept, and how many of all workers; beyond, the oldest is removed.

    Each lifetime has a queue of its own. It is a key at every placement, so it is compared by identity.
    """

    ttl_s: float
    placements_max: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Stretch:
    """A node of the tree: blocks `start` to `end` of some prompts. `blocks[0]` is their block `offset`."""

    blocks: Sequence[int]
    offset: int
    start: int
    end: int
    parent: "_Stretch | None"
    holders: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    children: dict[int, "_Stretch"] = field(default_factory=dict)

    def shared(self, asked: Sequence[int], count: int) -> int:
        """Returns the blocks from the prompt's start that `asked` has in common; its block `start` is known to be equal."""
        blocks, offset = self.blocks, self.offset
        high = self.end if self.end < count else count
        # Hashes are chained, so equal last blocks mean equal stretches: a prompt that has the whole stretch needs one comparison.
        if blocks[high - 1 - offset] == asked[high - 1]:
            return high
        low, high = self.start, high - 1
        # Blocks are equal at `low` and different at `high`.
        while high - low > 1:
            middle = (low + high) // 2
            if blocks[middle - offset] == asked[middle]:
                low = middle
            else:
                high = middle
        return high


@dataclass(slots=True, eq=False, kw_only=True)
class _Prediction:
    """One placement of the prompt that ends with the block `last`, on the holder `bit`."""

    bit: int
    last: int
    stretch: _Stretch
    lifetime: Lifetime
    ends_at: float


class PredictedIndex:
    """Has the same bits and the same `match` as the indexes of the tiers."""

    def __init__(self, *, blocks_max: int) -> None:
        """`blocks_max` bounds the blocks in the tree, each counted once, and so its memory (40 bytes a block)."""
        self._blocks_max = blocks_max
        self._blocks = 0
        self._placements = 0
        self._first: dict[int, _Stretch] = {}
        self._records: dict[int, OrderedDict[int, _Prediction]] = {}
        self._queues: dict[Lifetime, OrderedDict[_Prediction, None]] = {}
        self._counts: dict[int, int] = {}
        self._live = 0
        self._ends_first = inf
        """No placement ends before this time."""

    def __len__(self) -> int:
        """Placements, including those of dropped holders until they are swept."""
        return self._placements

    @property
    def traces(self) -> int:
        """Dropped holders that are not fully swept; their bits must not be assigned again."""
        return sum(1 << bit for bit in self._records if not self._live >> bit & 1)

    def count(self, bit: int) -> int:
        """Distinct blocks that are predicted for the holder."""
        return self._counts.get(bit, 0) if self._live >> bit & 1 else 0

    def add_holder(self, bit: int) -> None:
        self._live |= 1 << bit

    def drop_holder(self, bit: int) -> None:
        self._live &= ~(1 << bit)

    def sweep(self, records_max: int) -> bool:
        """Removes up to `records_max` placements of dropped holders. False: nothing is left to sweep."""
        for bit in [bit for bit in self._records if not self._live >> bit & 1]:
            while records_max and bit in self._records:
                self._remove(next(iter(self._records[bit].values())))
                records_max -= 1
            if not records_max:
                return bool(self.traces)
        return False

    def add(
        self,
        bit: int,
        block_hashes: Sequence[int],
        *,
        now: float,
        lifetime: Lifetime,
        holder_blocks_max: int | None = None,
    ) -> None:
        """Predicts that the holder will have these blocks, from the prompt's first one on. Adding them again renews the prediction.

        Only the first `holder_blocks_max` blocks count; the holder's oldest placements make room. The caller must not change
        `block_hashes` afterwards.
        """
        if holder_blocks_max is not None and len(block_hashes) > holder_blocks_max:
            block_hashes = block_hashes[:holder_blocks_max]
        if not block_hashes:
            return
        self.expire(now)
        # The hash of the last block identifies the whole prompt.
        last, records = block_hashes[-1], self._records.get(bit)
        if records is None:
            records = self._records[bit] = OrderedDict()
        elif (known := records.get(last)) is not None:
            self._renew(known, now)
            return
        stretch = self._stretch_for(block_hashes)
        self._add_count(stretch, bit)
        ends_at = now + lifetime.ttl_s
        placed = records[last] = _Prediction(bit=bit, last=last, stretch=stretch, lifetime=lifetime, ends_at=ends_at)
        queue = self._queues.get(lifetime)
        if queue is None:
            queue = self._queues[lifetime] = OrderedDict()
        queue[placed] = None
        self._placements += 1
        if ends_at < self._ends_first:
            self._ends_first = ends_at
        self._keep_bounds(placed, holder_blocks_max)

    def confirm(self, bit: int, block_hashes: Sequence[int]) -> None:
        """The holder's events named these blocks: removes the predictions that end with one of them."""
        records = self._records.get(bit)
        if records and not records.keys().isdisjoint(block_hashes):
            for last in records.keys() & set(block_hashes):
                self._remove(records[last])

    def end(self, bit: int, last: int) -> None:
        records = self._records.get(bit)
        if records is not None and (placed := records.get(last)) is not None:
            self._remove(placed)

    def expire(self, now: float) -> None:
        if now < self._ends_first:
            return
        for queue in self._queues.values():
            while queue and (placed := next(iter(queue))).ends_at <= now:
                self._remove(placed)
        self._ends_first = min((next(iter(queue)).ends_at for queue in self._queues.values() if queue), default=inf)

    def rename(self, old: int, new: int) -> None:
        """Moves the placements of `old` to `new`, which must have none."""
        if old not in self._records:
            return
        records = self._records[new] = self._records.pop(old)
        for placed in records.values():
            # Added before the removal: a stretch without holders leaves the tree.
            self._add_count(placed.stretch, new)
            self._remove_count(placed.stretch, old)
            placed.bit = new
        del self._counts[old]

    def prefixes(self, block_hashes: Sequence[int]) -> Prefixes:
        """Returns the longest predicted prefixes, as depths and sets of holders."""
        stretch = self._first.get(block_hashes[0]) if block_hashes else None
        alive = self._live & stretch.holders if stretch is not None else 0
        if not alive:
            return NO_PREFIXES
        depths: list[int] = []
        sets: list[int] = []
        count, depth = len(block_hashes), 0
        while alive and stretch is not None:
            stays = alive & stretch.holders
            if stays != alive:
                depths.append(depth)
                sets.append(alive ^ stays)
                alive = stays
                if not alive:
                    break
            depth = stretch.shared(block_hashes, count)
            stretch = stretch.children.get(block_hashes[depth]) if depth == stretch.end and depth < count else None
        if alive:
            depths.append(depth)
            sets.append(alive)
        return tuple(depths), tuple(sets)

    def _stretch_for(self, block_hashes: Sequence[int]) -> _Stretch:
        """Returns the stretch that ends with the prompt; adds it if there is none."""
        count, depth = len(block_hashes), 0
        parent: _Stretch | None = None
        while True:
            siblings = parent.children if parent is not None else self._first
            stretch = siblings.get(block_hashes[depth])
            if stretch is None:
                # To copy a long prompt takes as long as the rest of a decision, so the prompt is shared unless most of it would be unused.
                blocks, offset = (block_hashes, 0) if 2 * depth <= count else (tuple(block_hashes[depth:]), depth)
                new = _Stretch(blocks=blocks, offset=offset, start=depth, end=count, parent=parent)
                siblings[block_hashes[depth]] = new
                self._blocks += count - depth
                return new
            depth = stretch.shared(block_hashes, count)
            if depth < stretch.end:
                stretch = self._split(stretch, depth)
            if depth == count:
                return stretch
            parent = stretch

    def _split(self, lower: _Stretch, depth: int) -> _Stretch:
        """Splits a stretch at `depth`. Returns the new upper one; the lower one keeps the placements that end in it."""
        parent, first = lower.parent, lower.blocks[lower.start - lower.offset]
        upper = _Stretch(
            blocks=lower.blocks,
            offset=lower.offset,
            start=lower.start,
            end=depth,
            parent=parent,
            holders=lower.holders,
            counts=dict(lower.counts),
        )
        upper.children[lower.blocks[depth - lower.offset]] = lower
        (parent.children if parent is not None else self._first)[first] = upper
        lower.start, lower.parent = depth, upper
        return upper

    def _add_count(self, stretch: _Stretch | None, bit: int) -> None:
        while stretch is not None:
            before = stretch.counts.get(bit, 0)
            stretch.counts[bit] = before + 1
            if not before:
                stretch.holders |= 1 << bit
                self._counts[bit] = self._counts.get(bit, 0) + stretch.end - stretch.start
            stretch = stretch.parent

    def _remove_count(self, stretch: _Stretch | None, bit: int) -> None:
        """Removes one placement from the path, and stretches without holders from the tree."""
        while stretch is not None:
            stretch.counts[bit] -= 1
            if not stretch.counts[bit]:
                del stretch.counts[bit]
                stretch.holders ^= 1 << bit
                length = stretch.end - stretch.start
                self._counts[bit] -= length
                if not stretch.holders:
                    # Its children have left already (invariant 1).
                    siblings = stretch.parent.children if stretch.parent is not None else self._first
                    del siblings[stretch.blocks[stretch.start - stretch.offset]]
                    self._blocks -= length
            stretch = stretch.parent

    def _renew(self, placed: _Prediction, now: float) -> None:
        placed.ends_at = now + placed.lifetime.ttl_s
        # Placements in a queue have the same lifetime, so the renewed one ends last (invariant 3).
        self._queues[placed.lifetime].move_to_end(placed)
        self._records[placed.bit].move_to_end(placed.last)

    def _keep_bounds(self, placed: _Prediction, holder_blocks_max: int | None) -> None:
        """Removes old placements. The newest one stays whatever its length."""
        records, queue = self._records[placed.bit], self._queues[placed.lifetime]
        while holder_blocks_max is not None and self._counts[placed.bit] > holder_blocks_max and len(records) > 1:
            self._remove(next(iter(records.values())))
        while len(queue) > placed.lifetime.placements_max:
            self._remove(next(iter(queue)))
        while self._blocks > self._blocks_max and self._placements > 1:
            # The longest queue shrinks, so no lifetime's placements are displaced entirely by those of another one.
            longest = sorted(self._queues.values(), key=len)[-1]
            self._remove(next(iter(longest)))

    def _remove(self, placed: _Prediction) -> None:
        records = self._records[placed.bit]
        del records[placed.last]
        del self._queues[placed.lifetime][placed]
        self._placements -= 1
        self._remove_count(placed.stretch, placed.bit)
        if not records:
            del self._records[placed.bit]
            self._counts.pop(placed.bit, None)
