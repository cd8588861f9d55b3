"""The blocks cached on one rank and tier, each with its predecessor, in the order in which they were stored. The source of snapshots."""

from collections.abc import Iterator, Sequence

RUN_BLOCKS_MAX = 1024
Run = tuple[Sequence[int], int | None]
"""Consecutive blocks and the block before the first."""


class CachedBlocks:
    """Keeps each block separately, for events in any order."""

    def __init__(self, parents: dict[int, int | None] | None = None) -> None:
        self._parents = parents or {}

    def __len__(self) -> int:
        return len(self._parents)

    def copy(self) -> "CachedBlocks":
        return CachedBlocks(self._parents.copy())

    def store(self, hashes: Sequence[int], parent: int | None) -> None:
        """Adds a run. Blocks that are present keep their place in the order."""
        for block_hash in hashes:
            self._parents[block_hash] = parent
            parent = block_hash

    def remove(self, hashes: Sequence[int]) -> None:
        """Removes blocks. Unknown ones are ignored."""
        for block_hash in hashes:
            self._parents.pop(block_hash, None)

    def runs(self) -> Iterator[Run]:
        """All blocks in the order of storing."""
        run: list[int] = []
        first_parent: int | None = None
        for block_hash, parent in self._parents.items():
            # Blocks of one prompt are stored one after the other, so most runs are found without a search.
            if run and parent == run[-1] and len(run) < RUN_BLOCKS_MAX:
                run.append(block_hash)
                continue
            if run:
                yield run, first_parent
            run, first_parent = [block_hash], parent
        if run:
            yield run, first_parent


class CachedRuns:
    """Keeps whole runs, for engines that never store a block twice and never remove a block before its successors.

    Storing or removing a long prompt takes one step instead of one per block. Runs are looked up by their first or their last block.
    A run that is shortened keeps its place in the order.
    """

    def __init__(self, runs: dict[int, Run] | None = None) -> None:
        self._runs = runs or {}
        self._first_by_last = {run[-1]: first for first, (run, _) in self._runs.items()}
        self._count = sum(len(run) for run, _ in self._runs.values())

    def __len__(self) -> int:
        return self._count

    def copy(self) -> "CachedRuns":
        return CachedRuns(self._runs.copy())

    def store(self, hashes: Sequence[int], parent: int | None) -> None:
        """Adds a run. The sequence is kept, not copied; the caller must not change it."""
        self._runs[hashes[0]] = hashes, parent
        self._first_by_last[hashes[-1]] = hashes[0]
        self._count += len(hashes)

    def remove(self, hashes: Sequence[int]) -> None:
        """Removes blocks, the last of each run first. KeyError for a block that is not the last of its run."""
        place = 0
        while place < len(hashes):
            first = self._first_by_last.pop(hashes[place])
            run, parent = self._runs[first]
            # Events name the blocks of a run from its end.
            count = _equal(run[::-1], hashes[place : place + len(run)])
            if count == len(run):
                del self._runs[first]
            else:
                self._runs[first] = run[:-count], parent
                self._first_by_last[run[-count - 1]] = first
            place += count
        self._count -= len(hashes)

    def runs(self) -> Iterator[Run]:
        """Yields all runs; a block never comes before its predecessor."""
        return iter(self._runs.values())


def _equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    if left == right:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


Cached = CachedBlocks | CachedRuns
