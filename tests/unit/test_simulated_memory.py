"""KV memory: operations on many blocks compared with one block at a time, and runs of blocks."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engines.simulated.memory import HEAD_WORDS, KvMemory, are_neighbours, counted_up, runs_of, words_of

BLOCKS = 12
ORDERS = st.permutations(range(BLOCKS)).flatmap(lambda order: st.integers(0, BLOCKS).map(lambda count: order[:count]))


@given(ORDERS, st.data())
def test_runs_are_maximal_and_contiguous_on_both_sides(blocks: list[int], data: st.DataObject) -> None:
    """The runs map each number to the one at the same position, and no run could be joined with the previous one."""
    others = data.draw(st.permutations(range(BLOCKS)))[: len(blocks)]
    first, second = np.array(blocks, np.int64), np.array(others, np.int64)
    runs = runs_of(first, second)
    assert counted_up([(start, count) for start, count, _ in runs]).tolist() == blocks
    assert counted_up([(start, count) for _, count, start in runs]).tolist() == others
    assert all(count for _, count, _ in runs)
    for (one, count, other), (following, _, other_following) in pairwise(runs):
        assert (following - one, other_following - other) != (count, count)
    assert not blocks or are_neighbours(blocks) == (runs_of(first, first) == [(blocks[0], len(blocks), blocks[0])])


@given(ORDERS, st.data())
def test_written_blocks_are_read_back(blocks: list[int], data: st.DataObject) -> None:
    """In any order of blocks, guards and checksums are read as written, and stamps are new. Other blocks do not change."""
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
def test_a_damaged_word_is_detected(block: int, word: int) -> None:
    """Changing any word of a block changes what is read from it."""
    memory = KvMemory(BLOCKS, 64, first_stamp=0)
    memory.write(range(BLOCKS), [1] * BLOCKS, words_of([1000 + i for i in range(BLOCKS)]))
    memory._words[block, word] += np.uint64(6)
    damaged = memory.read_parts(range(BLOCKS)).tolist()
    assert [i for i, part in enumerate(damaged) if part != 1000 + i] == [block]


@given(st.integers(0, BLOCKS - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**60 - 1), st.integers(0, 2**62 - 1))
def test_writing_one_block_equals_writing_many(block: int, guard: int, part: int, first_stamp: int) -> None:
    """`write_one` gives the same memory as `write` with one block."""
    alone, among = (KvMemory(BLOCKS, 64, first_stamp=first_stamp) for _ in range(2))
    alone.write_one(block, guard, part)
    among.write([block], [guard], words_of([part]))
    assert (alone.buffer == among.buffer).all()
