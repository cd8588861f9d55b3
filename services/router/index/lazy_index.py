"""An index whose dictionaries hold what lookups came to; other blocks wait as the lists they came in. Pure.

Most blocks of long prompts are told of, evicted and never asked about. A run of blocks that nobody knows therefore waits until a
lookup reaches its first block; blocks that leave before that are compared with its end and cut off, both at the speed of lists.
Whatever does not fit takes the way through the dictionaries: the runs concerned are *entered*.

Invariants, of a holder for which runs wait:
1. No block is in two of its runs, or in one of them and in the dictionaries as its own.
2. The parent of a run is its own in the dictionaries, or the run starts a prompt. What goes on from a run is appended to it.
3. It has no cuts.

Names of blocks are chained: two chains with a block in common are alike from there back to where one of them starts. So a run
whose first block a holder lacks is new to it as a whole, and what it holds of a prompt beyond the dictionaries begins with the
first block of a run; what it tells again goes through the dictionaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.index.holder_index import HolderIndex
from services.router.index.lookup_cache import Prefixes

RUN_BLOCKS_MIN = 8
"""A shorter one, unless it goes on from one that waits, would take more memory here than in the dictionaries."""

WAITING_HOLDERS_MAX = 2
"""With one prompt: a prefill and a decode worker. What more holders have takes less memory in the dictionaries."""

WAITING_BLOCKS_MAX = 65_536
"""Of one holder. It bounds how long an event that does not fit keeps the loop: about 30 ms."""


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks of one holder, each the child of the one before; never empty."""

    bit: int
    blocks: list[int]
    parent: int | None


@dataclass(slots=True, eq=False)
class _Waiting:
    """What waits of one holder: its runs by their last blocks, and how many of them have which parent."""

    blocks: int = 0
    runs: dict[int, _Run] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)


