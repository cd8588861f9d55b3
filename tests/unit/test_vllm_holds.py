"""The table of hold words, by which a reader knows whether the blocks that it pulled were still held."""

import ctypes

import pytest

from kvmesh.engines.vllm.holds import HOLDS_MAX, WORD_BYTES, Hold, HoldMemory, HoldTable
from tests.parts import require_part


def word(table: HoldTable, hold: Hold) -> int:
    """Returns the word that a peer reads at the table's address."""
    return ctypes.c_uint64.from_address(table.address + hold.index * WORD_BYTES).value


@pytest.fixture
def memory() -> HoldMemory:
    return HoldMemory()


def test_a_word_has_its_number_until_the_hold_ends(memory: HoldMemory) -> None:
    """A reader that finds another number knows that the blocks were freed."""
    table = HoldTable(memory.path)
    hold = table.add("a")
    assert hold is not None
    assert word(table, hold) == hold.number != 0
    table.end("a")
    assert word(table, hold) == 0
    table.end("a")
    assert len(table) == 0


def test_a_reused_word_has_another_number(memory: HoldMemory) -> None:
    """Otherwise the reader of an old handle would use the blocks of another prompt."""
    table = HoldTable(memory.path)
    first = table.add("a")
    table.end("a")
    second = table.add("b")
    assert first is not None
    assert second is not None
    assert first.index == second.index
    assert first.number != second.number


def test_all_mappings_of_the_memory_share_the_words(memory: HoldMemory) -> None:
    """Each rank of a tensor-parallel engine registers its own mapping, and the scheduler writes."""
    scheduler, rank = HoldTable(memory.path), HoldTable(memory.path)
    hold = scheduler.add("a")
    assert hold is not None
    assert rank.address != scheduler.address
    assert word(rank, hold) == hold.number
    scheduler.end("a")
    assert word(rank, hold) == 0


def test_a_full_table_gives_no_hold(memory: HoldMemory) -> None:
    """The prompt is then handed out without a hold, and its reader computes it."""
    table = HoldTable(memory.path)
    for number in range(HOLDS_MAX):
        assert table.add(str(number)) is not None
    assert table.add("one more") is None
    table.end("7")
    assert table.add("another") is not None


def test_the_memory_cannot_be_opened_once_it_is_closed(memory: HoldMemory) -> None:
    """Existing mappings stay valid."""
    table, path = HoldTable(memory.path), memory.path
    memory.close()
    with pytest.raises(OSError):
        HoldTable(path)
    assert table.add("a") is not None


@pytest.mark.vllm
def test_an_aborted_check_returns_its_copy() -> None:
    """A request is aborted while the word of its hold is read. The copy of the word is free afterwards, and the pull has not failed for it."""
    require_part("vllm")
    from kvmesh.engines.vllm.connector import HoldingWorker, _Check

    worker = object.__new__(HoldingWorker)
    worker._recving_metadata, worker._recving_transfers, worker._recv_failures = {"r": object()}, {"r": [1]}, set()
    worker._checks, worker._free_copies = {"r": _Check(engine_id="e", hold={"number": 1}, copy=3)}, []
    worker.abandon("r")
    failed: set[str] = set()
    worker._end_check("r", failed)
    assert (worker._free_copies, worker._checks, failed) == ([3], {}, set())
