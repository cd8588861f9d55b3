"""KV memory addressed by runs of blocks against one block at a time."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engines.simulated.memory import HEAD_WORDS, KvMemory, words_of
from kvmesh.engines.simulated.runs import Runs, paired, runs_of, runs_of_words, words_of_runs

BLOCKS = 12
ORDERS = st.permutations(range(BLOCKS)).flatmap(lambda order: st.integers(0, BLOCKS).map(lambda count: order[:count]))


@given(ORDERS)
def test_runs_are_the_numbers_in_order(blocks: list[int]) -> None:
    """All together name each number once, in its place; none could be joined with the one before."""
    runs = runs_of(blocks)
    places = runs.rows()
    assert list(runs) == blocks and len(runs) == len(blocks) and all(runs.runs)
    assert [row for rows, _ in places for row in range(rows.start, rows.stop)] == blocks
    assert [place for _, own in places for place in range(own.start, own.stop)] == list(range(len(blocks)))
    assert all(run.stop != following.start for run, following in pairwise(runs.runs))
    assert list(runs_of_words(words_of(blocks))) == blocks == words_of_runs(runs).tolist()


@given(ORDERS, st.integers(0, BLOCKS), st.integers(0, BLOCKS), st.data())
def test_parts_of_runs_are_as_of_a_list(blocks: list[int], first: int, end: int, data: st.DataObject) -> None:
    """Slices, single numbers, sums and replacements."""
    runs = runs_of(blocks)
    assert list(runs[first:end]) == blocks[first:end]
    assert [runs[place] for place in range(-len(blocks), len(blocks))] == [*blocks, *blocks]
    assert list(runs[:first] + runs[first:]) == blocks
    others = data.draw(st.permutations(range(20, 20 + len(blocks[first:end]))))
    runs.replace(first, runs_of(others))
    assert list(runs) == [*blocks[:first], *others, *blocks[max(first, end) :]]


@given(ORDERS, st.data())
def test_pairs_are_neighbours_on_both_sides(blocks: list[int], data: st.DataObject) -> None:
    """They lead from each number to the one in the same place."""
    others = data.draw(st.permutations(range(BLOCKS)))[: len(blocks)]
    pairs = list(paired(runs_of(blocks), runs_of(others)))
    found = [(theirs + i, mine + i) for theirs, mine, count in pairs for i in range(count)]
    assert found == list(zip(blocks, others, strict=True))
    assert list(paired(Runs(), Runs())) == []


@given(ORDERS, st.data())
def test_what_is_written_is_read(blocks: list[int], data: st.DataObject) -> None:
    """Guards, stamps that are all new, and checksums, whatever the order of the blocks; the others stay as they are."""
    memory = KvMemory(BLOCKS, 64, first_stamp=7)
    words = st.integers(0, 2**40)
    guards = data.draw(st.lists(words, min_size=len(blocks), max_size=len(blocks)))
    parts = data.draw(st.lists(words, min_size=len(blocks), max_size=len(blocks)))
    memory.write(blocks, guards, words_of(parts))
    read_guards, stamps = memory.guards(blocks)
    assert (read_guards.tolist(), memory.read_parts(blocks).tolist()) == (guards, parts)
    assert stamps.tolist() == list(range(8, 8 + len(blocks)))
    assert not memory._words[sorted(set(range(BLOCKS)) - set(blocks))].any()


@given(st.integers(0, BLOCKS - 1), st.integers(HEAD_WORDS, 7))
def test_a_damaged_word_is_seen(block: int, word: int) -> None:
    """Every word of a block counts."""
    memory = KvMemory(BLOCKS, 64, first_stamp=0)
    memory.write(range(BLOCKS), [1] * BLOCKS, words_of([1000 + i for i in range(BLOCKS)]))
    memory._words[block, word] += np.uint64(6)
    damaged = memory.read_parts(range(BLOCKS)).tolist()
    assert [i for i, part in enumerate(damaged) if part != 1000 + i] == [block]


@given(st.integers(0, BLOCKS - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**60 - 1), st.integers(0, 2**62 - 1))
def test_one_block_alone_is_written_as_among_many(block: int, guard: int, part: int, first_stamp: int) -> None:
    """Whoever reads it, perhaps from another worker, sees no difference; the others stay as they are."""
    alone, among = (KvMemory(BLOCKS, 64, first_stamp=first_stamp) for _ in range(2))
    alone.write_one(block, guard, part)
    among.write([block], [guard], words_of([part]))
    assert (alone.buffer == among.buffer).all()
