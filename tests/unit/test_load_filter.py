"""Which loads a watcher hears of at once."""

from dataclasses import replace

import pytest

from kvmesh.core import LoadRecord
from kvmesh.worker.load_filter import LoadFilter

LOAD = LoadRecord(step=10, running_requests=4, kv_blocks_used=100, kv_blocks_free=900, kv_blocks_total=1000)


def told() -> LoadFilter:
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
def test_what_moves_requests_is_told_at_once(change: dict[str, int]) -> None:
    """So is memory that moved by more than a 64th of it; each once."""
    filter_ = told()
    load = replace(LOAD, **change)  # type: ignore[arg-type]
    assert filter_.passes(load, 5.1, is_draining=False)
    assert not filter_.passes(load, 5.2, is_draining=False)


def test_draining_is_told_at_once() -> None:
    """Both ways."""
    filter_ = told()
    assert filter_.passes(LOAD, 5.1, is_draining=True)
    assert filter_.passes(LOAD, 5.2, is_draining=False)


def test_progress_waits() -> None:
    """Steps, tokens and a few blocks are told after their interval; nothing at all after the longest one."""
    filter_, load = told(), replace(LOAD, step=11, output_tokens_total=32, kv_blocks_used=110, kv_blocks_free=890)
    assert not filter_.passes(load, 5.4, is_draining=False)
    assert filter_.passes(load, 5.5, is_draining=False)
    assert not filter_.passes(load, 6.4, is_draining=False)
    assert filter_.passes(load, 6.5, is_draining=False)


def test_small_moves_of_memory_add_up() -> None:
    """They are counted from what was told, not from what was looked at."""
    filter_ = told()
    due = [filter_.passes(replace(LOAD, kv_blocks_used=100 + n), 5.0 + n / 100, is_draining=False) for n in range(20)]
    assert due.index(True) == 16
    assert sum(due) == 1


def test_the_first_and_the_last_block_in_use_are_reported_at_once() -> None:
    """A worker with no block in use has nothing left of any request: routers and tests rely on learning that."""
    filter_, idle = told(), replace(LOAD, kv_blocks_used=0)
    few = replace(LOAD, kv_blocks_used=3)
    filter_.passes(few, 5.05, is_draining=False)
    assert filter_.passes(idle, 5.1, is_draining=False)
    assert filter_.passes(few, 5.2, is_draining=False)
