"""The blocks that lie in one place, with the block before each, in the order of storing: what a snapshot is made of."""

from collections.abc import Iterator, Sequence

RUN_BLOCKS_MAX = 1024
Run = tuple[Sequence[int], int | None]
"""Blocks that follow each other, and the one before them."""


class CachedBlocks:
    """For events of any kind: each block by itself."""

    def __init__(self, parents: dict[int, int | None] | None = None) -> None:
        self._parents = parents or {}

    def __len__(self) -> int:
        return len(self._parents)

    def copy(self) -> "CachedBlocks":
        return CachedBlocks(self._parents.copy())

    def store(self, hashes: Sequence[int], parent: int | None) -> None:
        """Adds a run; blocks that are here already stay where they are."""
        for block_hash in hashes:
            self._parents[block_hash] = parent
            parent = block_hash

    def remove(self, hashes: Sequence[int]) -> None:
        """Takes blocks out; unknown ones are ignored."""
        for block_hash in hashes:
            self._parents.pop(block_hash, None)

    def runs(self) -> Iterator[Run]:
        """All blocks in the order of storing."""
        run: list[int] = []
        first_parent: int | None = None
        for block_hash, parent in self._parents.items():
            if run and parent == run[-1] and len(run) < RUN_BLOCKS_MAX:
                run.append(block_hash)
                continue
            if run:
                yield run, first_parent
            run, first_parent = [block_hash], parent
        if run:
            yield run, first_parent


class CachedRuns:
    """For engines that never store a block twice and remove none before those that follow it: whole runs, which takes one
    step for a long prompt's blocks where each by itself takes hundreds.

    A run is found by its first block, whose place in the order it keeps when it loses its last ones, or by its last.
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
        """Adds a run, which is kept and must not be changed."""
        self._runs[hashes[0]] = hashes, parent
        self._first_by_last[hashes[-1]] = hashes[0]
        self._count += len(hashes)

    def remove(self, hashes: Sequence[int]) -> None:
        """Takes blocks out, the last of each run first. KeyError for one that is not the last."""
        place = 0
        while place < len(hashes):
            first = self._first_by_last.pop(hashes[place])
            run, parent = self._runs[first]
            count = _equal(run[::-1], hashes[place : place + len(run)])
            if count == len(run):
                del self._runs[first]
            else:
                self._runs[first] = run[:-count], parent
                self._first_by_last[run[-count - 1]] = first
            place += count
        self._count -= len(hashes)

    def runs(self) -> Iterator[Run]:
        """All blocks, none before the one that it follows."""
        return iter(self._runs.values())


def _equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first numbers are the same."""
    if left == right:
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


Cached = CachedBlocks | CachedRuns
