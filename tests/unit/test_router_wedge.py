"""Detection of workers that have work but make no steps."""

from kvmesh.core import LoadRecord, PerformanceProfile
from services.router.health.wedge import StepWatch


def record(step: int, **fields) -> LoadRecord:
    fields.setdefault("running_requests", 1)
    return LoadRecord(worker_id="w", epoch=1, step=step, **fields)


def test_work_without_a_step_is_stuck_until_the_next_step():
    """The time counts from the last step, or from the arrival of work at an idle worker."""
    watch = StepWatch()
    watch.on_load_record(record(1, running_requests=0), 0)
    assert not watch.is_stuck(100, allowed_s=2)
    watch.on_load_record(record(1), 100)
    assert not watch.is_stuck(102, allowed_s=2)
    assert watch.is_stuck(102.1, allowed_s=2)
    assert not watch.on_load_record(record(1), 103)
    assert watch.on_load_record(record(2), 104)
    assert not watch.is_stuck(106, allowed_s=2)


def test_waiting_requests_count_as_work():
    """An engine without running and waiting requests is never stuck."""
    watch = StepWatch()
    watch.on_load_record(record(1, running_requests=0, waiting_requests=1), 0)
    assert watch.is_stuck(3, allowed_s=2)
    watch.on_load_record(record(1, running_requests=0), 3)
    assert not watch.is_stuck(1000, allowed_s=2)


def test_waiting_for_leased_blocks_is_not_stuck():
    """Leased blocks can delay requests. Without leases a waiting request without steps is stuck."""
    watch = StepWatch()
    watch.on_load_record(record(1, running_requests=0, waiting_requests=1, kv_blocks_leased=9), 0)
    assert not watch.is_stuck(1000, allowed_s=2)
    watch.on_load_record(record(1, running_requests=0, waiting_requests=1), 1000)
    assert watch.is_stuck(1003, allowed_s=2)


def test_the_time_allowed_follows_the_slowest_step_within_bounds():
    """The limit is ten times the slowest recent step, between 15 seconds and two minutes."""
    watch = StepWatch()
    assert watch.allowed_s(None, 0) == 15
    watch.on_load_record(record(1, step_s=3), 0)
    watch.on_load_record(record(2, step_s=0.01), 0)
    assert 27 < watch.allowed_s(None, 0) < 30
    for step in range(3, 200):
        watch.on_load_record(record(step, step_s=0.01), 0)
    assert watch.allowed_s(None, 0) == 15
    watch.on_load_record(record(200, step_s=100), 0)
    assert watch.allowed_s(None, 0) == 120


def test_a_long_prompt_may_be_one_long_step():
    """Before a slow step was observed, the limit follows the profile's time for the prompt tokens."""
    profile = PerformanceProfile(prefill_base_s=0.1, prefill_s_per_token=0.001)
    assert StepWatch().allowed_s(profile, 2000) == 21


def test_overdue_work_counts_until_the_next_step():
    """A placement whose report was lost must not exclude a worker that has made steps since."""
    watch = StepWatch()
    watch.on_load_record(record(1, running_requests=0), 0)
    assert not watch.is_overdue(12, allowed_s=2, due_at=10)
    assert watch.is_overdue(12.1, allowed_s=2, due_at=10)
    watch.on_load_record(record(2, running_requests=0), 13)
    assert not watch.is_overdue(1000, allowed_s=2, due_at=10)
