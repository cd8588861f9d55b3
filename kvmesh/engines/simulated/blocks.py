"""The block pool: references, prefix cache, eviction, leases. No clock, no I/O.

Blocks are accounted for by the run: those that were taken, named and let go together are one entry until somebody wants only
the first of them, so that a long prompt costs little more than a short one. They are neighbours in memory where there is room.

Invariants:
1. Every block is exactly one of free, cached (named, without a holder), held (by requests), leased (held by a handle).
2. A name maps to at most one block, and that block's content is complete.
3. `take_events` replayed from the start gives the set of named blocks; none is removed before those that follow it.
4. A block that is not free belongs to exactly one run; all blocks of a run are in the same state.
5. Who holds blocks holds whole runs: holding and naming cut the run that goes on behind them.
6. Who holds a named block holds the named blocks before it in its chain, so no chain lacks its beginning, and what follows
   a block that somebody holds last is a run of its own. (Who computed what others had named meanwhile takes over theirs.)
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored
from kvmesh.engines.simulated.free_blocks import FreeSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; they add up to the total."""

    free: int
    cached: int
    held: int
    leased: int


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks in the same state, in their holders' order. `names` are a chain whose first one follows `parent`; None: they have none.

    What holds the names is shared with events and never changed; what holds the blocks is the run's own, and never empty.
    """

    blocks: list[int]
    references: int = 1
    leases: int = 0
    names: Sequence[int] | None = None
    parent: int | None = None

    def shared_with(self, names: Sequence[int], place: int) -> int:
        """How many of its names, from its first on, stand in `names` from `place` on.

        A name covers all before it in its chain, so the last one that is equal stands for the others.
        """
        own = self.names
        assert own is not None
        most = min(len(own), len(names) - place)
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
    """All blocks of an engine, named by number from 0.

    While cached ones that nobody holds are left, `spare` blocks stay free, and up to as many more where that keeps a run whole.
    """

    def __init__(self, total: int, spare: int = 0) -> None:
        self.total = total
        self._spare = spare
        self._free = FreeSpace(total)
        self._runs: dict[int, _Run] = {}
        """By their first block."""
        self._named: dict[int, _Run] = {}
        """By the first of their names."""
        self._idle: OrderedDict[_Run, None] = OrderedDict()
        """Cached runs without a holder, least recently used first."""
        self._idle_blocks = 0
        self._leased = 0
        self._events: list[KvEvent] = []
        self._removed: list[int] = []
        self._event_blocks = 0

    @property
    def available(self) -> int:
        return self._free.count + self._idle_blocks

    @property
    def leased(self) -> int:
        return self._leased

    def counts(self) -> BlockCounts:
        held = self.total - self.available - self._leased
        return BlockCounts(free=self._free.count, cached=self._idle_blocks, leased=self._leased, held=held)

    # Holding

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix. They are not held: `hold` them before anything else is allocated."""
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
        """How many of these blocks have no holder. Holding them reduces `available` by that number."""
        idle = place = 0
        while place < len(blocks):
            run = self._runs[blocks[place]]
            idle += 0 if run.references else min(len(run.blocks), len(blocks) - place)
            place += len(run.blocks)
        return idle

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference on each."""
        for run in self._cut_out(blocks):
            if not run.references:
                self._idle.pop(run, None)
                self._idle_blocks -= len(run.blocks)
            run.references += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference and undefined content, in order of their numbers, neighbours if there are so many.

        The oldest idle cached ones are evicted when too few others are left. ValueError when there are not enough.
        """
        if count > self.available:
            raise ValueError("not enough blocks")
        self._make_room(count + self._spare)
        taken = self._free.take(count)
        if taken:
            self._runs[taken[0]] = _Run(taken)
        return taken.copy()

    def allocate_one(self) -> int:
        """A block with one reference; there must be one `available`."""
        if self._free.count <= self._spare:
            self._make_room(1 + self._spare)
        block = self._free.take_one()
        self._runs[block] = _Run([block])
        return block

    def _make_room(self, count: int) -> None:
        """Forgets the oldest idle blocks, the last ones of a run before its first, until so many are free or none is idle."""
        while self._idle and (missing := count - self._free.count) > 0:
            run = next(iter(self._idle))
            self._free.give(self._forget(run, min(missing + self._spare, len(run.blocks))))

    def _forget(self, run: _Run, count: int) -> list[int]:
        """The last blocks of an idle run are neither idle nor cached any more."""
        assert run.names is not None
        blocks = run.blocks
        self._removed += run.names[: -count - 1 : -1]
        if count == len(blocks):
            del self._idle[run], self._runs[blocks[0]], self._named[run.names[0]]
        else:
            run.names = run.names[:-count]
            run.blocks, blocks = blocks[:-count], blocks[-count:]
        self._idle_blocks -= count
        self._event_blocks += count
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less on each. The last ones of a chain become evictable first."""
        self._drop(self._cut_out(blocks))

    def _drop(self, runs: list[_Run]) -> None:
        for run in reversed(runs):
            run.references -= 1
            if run.references:
                continue
            if run.names is None:
                del self._runs[run.blocks[0]]
                self._free.give(run.blocks)
            else:
                self._idle[run] = None
                self._idle_blocks += len(run.blocks)

    def lease(self, blocks: Sequence[int]) -> None:
        """Turns one reference on each into a handle's."""
        for run in self._cut_out(blocks):
            self._leased += 0 if run.leases else len(run.blocks)
            run.leases += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Undoes `lease` and drops the reference."""
        runs = self._cut_out(blocks)
        for run in runs:
            run.leases -= 1
            self._leased -= 0 if run.leases else len(run.blocks)
        self._drop(runs)

    def _cut_out(self, blocks: Sequence[int]) -> list[_Run]:
        """The runs that are just these blocks, which begin where runs do."""
        found: list[_Run] = []
        place = 0
        while place < len(blocks):
            run = self._runs[blocks[place]]
            if place + len(run.blocks) > len(blocks):
                run = self._cut(run, len(blocks) - place)
            found.append(run)
            place += len(run.blocks)
        return found

    def _cut(self, run: _Run, count: int) -> _Run:
        """A run's first blocks as one of their own. The rest keeps its place in the order of eviction."""
        front = _Run(run.blocks[:count], run.references, run.leases, parent=run.parent)
        run.blocks = run.blocks[count:]
        self._runs[front.blocks[0]], self._runs[run.blocks[0]] = front, run
        if run.names is not None:
            front.names, run.names = run.names[:count], run.names[count:]
            run.parent = front.names[-1]
            self._named[front.names[0]], self._named[run.names[0]] = front, run
        return front

    # Names

    def name(self, blocks: list[int], first: int, names: Sequence[int], parent: int | None) -> None:
        """Makes complete blocks of a holder, from number `first` of its blocks on, reusable under their names.

        Each is the child of the one before, the first one that of `parent`, the name of the block before it. Where a name is
        taken the holder gives up its own block for the one that has it. `names` is kept, so it must not be changed.
        """
        if names[0] in self._named:
            known = self.match(names)
            self.hold(known)
            self.drop(blocks[first : first + len(known)])
            blocks[first : first + len(known)] = known
            first, parent, names = first + len(known), names[len(known) - 1], names[len(known) :]
        if names:
            self._name(blocks[first : first + len(names)], names, parent)

    def name_one(self, blocks: list[int], place: int, name: int, parent: int | None) -> None:
        """The same for one block. One that was allocated alone, as those of answers are, is a run already."""
        run = self._runs.get(blocks[place])
        if run is None or len(run.blocks) > 1 or name in self._named:
            self.name(blocks, place, [name], parent)
            return
        run.names, run.parent = [name], parent
        self._named[name] = run
        self._stored(run.names, parent)

    def _name(self, blocks: list[int], names: Sequence[int], parent: int | None) -> None:
        self._stored(names, parent)
        place = 0
        for run in self._cut_out(blocks):
            run.names = own = names[place : place + len(run.blocks)]
            run.parent = parent
            self._named[own[0]] = run
            parent = own[-1]
            place += len(own)

    def forget_idle(self) -> None:
        """Evicts all cached blocks without a holder."""
        for run in list(self._idle):
            self._free.give(self._forget(run, len(run.blocks)))
        if not self._named:
            self._removed = []
            self._events.append(KvCleared())

    def discard_idle(self, blocks: Sequence[int]) -> list[int]:
        """Forgets those of these blocks that nobody holds, with all that follows them in their chains.

        Gives these blocks' numbers: they are free now, as others of them may have been before.
        """
        held: set[int] = set()
        gone: set[int] = set()
        for block in blocks:
            run = self._runs.get(block)
            if run is not None and run.references:
                held.update(run.blocks)
            elif run is not None and run.names is not None:
                gone.add(run.names[0])
        self._forget_chains(gone)
        return [block for block in blocks if block not in held]

    def _forget_chains(self, gone: set[int]) -> None:
        """Frees idle runs that begin with these names, and those that follow them, which became idle before."""
        runs: list[_Run] = []
        for run in reversed(self._idle):
            assert run.names is not None
            if run.names[0] in gone or run.parent in gone:
                gone.update(run.names)
                runs.append(run)
        for run in reversed(runs):
            self._free.give(self._forget(run, len(run.blocks)))

    def cached_names(self) -> set[int]:
        """Names of all cached blocks, held ones included."""
        return {name for run in self._named.values() for name in run.names or ()}

    # Events

    def _stored(self, names: Sequence[int], parent: int | None) -> None:
        if self._removed:
            self._flush_removed()
        self._events.append(KvStored(block_hashes=names, parent_hash=parent))
        self._event_blocks += len(names)

    def _flush_removed(self) -> None:
        self._events.append(KvRemoved(block_hashes=self._removed))
        self._removed = []

    @property
    def event_blocks(self) -> int:
        """Block changes in the events not taken yet."""
        return self._event_blocks

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        if self._removed:
            self._flush_removed()
        events, self._events = self._events, []
        self._event_blocks = 0
        return events

    def snapshot_events(self) -> list[KvEvent]:
        """Events that give the present state from any earlier one; parents before their children."""
        followers: dict[int | None, list[_Run]] = {}
        for run in self._named.values():
            followers.setdefault(run.parent, []).append(run)
        events: list[KvEvent] = [KvCleared()]
        waiting = followers.pop(None, [])
        while waiting:
            run = waiting.pop()
            names = list(run.names or ())
            while len(behind := followers.pop(names[-1], [])) == 1:
                names += behind[0].names or ()
            waiting += behind
            events.append(KvStored(block_hashes=names, parent_hash=run.parent))
        return events
