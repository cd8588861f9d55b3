"""The block pool: references, prefix cache, eviction, leases. No clock, no I/O.

Blocks are named by their hashes.

Invariants:
1. Every block is exactly one of free, cached (named, nobody holds it), held (by requests), leased (by a handle).
2. A name belongs to at most one block, and that block is complete.
3. Replaying `take_events` from the start gives the set of named blocks. A block is removed after the blocks that follow it.
4. The holder of a named block holds all named blocks before it in its chain, so no chain lacks its beginning. A holder that computed a
   block which another one had named meanwhile takes over the other's block.
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


class BlockPool:
    """All blocks of an engine, numbered from 0. Evicts idle cached blocks so that `spare` blocks stay free."""

    def __init__(self, total: int, spare: int = 0) -> None:
        self.total = total
        self.leased = 0
        self._spare = spare
        self._free = FreeBlocks(total)
        self._references = [0] * total
        self._leases = [0] * total
        self._names: list[int | None] = [None] * total
        self._parents: list[int | None] = [None] * total
        """Names of the blocks before named ones."""
        self.blocks_by_name: dict[int, int] = {}
        """Named blocks. Parents come before their children."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds, least recently used first. Children come before their parents."""
        self._events: list[KvEvent] = []
        self._removed: list[int] = []

    @property
    def available(self) -> int:
        return self._free.count + len(self._idle)

    def counts(self) -> BlockCounts:
        held = self.total - self.available - self.leased
        return BlockCounts(free=self._free.count, cached=len(self._idle), leased=self.leased, held=held)

    # Holding

    def match(self, names: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix. Call `hold` on them before the next allocation."""
        found: list[int] = []
        for name in names:
            if (block := self.blocks_by_name.get(name)) is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds. Holding them reduces `available` by that number."""
        return sum(map(self._idle.__contains__, blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block."""
        references, idle = self._references, self._idle
        for block in blocks:
            if not references[block]:
                del idle[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference and undefined content, in ascending order, consecutive if possible.

        Evicts the least recently used idle blocks if necessary. ValueError when too few are available.
        """
        if count > self.available:
            raise ValueError("not enough blocks")
        self._make_room(count + self._spare)
        taken = self._free.take(count)
        for block in taken:
            self._references[block] = 1
        return taken

    def allocate_one(self) -> int:
        """A block with one reference. One must be `available`."""
        self._make_room(1 + self._spare)
        block = self._free.take_one()
        self._references[block] = 1
        return block

    def _make_room(self, count: int) -> None:
        """Evicts idle blocks until `count` are free or none is idle."""
        missing = min(count - self._free.count, len(self._idle))
        evicted = [self._idle.popitem(last=False)[0] for _ in range(missing)]
        for block in evicted:
            name, self._names[block] = self._names[block], None
            assert name is not None
            del self.blocks_by_name[name]
            self._removed.append(name)
        self._free.give(evicted)

    def drop(self, blocks: Sequence[int]) -> None:
        """Drops a reference on each block. The end of a chain becomes evictable first."""
        references, names, idle = self._references, self._names, self._idle
        freed: list[int] = []
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            if names[block] is None:
                freed.append(block)
            else:
                idle[block] = None
        self._free.give(freed)

    def lease(self, blocks: Sequence[int]) -> None:
        """Turns one reference on each block into a lease."""
        for block in blocks:
            self.leased += not self._leases[block]
            self._leases[block] += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Ends a lease and drops its reference."""
        for block in blocks:
            self._leases[block] -= 1
            self.leased -= not self._leases[block]
        self.drop(blocks)

    # Names

    def name(self, blocks: list[int], first: int, names: Sequence[int], parent: int | None) -> None:
        """Names a holder's complete blocks, `blocks[first:]`, so that others can reuse them.

        The names are a chain that follows `parent`. If another block has a name already, the holder drops its own block and takes that
        one. `names` is stored in an event: the caller must not change it.
        """
        if names[0] in self.blocks_by_name:
            known = self.match(names)
            self.hold(known)
            self.drop(blocks[first : first + len(known)])
            blocks[first : first + len(known)] = known
            first, parent, names = first + len(known), names[len(known) - 1], names[len(known) :]
        if not names:
            return
        self._flush_removed()
        self._events.append(KvStored(block_hashes=names, parent_hash=parent))
        named = blocks[first : first + len(names)]
        self.blocks_by_name.update(zip(names, named, strict=True))
        for block, name in zip(named, names, strict=True):
            self._names[block], self._parents[block] = name, parent
            parent = name

    def evict_idle(self) -> None:
        """Evicts all idle cached blocks."""
        self._make_room(self.total + 1)
        if not self.blocks_by_name:
            self._removed = []
            self._events.append(KvCleared())

    # Events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(KvRemoved(block_hashes=self._removed))
            self._removed = []

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def snapshot_events(self) -> list[KvEvent]:
        """Events that lead to the present state from any earlier one. Parents come before their children."""
        events: list[KvEvent] = [KvCleared()]
        run: list[int] = []
        for name, block in self.blocks_by_name.items():
            parent = self._parents[block]
            if not run or parent != run[-1]:
                run = []
                events.append(KvStored(block_hashes=run, parent_hash=parent))
            run.append(name)
        return events
