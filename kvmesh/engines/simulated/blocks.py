"""The block pool: references, prefix cache, eviction, leases. No clock, no I/O.

The pool accounts by runs: blocks that were allocated, named and dropped together are one entry until a holder needs only the first of
them. So a long prompt costs little more than a short one: 0.8 ms of CPU at 8 000 tokens, where per-block accounting took 3.2 ms
(docs/contribute/benchmark-history.md). Blocks are named by their hashes.

Invariants:
1. Every block is exactly one of free, cached (named, without a holder), held (by requests), leased (held by a handle).
2. A name belongs to at most one block, and that block is complete.
3. Replaying `take_events` from the start gives the set of named blocks. A block is removed after the blocks that follow it.
4. A block that is not free belongs to exactly one run; all blocks of a run are in the same state.
5. A holder holds whole runs: `hold` and `name` split a run that continues after the given blocks.
6. The holder of a named block holds all named blocks before it in its chain, so no chain lacks its beginning. If two holders computed the
   same block, the second takes the block that the first has named.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored
from kvmesh.engines.simulated.free_blocks import FreeBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state. The sum is the total."""

    free: int
    cached: int
    held: int
    leased: int


@dataclass(slots=True, eq=False, kw_only=True)
class _BlockRun:
    """Blocks in the same state, in their holders' order. `names` are a chain that follows the name `parent`; None: no names.

    The sequence of names is shared with events and never changed. The list of blocks is the run's own and never empty.
    """

    blocks: list[int]
    references: int = 1
    leases: int = 0
    names: Sequence[int] | None = None
    parent: int | None = None

    def shared_with(self, names: Sequence[int], place: int) -> int:
        """Returns how many of this run's first names equal those of `names` from `place` on.

        A name covers its whole chain, so if two names are equal, the ones before them are too.
        """
        own = self.names
        assert own is not None
        most = min(len(own), len(names) - place)
        # A name covers the chain before it, so this comparison shows that the whole run is shared. Otherwise bisection finds the first
        # difference.
        if own[most - 1] == names[place + most - 1]:
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high) // 2
            if own[middle] == names[place + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class BlockPool:
    """All blocks of an engine, numbered from 0.

    Evicts idle cached blocks so that `spare` blocks stay free, and up to as many more if that keeps a run whole.
    """

    def __init__(self, total: int, spare: int = 0) -> None:
        self.total = total
        self._spare = spare
        self._free = FreeBlocks(total)
        self._runs: dict[int, _BlockRun] = {}
        """By their first block."""
        self._named: dict[int, _BlockRun] = {}
        """By the first of their names."""
        self._idle: OrderedDict[_BlockRun, None] = OrderedDict()
        """Cached runs without a holder, least recently used first."""
        self._idle_blocks = 0
        self.leased = 0
        self._events: list[KvEvent] = []
        self._removed: list[int] = []

    @property
    def available(self) -> int:
        return self._free.count + self._idle_blocks

    def counts(self) -> BlockCounts:
        held = self.total - self.available - self.leased
        return BlockCounts(free=self._free.count, cached=self._idle_blocks, leased=self.leased, held=held)

    # Holding

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Returns the blocks of the longest cached prefix. Call `hold` on them before the next allocation."""
        found: list[int] = []
        place = 0
        while place < len(hashes) and (run := self._named.get(hashes[place])) is not None:
            shared = run.shared_with(hashes, place)
            found += run.blocks[:shared]
            place += shared
            if shared < len(run.blocks):
                break
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """Returns how many of these blocks have no holder. Holding them reduces `available` by that number."""
        idle = place = 0
        while place < len(blocks):
            run = self._runs[blocks[place]]
            idle += 0 if run.references else min(len(run.blocks), len(blocks) - place)
            place += len(run.blocks)
        return idle

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block."""
        for run in self._runs_of(blocks):
            if not run.references:
                # None: `_runs_of` has just split the run, and the rear keeps the entry.
                self._idle.pop(run, None)
                self._idle_blocks -= len(run.blocks)
            run.references += 1

    def allocate(self, count: int) -> list[int]:
        """Returns the blocks with one reference and undefined content, in ascending order, consecutive if possible.

        Evicts the least recently used idle blocks if necessary. ValueError when too few are available.
        """
        if count > self.available:
            raise ValueError("not enough blocks")
        self._make_room(count + self._spare)
        taken = self._free.take(count)
        if taken:
            self._runs[taken[0]] = _BlockRun(blocks=taken)
        # The holder appends to its list; the run's own list must not change.
        return taken.copy()

    def allocate_one(self) -> int:
        """Returns a block with one reference. One must be `available`."""
        if self._free.count <= self._spare:
            self._make_room(1 + self._spare)
        block = self._free.take_one()
        self._runs[block] = _BlockRun(blocks=[block])
        return block

    def _make_room(self, count: int) -> None:
        """Evicts idle blocks, the end of a run before its beginning, until `count` are free or none is idle."""
        while self._idle and (missing := count - self._free.count) > 0:
            run = next(iter(self._idle))
            self._free.give(self._evict(run, min(missing + self._spare, len(run.blocks))))

    def _evict(self, run: _BlockRun, count: int) -> list[int]:
        """Evicts the last `count` blocks of an idle run. The caller frees them."""
        assert run.names is not None
        blocks = run.blocks
        # In reverse: a block is removed after the blocks that follow it (invariant 3).
        self._removed += run.names[: -count - 1 : -1]
        if count == len(blocks):
            del self._idle[run], self._runs[blocks[0]], self._named[run.names[0]]
        else:
            run.names = run.names[:-count]
            run.blocks, blocks = blocks[:-count], blocks[-count:]
        self._idle_blocks -= count
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        """Drops a reference on each block. The end of a chain becomes evictable first."""
        self._drop(self._runs_of(blocks))

    def _drop(self, runs: list[_BlockRun]) -> None:
        for run in reversed(runs):
            run.references -= 1
            if run.references:
                continue
            if run.names is None:
                del self._runs[run.blocks[0]]
                self._free.give(run.blocks)
            else:
                # Runs are dropped in reverse, so the end of a chain is evicted before its beginning.
                self._idle[run] = None
                self._idle_blocks += len(run.blocks)

    def lease(self, blocks: Sequence[int]) -> None:
        """Turns one reference on each block into a lease."""
        for run in self._runs_of(blocks):
            # Several handles may lease the same blocks, which count once.
            self.leased += 0 if run.leases else len(run.blocks)
            run.leases += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Ends a lease and drops its reference."""
        runs = self._runs_of(blocks)
        for run in runs:
            run.leases -= 1
            self.leased -= 0 if run.leases else len(run.blocks)
        self._drop(runs)

    def _runs_of(self, blocks: Sequence[int]) -> list[_BlockRun]:
        """Returns the runs of exactly these blocks, which start at the beginning of a run. Splits the last run if necessary."""
        found: list[_BlockRun] = []
        place = 0
        while place < len(blocks):
            run = self._runs[blocks[place]]
            if place + len(run.blocks) > len(blocks):
                run = self._split(run, len(blocks) - place)
            found.append(run)
            place += len(run.blocks)
        return found

    def _split(self, run: _BlockRun, count: int) -> _BlockRun:
        """Splits a run. Returns its first `count` blocks as a new run; the rest keeps its place in the order of eviction."""
        # The old object becomes the rear, so that it keeps its entry in `_idle`.
        front = _BlockRun(blocks=run.blocks[:count], references=run.references, leases=run.leases, parent=run.parent)
        run.blocks = run.blocks[count:]
        self._runs[front.blocks[0]], self._runs[run.blocks[0]] = front, run
        if run.names is not None:
            front.names, run.names = run.names[:count], run.names[count:]
            run.parent = front.names[-1]
            self._named[front.names[0]], self._named[run.names[0]] = front, run
        return front

    # Names

    def name(self, blocks: list[int], first: int, names: Sequence[int], *, parent: int | None) -> None:
        """Names a holder's complete blocks, `blocks[first:]`, so that others can reuse them.

        The names are a chain that follows `parent`. If another block has a name already, the holder drops its own block and takes that
        one. `names` is stored: the caller must not change it.
        """
        if names[0] in self._named:
            known = self.match(names)
            self.hold(known)
            self.drop(blocks[first : first + len(known)])
            blocks[first : first + len(known)] = known
            first, parent, names = first + len(known), names[len(known) - 1], names[len(known) :]
        if names:
            self._name(blocks[first : first + len(names)], names, parent)

    def name_one(self, blocks: list[int], *, place: int, name: int, parent: int | None) -> None:
        """`name` for one block, faster if the block is a run of its own, as the blocks of answers are."""
        run = self._runs.get(blocks[place])
        if run is None or len(run.blocks) > 1 or name in self._named:
            self.name(blocks, place, [name], parent=parent)
            return
        run.names, run.parent = [name], parent
        self._named[name] = run
        self._stored(run.names, parent)

    def _name(self, blocks: list[int], names: Sequence[int], parent: int | None) -> None:
        self._stored(names, parent)
        place = 0
        for run in self._runs_of(blocks):
            run.names = own = names[place : place + len(run.blocks)]
            run.parent = parent
            self._named[own[0]] = run
            parent = own[-1]
            place += len(own)

    def evict_idle(self) -> None:
        """Evicts all idle cached blocks."""
        for run in list(self._idle):
            self._free.give(self._evict(run, len(run.blocks)))
        if not self._named:
            self._removed = []
            # One event instead of all removals.
            self._events.append(KvCleared())

    def cached_names(self) -> set[int]:
        """Returns the names of all cached blocks, including held ones. For tests."""
        return {name for run in self._named.values() for name in run.names or ()}

    # Events

    def _stored(self, names: Sequence[int], parent: int | None) -> None:
        if self._removed:
            # Removals are collected only until the next store, since the order of events matters.
            self._flush_removed()
        self._events.append(KvStored(block_hashes=names, parent_hash=parent))

    def _flush_removed(self) -> None:
        self._events.append(KvRemoved(block_hashes=self._removed))
        self._removed = []

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        if self._removed:
            self._flush_removed()
        events, self._events = self._events, []
        return events

    def snapshot_events(self) -> list[KvEvent]:
        """Events that lead to the present state from any earlier one. Parents come before their children."""
        followers: dict[int | None, list[_BlockRun]] = {}
        for run in self._named.values():
            followers.setdefault(run.parent, []).append(run)
        events: list[KvEvent] = [KvCleared()]
        waiting = followers.pop(None, [])
        while waiting:
            run = waiting.pop()
            names = list(run.names or ())
            # Runs without a branch become one event. The pop that ends this loop returns the branches (none or several), which wait below.
            while len(behind := followers.pop(names[-1], [])) == 1:
                names += behind[0].names or ()
            waiting += behind
            events.append(KvStored(block_hashes=names, parent_hash=run.parent))
        return events