class LazyIndex(HolderIndex):
    """Answers as the index that it is made of. `holds` is for blocks of prompts that were looked up: those that wait are not searched."""

    __slots__ = ("_blocks_max", "_waiting", "heads")

    def __init__(self, *, waiting_blocks_max: int = WAITING_BLOCKS_MAX) -> None:
        super().__init__()
        self._blocks_max = waiting_blocks_max
        self.heads: dict[int, tuple[_Run, ...]] = {}
        """Runs that wait, by their first blocks. Others only look whether there are any."""
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        """Distinct blocks as before, except that one that waits with two holders counts twice."""
        return len(self.holders) + sum(waiting.blocks for waiting in self._waiting.values())

    def count(self, bit: int) -> int:
        """Blocks that the holder holds."""
        waiting = self._waiting.get(bit)
        return super().count(bit) + (waiting.blocks if waiting is not None else 0)

    def blocks_of(self, bit: int) -> set[int]:
        """All blocks of a holder, found by looking at every block: for checks."""
        waiting = self._waiting.get(bit, _Waiting())
        return super().blocks_of(bit).union(*[run.blocks for run in waiting.runs.values()])

    def drop_holder(self, bit: int) -> None:
        """Forgets all of a holder's blocks, those in the dictionaries in O(1), and its runs; memory comes back with `sweep`."""
        waiting = self._waiting.pop(bit, None)
        for run in waiting.runs.values() if waiting is not None else ():
            self._behead(run, run.blocks[0])
        super().drop_holder(bit)

    def stored(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        """The holder holds these too, each the child of the one before. Storing again changes nothing."""
        self._enter_holder(bit)
        super().stored(bit, block_hashes, parent_hash)

    def stored_lazily(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None = None) -> None:
        """The same; nobody may ever ask about them. Without `parent_hash` they start a prompt."""
        if not self.has_cuts(bit) and (
            self._continues(bit, block_hashes, parent_hash) or self._begins(bit, block_hashes, parent_hash)
        ):
            return
        super().stored(bit, block_hashes, parent_hash)
        if self.has_cuts(bit):
            self._enter_holder(bit)

    def removed(self, bit: int, block_hashes: Sequence[int]) -> int:
        """The holder holds these no more. Gives how many it did not hold."""
        waiting = self._waiting.get(bit)
        if waiting is None:
            return super().removed(bit, block_hashes)
        rest = self._cut_off(waiting, block_hashes)
        if not waiting.parents.keys().isdisjoint(rest):
            self._enter_holder(bit)
        unknown = self._remove(bit, rest)
        if unknown or self.has_cuts(bit):
            self._enter_holder(bit)
            unknown = self._remove(bit, unknown)
        return len(unknown)

    def prefixes(self, block_hashes: Sequence[int]) -> Prefixes:
        """Leading blocks held consecutively, as depths and sets of holders; runs that they lead to are entered first."""
        found = super().prefixes(block_hashes)
        while self.heads and block_hashes and self._enter_behind(block_hashes, found[0]):
            found = super().prefixes(block_hashes)
        return found

    def enter(self) -> None:
        """Nothing waits any more: for checks and measurements."""
        for bit in list(self._waiting):
            self._enter_holder(bit)

    def _enter_behind(self, block_hashes: Sequence[int], depths: Sequence[int]) -> bool:
        """Enters the runs with which the prompt goes on where holders end, or where it starts. False: there are none."""
        inside = depths if not depths or depths[-1] < len(block_hashes) else depths[:-1]
        ends = [block_hashes[0], *map(block_hashes.__getitem__, inside)]
        if self.heads.keys().isdisjoint(ends):
            return False
        for block in ends:
            self._enter(self.heads.get(block, ()))
        return True

    def _continues(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None) -> bool:
        """Appends to the run that ends with the parent. False: there is none; nor one that has the parent inside, any more."""
        waiting = self._waiting.get(bit)
        if waiting is None or parent_hash is None:
            return False
        run = waiting.runs.pop(parent_hash, None)
        if run is not None:
            run.blocks += block_hashes
            self._grew(waiting, run, len(block_hashes))
        elif not self.holds(bit, parent_hash):
            self._enter([run for run in waiting.runs.values() if parent_hash in run.blocks])
        return run is not None

    def _begins(self, bit: int, block_hashes: Sequence[int], parent_hash: int | None) -> bool:
        """Lets a new run wait. False: it belongs into the dictionaries, and nothing that waits has a part of it."""
        first = block_hashes[0]
        if parent_hash is not None and not self.holds(bit, parent_hash):
            return False
        same = self.heads.get(first, ())
        if len(same) >= WAITING_HOLDERS_MAX or any(run.bit == bit for run in same):
            self._enter(same)
            return False
        if self.holds(bit, first):
            self._enter([run for block in block_hashes for run in self.heads.get(block, ()) if run.bit == bit])
        if len(block_hashes) < RUN_BLOCKS_MIN or first in self.holders:
            return False
        run = _Run(bit, list(block_hashes), parent_hash)
        self.heads[first] = (*same, run)
        waiting = self._waiting.setdefault(bit, _Waiting())
        if parent_hash is not None:
            waiting.parents[parent_hash] = waiting.parents.get(parent_hash, 0) + 1
        self._grew(waiting, run, len(block_hashes))
        return True

    def _grew(self, waiting: _Waiting, run: _Run, blocks: int) -> None:
        """A run has so many blocks more."""
        waiting.blocks += blocks
        self._ends(waiting, run)
        while waiting.blocks > self._blocks_max:
            self._enter([next(iter(waiting.runs.values()))])

    def _ends(self, waiting: _Waiting, run: _Run) -> None:
        """Puts down where a run ends."""
        other = waiting.runs.get(run.blocks[-1])
        waiting.runs[run.blocks[-1]] = run
        if other is not None:
            # So it is only with a worker whose runs are no chains. It gets wrong answers, and nobody else.
            self._store(waiting, other)

    def _cut_off(self, waiting: _Waiting, block_hashes: Sequence[int]) -> Sequence[int]:
        """Takes blocks off the ends of runs. Gives those that were at none."""
        runs = waiting.runs
        if runs.keys().isdisjoint(block_hashes):
            return block_hashes
        gone = list(block_hashes)
        if gone[0] not in runs and gone[-1] in runs:
            gone.reverse()
        rest: list[int] = []
        at = 0
        while at < len(gone):
            run = runs.pop(gone[at], None)
            if run is None:
                rest.append(gone[at])
                at += 1
                continue
            count = _common(gone[at : at + len(run.blocks)], run.blocks)
            first = run.blocks[0]
            del run.blocks[-count:]
            waiting.blocks -= count
            at += count
            if run.blocks:
                self._ends(waiting, run)
            else:
                self._leaves(waiting, run, first)
        return rest

    def _enter(self, runs: Sequence[_Run]) -> None:
        """Puts runs into the dictionaries."""
        for run in runs:
            waiting = self._waiting[run.bit]
            del waiting.runs[run.blocks[-1]]
            self._store(waiting, run)

    def _store(self, waiting: _Waiting, run: _Run) -> None:
        waiting.blocks -= len(run.blocks)
        self._leaves(waiting, run, run.blocks[0])
        super().stored(run.bit, run.blocks, run.parent)

    def _enter_holder(self, bit: int) -> None:
        waiting = self._waiting.get(bit)
        if waiting is not None:
            self._enter(list(waiting.runs.values()))

    def _leaves(self, waiting: _Waiting, run: _Run, first: int) -> None:
        """A run waits no more."""
        self._behead(run, first)
        if run.parent is not None:
            waiting.parents[run.parent] -= 1
            if not waiting.parents[run.parent]:
                del waiting.parents[run.parent]
        if not waiting.runs:
            del self._waiting[run.bit]

    def _behead(self, run: _Run, first: int) -> None:
        others = tuple([other for other in self.heads[first] if other is not run])
        if others:
            self.heads[first] = others
        else:
            del self.heads[first]


def _common(gone: Sequence[int], blocks: Sequence[int]) -> int:
    """How many of the blocks that are gone are the last ones of a run, from its end; the first one is."""
    if gone == blocks[: -len(gone) - 1 : -1]:
        return len(gone)
    return next(i for i, (one, other) in enumerate(zip(gone, reversed(blocks), strict=False)) if one != other)
