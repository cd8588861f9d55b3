"""An index that adds blocks to its dictionaries when a lookup reaches them, and keeps other blocks as the lists in which they arrived. Pure.

Most blocks of long prompts are stored, evicted and never looked up. A run of new blocks is therefore kept as a *pending* list until a
lookup reaches its first block. Blocks that are evicted before that are compared with the end of the list and cut off. Both take the speed
of lists: 46 instead of 120 bytes a block, and half of the router's CPU for prompts of 8 000 tokens. Everything else is *flushed*: the runs
concerned are added to the dictionaries first.

Invariants, for a holder with pending runs:
1. No block is in two of its runs, or in one of them and in the dictionaries.
2. The parent of a run is in the dictionaries, or the run starts a prompt. Blocks that continue a run are appended to it.
3. It has no cuts.

Block hashes are chained: two chains with a common block are equal from there back to where one of them starts. So if a holder lacks the
first block of a run, the whole run is new to it. The blocks that a holder has outside the dictionaries always start with the first block
of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.index.holder_index import HolderIndex
from services.router.index.lookup_cache import Prefixes

RUN_BLOCKS_MIN = 8
"""A shorter run, unless it continues a pending one, takes more memory as a list than in the dictionaries."""

PENDING_HOLDERS_MAX = 2
"""Holders of one prompt: a prefill and a decode worker. Blocks of more holders take less memory in the dictionaries."""

PENDING_BLOCKS_MAX = 65_536
"""Of one holder. Bounds the time of a flush to about 30 ms."""


@dataclass(slots=True, eq=False)
class _PendingRun:
    """Pending blocks of one holder, each the child of the one before; never empty."""

    bit: int
    blocks: list[int]
    parent: int | None


@dataclass(slots=True, eq=False)
class _PendingRuns:
    """The runs of one holder by their last blocks, and the number of runs by parent."""

    blocks: int = 0
    runs: dict[int, _PendingRun] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)


class LazyIndex(HolderIndex):
    """Answers like its base class. `holds` must be called for looked-up blocks only: pending blocks are not searched."""

    __slots__ = ("_blocks_max", "_pending", "heads")

    def __init__(self, *, pending_blocks_max: int = PENDING_BLOCKS_MAX) -> None:
        super().__init__()
        self._blocks_max = pending_blocks_max
        self.heads: dict[int, tuple[_PendingRun, ...]] = {}
        """Pending runs by their first blocks."""
        self._pending: dict[int, _PendingRuns] = {}

    def __len__(self) -> int:
        """Distinct blocks, except that a block that is pending for two holders counts twice."""
        return len(self.holders) + sum(pending.blocks for pending in self._pending.values())

    def __bool__(self) -> bool:
        return bool(self.holders or self.heads)

    def count(self, bit: int) -> int:
        pending = self._pending.get(bit)
        return super().count(bit) + (pending.blocks if pending is not None else 0)

    def drop_holder(self, bit: int) -> None:
        """Drops a holder; `sweep` frees the memory of its blocks in the dictionaries."""
        pending = self._pending.pop(bit, None)
        for run in pending.runs.values() if pending is not None else ():
            self._remove_head(run, run.blocks[0])
        super().drop_holder(bit)

    def store(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        # The blocks may be pending in the middle of a run, where a lookup by block does not find them (invariant 1).
        self._flush_holder(bit)
        super().store(bit, block_hashes, parent_hash)

    def store_lazily(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        """The same, for blocks that may never be looked up. Without `parent_hash` they start a prompt."""
        if not self.has_cuts(bit) and (
            self._append_to_run(bit, block_hashes, parent_hash) or self._start_run(bit, block_hashes, parent_hash)
        ):
            return
        super().store(bit, block_hashes, parent_hash)
        # Invariant 3.
        if self.has_cuts(bit):
            self._flush_holder(bit)

    def remove(self, bit: int, block_hashes: Sequence[int]) -> int:
        """Removes blocks from a holder. Returns how many it did not hold."""
        pending = self._pending.get(bit)
        if pending is None:
            return super().remove(bit, block_hashes)
        rest = self._cut_off(pending, block_hashes)
        # The parent of a run is about to leave the dictionaries, which would break invariant 2.
        if not pending.parents.keys().isdisjoint(rest):
            self._flush_holder(bit)
        unknown = self._remove(bit, rest)
        # Unknown blocks may be in the middle of a run, and a cut breaks invariant 3.
        if unknown or self.has_cuts(bit):
            self._flush_holder(bit)
            unknown = self._remove(bit, unknown)
        return len(unknown)

    def prefixes(self, block_hashes: Sequence[int]) -> Prefixes:
        """Returns the longest cached prefixes, as depths and sets of holders. Flushes the runs that the prompt reaches."""
        found = super().prefixes(block_hashes)
        while self.heads and block_hashes and self._flush_reached(block_hashes, found[0]):
            found = super().prefixes(block_hashes)
        return found

    def _flush_reached(self, block_hashes: Sequence[int], depths: Sequence[int]) -> bool:
        """Flushes the runs that start where the prompt starts, or where the prefix of a holder ends. False: there are none."""
        # The block at index `depth` is the first one that the holders of this depth lack: their pending run starts with it. A prompt that is
        # held as a whole has no such block.
        inside = depths if not depths or depths[-1] < len(block_hashes) else depths[:-1]
        ends = [block_hashes[0], *map(block_hashes.__getitem__, inside)]
        if self.heads.keys().isdisjoint(ends):
            return False
        for block in ends:
            self._flush(self.heads.get(block, ()))
        return True

    def _append_to_run(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None) -> bool:
        """Appends to the run that ends with the parent. False: there is none; a run with the parent inside is flushed."""
        pending = self._pending.get(bit)
        if pending is None or parent_hash is None:
            return False
        # Runs are keyed by their last block, so a run that grows gets a new key in `_on_growth`.
        run = pending.runs.pop(parent_hash, None)
        if run is not None:
            run.blocks += block_hashes
            self._on_growth(pending, run, len(block_hashes))
        elif not self.holds(bit, parent_hash):
            # A linear search, but only for a prompt that branches off in the middle of a run; the flush makes the next one fast.
            self._flush([run for run in pending.runs.values() if parent_hash in run.blocks])
        return run is not None

    def _start_run(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None) -> bool:
        """Adds a pending run. False: the blocks must be added to the dictionaries; no pending run contains one of them."""
        first = block_hashes[0]
        # Invariant 2.
        if parent_hash is not None and not self.holds(bit, parent_hash):
            return False
        same = self.heads.get(first, ())
        if len(same) >= PENDING_HOLDERS_MAX or any(run.bit == bit for run in same):
            self._flush(same)
            return False
        # The holder has a part of this prompt. Later blocks may be pending then, in runs that start with one of these blocks.
        if self.holds(bit, first):
            self._flush([run for block in block_hashes for run in self.heads.get(block, ()) if run.bit == bit])
        # Blocks that another holder has in the dictionaries need no new entries there.
        if len(block_hashes) < RUN_BLOCKS_MIN or first in self.holders:
            return False
        run = _PendingRun(bit, list(block_hashes), parent_hash)
        self.heads[first] = (*same, run)
        pending = self._pending.setdefault(bit, _PendingRuns())
        if parent_hash is not None:
            pending.parents[parent_hash] = pending.parents.get(parent_hash, 0) + 1
        self._on_growth(pending, run, len(block_hashes))
        return True

    def _on_growth(self, pending: _PendingRuns, run: _PendingRun, blocks: int) -> None:
        pending.blocks += blocks
        self._record_end(pending, run)
        # The first run is the one that has not grown for the longest time, because a run that grows is inserted again.
        while pending.blocks > self._blocks_max:
            self._flush([next(iter(pending.runs.values()))])

    def _record_end(self, pending: _PendingRuns, run: _PendingRun) -> None:
        other = pending.runs.get(run.blocks[-1])
        pending.runs[run.blocks[-1]] = run
        if other is not None:
            # Only a worker whose runs are not chains does this. Lookups are wrong for this worker, and for no other.
            self._store(pending, other)

    def _cut_off(self, pending: _PendingRuns, block_hashes: Sequence[int]) -> Sequence[int]:
        """Removes blocks from the ends of runs. Returns the blocks that were at no end."""
        runs = pending.runs
        if runs.keys().isdisjoint(block_hashes):
            return block_hashes
        removed = list(block_hashes)
        # An event may name evicted blocks in the order of the prompt. Runs are cut from their ends, so the last block must come first.
        if removed[0] not in runs and removed[-1] in runs:
            removed.reverse()
        rest: list[int] = []
        at = 0
        while at < len(removed):
            run = runs.pop(removed[at], None)
            if run is None:
                rest.append(removed[at])
                at += 1
                continue
            count = _common_length(removed[at : at + len(run.blocks)], run.blocks)
            # The key in `heads`, needed after the run has become empty.
            first = run.blocks[0]
            del run.blocks[-count:]
            pending.blocks -= count
            at += count
            if run.blocks:
                self._record_end(pending, run)
            else:
                self._detach(pending, run, first)
        return rest

    def _flush(self, runs: Sequence[_PendingRun]) -> None:
        for run in runs:
            pending = self._pending[run.bit]
            del pending.runs[run.blocks[-1]]
            self._store(pending, run)

    def _store(self, pending: _PendingRuns, run: _PendingRun) -> None:
        pending.blocks -= len(run.blocks)
        self._detach(pending, run, run.blocks[0])
        super().store(run.bit, run.blocks, run.parent)

    def _flush_holder(self, bit: int) -> None:
        pending = self._pending.get(bit)
        if pending is not None:
            self._flush(list(pending.runs.values()))

    def _detach(self, pending: _PendingRuns, run: _PendingRun, first: int) -> None:
        self._remove_head(run, first)
        if run.parent is not None:
            pending.parents[run.parent] -= 1
            if not pending.parents[run.parent]:
                del pending.parents[run.parent]
        if not pending.runs:
            del self._pending[run.bit]

    def _remove_head(self, run: _PendingRun, first: int) -> None:
        others = tuple([other for other in self.heads[first] if other is not run])
        if others:
            self.heads[first] = others
        else:
            del self.heads[first]


def _common_length(removed: Sequence[int], blocks: Sequence[int]) -> int:
    """Returns how many of the removed blocks are the last ones of a run, from its end; the first one is."""
    if removed == blocks[: -len(removed) - 1 : -1]:
        return len(removed)
    return next(i for i, (one, other) in enumerate(zip(removed, reversed(blocks), strict=False)) if one != other)
