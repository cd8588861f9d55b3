"""Which loads are sent to a watcher immediately."""

from dataclasses import replace

import pytest

from kvmesh.core import LoadRecord
from kvmesh.worker.load_filter import LoadFilter

LOAD = LoadRecord(step=10, running_requests=4, kv_blocks_used=100, kv_blocks_free=900, kv_blocks_total=1000)


def filter_after_first_load() -> LoadFilter:
    filter_ = LoadFilter(progress_interval_s=0.5, interval_s=1.0)
    assert filter_.passes(LOAD, 5.0, is_draining=False)
    return filter_


@pytest.mark.parametrize(
    "change",
    [
        {"running_requests": 5},
        {"waiting_requests": 1},
        {"waiting_prompt_tokens": 7},
        {"kv_blocks_leased": 3},
        {"preempted_requests_total": 1},
        {"kv_blocks_used": 116},
        {"kv_blocks_used": 84},
    ],
)
def test_changes_that_affect_placement_pass_immediately(change: dict[str, int]) -> None:
    """Changes of memory by more than a 64th of the total pass immediately too. Each change passes once."""
    filter_ = filter_after_first_load()
    load = replace(LOAD, **change)  # type: ignore[arg-type]
    assert filter_.passes(load, 5.1, is_draining=False)
    assert not filter_.passes(load, 5.2, is_draining=False)


def test_draining_passes_immediately() -> None:
    """The load passes when the worker starts to drain and when it stops draining."""
    filter_ = filter_after_first_load()
    assert filter_.passes(LOAD, 5.1, is_draining=True)
    assert filter_.passes(LOAD, 5.2, is_draining=False)


def test_progress_waits() -> None:
    """Steps, tokens and a few blocks pass after the progress interval, and an unchanged load passes after the longest interval."""
    filter_, load = (
        filter_after_first_load(),
        replace(LOAD, step=11, output_tokens_total=32, kv_blocks_used=110, kv_blocks_free=890),
    )
    assert not filter_.passes(load, 5.4, is_draining=False)
    assert filter_.passes(load, 5.5, is_draining=False)
    assert not filter_.passes(load, 6.4, is_draining=False)
    assert filter_.passes(load, 6.5, is_draining=False)


def test_small_changes_of_memory_add_up() -> None:
    """Changes count from the last load that passed, not from the last one that was checked."""
    filter_ = filter_after_first_load()
    due = [filter_.passes(replace(LOAD, kv_blocks_used=100 + n), 5.0 + n / 100, is_draining=False) for n in range(20)]
    assert due.index(True) == 16
    assert sum(due) == 1


def test_the_first_and_the_last_block_in_use_pass_immediately() -> None:
    """Routers and tests rely on the report that no block is in use, which means that the worker holds nothing of any request."""
    filter_, idle = filter_after_first_load(), replace(LOAD, kv_blocks_used=0)
    few = replace(LOAD, kv_blocks_used=3)
    filter_.passes(few, 5.05, is_draining=False)
    assert filter_.passes(idle, 5.1, is_draining=False)
    assert filter_.passes(few, 5.2, is_draining=False)
