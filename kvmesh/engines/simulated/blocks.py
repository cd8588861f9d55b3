"""Who holds which KV block: references, prefix cache, eviction, leases. No clock, no I/O.

Invariants:
1. Every block is exactly one of free, cached (named, nobody holds it), held (by requests), leased (held by a handle).
2. A name maps to at most one block, and that block's content is complete.
3. `take_events` replayed from the start gives the set of named blocks.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvmesh.core import KvCleared, KvEvent, KvRemoved, KvStored
from kvmesh.engines.simulated.memory import runs_of

HOLES_MAX = 2048
"""Evictions after which the dictionary of idle blocks is made anew: looking for its first entry passes over all that are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks by state; they add up to the total."""

    free: int
    cached: int
    held: int
    leased: int


class BlockPool:
    """All blocks of an engine, named by number from 0."""

    def __init__(self, total: int, holes_max: int = HOLES_MAX) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._lease_references = [0] * total
        self._leased = 0
        self._names: list[int | None] = [None] * total
        self._parents: list[int | None] = [None] * total
        self._blocks: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._idle_holes = 0
        self._holes_max = holes_max
        self._events: list[KvEvent] = []
        self._removed: list[int] = []
        self._event_blocks = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def leased(self) -> int:
        """Blocks that a handle holds."""
        return self._leased

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached = len(self._free), len(self._idle)
        return BlockCounts(
            free=free, cached=cached, leased=self._leased, held=self.total - free - cached - self._leased
        )

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix. They are not held: `hold` them before anything else is allocated."""
        found = map(self._blocks.get, hashes)
        return list(iter(found.__next__, None))  # ends at the first None

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds, which holding them would take from `available`."""
        return sum(map(self._idle.__contains__, blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference on each."""
        references, idle = self._references, self._idle
        for block in blocks:
            if not references[block]:
                del idle[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference and undefined content, in order of their numbers, so that they are few runs of memory.

        The oldest idle cached ones are evicted when no others are left. ValueError when there are not enough.
        """
        if count > self.available:
            raise ValueError("not enough blocks")
        if not count:
            return []
        first = max(0, len(self._free) - count)
        blocks = self._free[first:]
        del self._free[first:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        blocks.sort()
        for block in blocks:
            self._references[block] = 1
        return blocks

    def allocate_one(self) -> int:
        """A block with one reference; there must be one `available`."""
        block = self._free.pop() if self._free else self._evict_one()
        self._references[block] = 1
        return block

    def _evict(self, count: int) -> list[int]:
        """The oldest idle blocks, forgotten."""
        blocks = list(islice(self._idle, count))
        self._forget(blocks)
        self._count_holes(count)
        return blocks

    def _evict_one(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        name, self._names[block] = self._names[block], None
        assert name is not None
        del self._blocks[name]
        self._removed.append(name)
        self._event_blocks += 1
        self._count_holes(1)
        return block

    def _count_holes(self, count: int) -> None:
        self._idle_holes += count
        if self._idle_holes > self._holes_max:
            self._idle, self._idle_holes = dict.fromkeys(self._idle), 0

    def _forget(self, blocks: Sequence[int]) -> None:
        """Idle blocks are neither idle nor cached any more."""
        names = [name for block in blocks if (name := self._names[block]) is not None]
        for block in blocks:
            self._names[block] = None
        for each in (map(self._idle.pop, blocks), map(self._blocks.pop, names)):
            deque(each, maxlen=0)
        self._removed += names
        self._event_blocks += len(names)

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less on each. The last ones of a chain become evictable first."""
        references, names, free, idle = self._references, self._names, self._free, self._idle
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if left:
                continue
            if names[block] is None:
                free.append(block)
            else:
                idle[block] = None

    def lease(self, blocks: Iterable[int]) -> None:
        """Turns one reference on each into a handle's."""
        references = self._lease_references
        for block in blocks:
            if not references[block]:
                self._leased += 1
            references[block] += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Undoes `lease` and drops the reference."""
        references = self._lease_references
        for block in blocks:
            left = references[block] = references[block] - 1
            if not left:
                self._leased -= 1
        self.drop(blocks)

    def name(self, blocks: Sequence[int], names: Sequence[int], parent: int | None) -> None:
        """Makes complete blocks reusable under their names, each the child of the one before. Taken names stay as they are."""
        if self._blocks.keys().isdisjoint(names):
            self._blocks.update(zip(names, blocks, strict=True))
            parents = [parent, *names[:-1]]
            for rows, own in runs_of(blocks):
                self._names[rows] = names[own]
                self._parents[rows] = parents[own]
            self._stored(list(names), parent)
            return
        run: list[int] = []
        run_parent = parent
        for block, name in zip(blocks, names, strict=True):
            if name in self._blocks:
                self._stored(run, run_parent)
                run, run_parent = [], name
            else:
                self._blocks[name] = block
                self._names[block] = name
                self._parents[block] = parent
                run.append(name)
            parent = name
        self._stored(run, run_parent)

    def name_one(self, block: int, name: int, parent: int | None) -> None:
        """The same for one block."""
        if name not in self._blocks:
            self._blocks[name] = block
            self._names[block] = name
            self._parents[block] = parent
            self._stored([name], parent)

    def _stored(self, run: list[int], parent: int | None) -> None:
        if run:
            self._flush_removed()
            self._events.append(KvStored(block_hashes=run, parent_hash=parent))
            self._event_blocks += len(run)

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(KvRemoved(block_hashes=self._removed))
            self._removed = []

    def forget_idle(self) -> None:
        """Forgets all cached blocks that nobody holds."""
        blocks = list(self._idle)
        self._forget(blocks)
        self._free += blocks
        if not self._blocks:
            self._removed = []
            self._events.append(KvCleared())

    def discard_idle(self, blocks: Iterable[int]) -> list[int]:
        """Forgets those of these blocks that nobody holds; they are free now and returned."""
        gone = [block for block in blocks if not self._references[block]]
        cached = [block for block in gone if block in self._idle]
        self._forget(cached)
        self._free += cached
        return gone

    def cached_names(self) -> set[int]:
        """Names of all cached blocks, held ones included."""
        return set(self._blocks)

    @property
    def event_blocks(self) -> int:
        """Block changes in the events not taken yet."""
        return self._event_blocks

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        self._event_blocks = 0
        return events

    def snapshot_events(self) -> list[KvEvent]:
        """Events that give the present state from any earlier one."""
        events: list[KvEvent] = [KvCleared()]
        run: list[int] = []
        run_parent: int | None = None
        for name, block in self._blocks.items():
            parent = self._parents[block]
            if run and parent == run[-1]:
                run.append(name)
                continue
            if run:
                events.append(KvStored(block_hashes=run, parent_hash=run_parent))
            run, run_parent = [name], parent
        if run:
            events.append(KvStored(block_hashes=run, parent_hash=run_parent))
        return events
