"""Admission control of prefill and decode workers: when they reject legs, and when they read the load."""

from dataclasses import replace

import pytest

from kvmesh.core import Generation, Leg, LegTask, LoadRecord
from kvmesh.errors import OverloadedError
from kvmesh.worker.admission import DecodeAdmission, PrefillAdmission

IDLE = LoadRecord(
    step=0, taken_at_s=0.0, running_requests=0, waiting_requests=0, waiting_prompt_tokens=0, kv_blocks_used=0,
    kv_blocks_free=0, kv_blocks_total=0,
)  # fmt: skip


def prompt(tokens: int) -> Leg:
    return Leg(leg_id="p", task=LegTask.PREFILL, generation=Generation(model="m", token_ids=range(tokens)))


LEG = Leg(leg_id="d", task=LegTask.GENERATE, generation=Generation(model="m", token_ids=[1]))


def unread() -> LoadRecord:
    raise AssertionError("the load was read")


def test_decode_rejects_legs_at_the_limit_of_waiting_requests() -> None:
    """The load is read only if there are enough legs for some to wait."""
    admission = DecodeAdmission(waiting_requests_max=2)
    admission.check(LEG, 1, unread)
    admission.check(LEG, 5, lambda: replace(IDLE, waiting_requests=1))
    with pytest.raises(OverloadedError) as caught:
        admission.check(LEG, 5, lambda: replace(IDLE, waiting_requests=2, step_s=0.5))
    assert (caught.value.reason, caught.value.retry_after_s) == ("decode_queue_full", 1.0)


def test_prefill_rejects_a_prompt_that_exceeds_the_limit_of_waiting_tokens() -> None:
    """A worker accepts a prompt of any length while no other prompt waits."""
    admission = PrefillAdmission(waiting_prompt_tokens_max=100)
    admission.check(prompt(1000), 0, unread)
    admission.check(prompt(1000), 1, lambda: IDLE)
    admission.check(prompt(60), 1, lambda: replace(IDLE, waiting_prompt_tokens=40))
    with pytest.raises(OverloadedError) as caught:
        admission.check(prompt(61), 1, lambda: replace(IDLE, waiting_prompt_tokens=40))
    assert caught.value.reason == "prefill_queue_full"


def test_a_limit_of_0_admits_every_leg() -> None:
    DecodeAdmission(waiting_requests_max=0).check(LEG, 9999, unread)
    PrefillAdmission(waiting_prompt_tokens_max=0).check(prompt(9999), 9999, unread)
