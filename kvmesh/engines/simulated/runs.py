"""Blocks by the run: a long prompt's lie side by side, so that a few ranges say what hundreds of numbers would."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt


class Runs(Sequence[int]):
    """Numbers in a given order, mostly a prompt's blocks, as runs that count up by one.

    None of `runs` is empty or could be joined with the one before.
    """

    __slots__ = ("_count", "runs")

    def __init__(self, runs: Iterable[range] = ()) -> None:
        self.runs: list[range] = []
        self._count = 0
        for run in runs:
            self.add(run)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs)

    def __repr__(self) -> str:
        return f"Runs({self.runs})"

    def __add__(self, other: "Runs") -> "Runs":
        return Runs([*self.runs, *other.runs])

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> "Runs": ...

    def __getitem__(self, place: int | slice) -> "int | Runs":
        if isinstance(place, slice):
            first, end, step = place.indices(self._count)
            if step != 1:
                raise ValueError("numbers are taken in their order")
            return self if (first, end) == (0, self._count) else self._between(first, end)
        behind = -place if place < 0 else self._count - place
        if not 0 < behind <= self._count:
            raise IndexError(place)
        # From the end: whoever asks for one number fills the last blocks of a long answer, each of which is a run of its own.
        for run in reversed(self.runs):
            if behind <= len(run):
                return run[-behind]
            behind -= len(run)
        raise AssertionError("the runs have as many numbers as were counted")

    def _between(self, first: int, end: int) -> "Runs":
        part = Runs()
        for run in self.runs:
            if end <= 0:
                break
            part.add(run[max(first, 0) : end])
            first, end = first - len(run), end - len(run)
        return part

    def add(self, run: range) -> None:
        """A run behind the others."""
        if not run:
            return
        if self.runs and self.runs[-1].stop == run.start:
            self.runs[-1] = range(self.runs[-1].start, run.stop)
        else:
            self.runs.append(run)
        self._count += len(run)

    def append(self, number: int) -> None:
        """A number behind the others."""
        self.add(range(number, number + 1))

    def replace(self, first: int, part: "Runs") -> None:
        """Puts other numbers in the place of as many from the `first` one on."""
        made = self[:first] + part + self[first + len(part) :]
        self.runs, self._count = made.runs, made._count

    def rows(self) -> list[tuple[slice, slice]]:
        """Each run as a slice of whatever the numbers count, and as a slice of the numbers."""
        places: list[tuple[slice, slice]] = []
        start = 0
        for run in self.runs:
            places.append((slice(run.start, run.stop), slice(start, start + len(run))))
            start += len(run)
        return places


def runs_of(numbers: Iterable[int]) -> Runs:
    """The same numbers by the run."""
    if isinstance(numbers, Runs):
        return numbers
    found = Runs()
    for number in numbers:
        found.append(number)
    return found


def runs_of_words(words: npt.NDArray[np.uint64]) -> Runs:
    """The same numbers by the run."""
    breaks = (words[1:] - words[:-1] != 1).nonzero()[0]
    runs = Runs()
    start = 0
    for end in (*(breaks + 1).tolist(), len(words)):
        first = int(words[start]) if end > start else 0
        runs.add(range(first, first + end - start))
        start = end
    return runs


def words_of_runs(runs: Runs) -> npt.NDArray[np.uint64]:
    """The same numbers as an array."""
    parts = [np.arange(run.start, run.stop, dtype=np.uint64) for run in runs.runs]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def paired(theirs: Runs, mine: Runs) -> Iterator[tuple[int, int, int]]:
    """(first of theirs, first of mine, count) of runs that are neighbours on both sides. Both are equally long."""
    left = iter(mine.runs)
    own = range(0)
    for run in theirs.runs:
        while run:
            own = own or next(left)
            count = min(len(run), len(own))
            yield run.start, own.start, count
            run, own = run[count:], own[count:]
