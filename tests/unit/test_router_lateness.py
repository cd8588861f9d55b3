"""Requests that are expected to miss the planner's time to first token wait behind requests that can still meet it."""

import pytest

from kvmesh.core import PerformanceProfile, Placement, Report, ReportKind
from kvmesh.core.planning import PlacementBounds
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.metrics import priority_class
from services.router.queue.admission import Queued
from services.router.queue.lateness import LATE
from tests.unit.router_fleets import ask, core, join

TTFT_S = 1.0
PROFILE = PerformanceProfile(
    prefill_base_s=0.0, prefill_s_per_token=0.0002, decode_step_base_s=0.001, decode_s_per_request=0.0001
)
PROMPT = 1000
"""Prompt tokens that take 0.2 s, so that four concurrent requests meet the target and the fifth does not."""


class Stage:
    """A router with one prefill and one decode worker, and with a time to first token that the planner wants."""

    def __init__(self, *, ttft_s: float = TTFT_S, **queue) -> None:
        self.router: RouterCore = core(queue=QueueSettings(**queue), prefill_congested_s=1e9)
        join(self.router, "p1", "prefill", profile=PROFILE)
        join(self.router, "d1", "decode", profile=PROFILE)
        self.router.placer.set_bounds("demo", PlacementBounds(ttft_s=ttft_s))
        self.now = 0.0
        self.numbers: dict[str, int] = {}
        self.reasons: dict[str, tuple[str, ...]] = {}

    def ask(self, name: str, *, tokens: int = PROMPT, **options) -> Placement | Queued:
        self.numbers[name] = number = len(self.numbers) + 1
        what = ask(name, tokens=tokens, **options)
        return self.router.ask("f", number, what, now=self.now, wall=self.now)

    def fill(self, requests: int = 4) -> None:
        """Places requests that meet the target. Together they give the prefill worker 0.8 s of work."""
        for number in range(requests):
            assert isinstance(self.ask(f"on time {number}"), Placement)

    def prefilled(self, name: str) -> None:
        report = Report(kind=ReportKind.PREFILLED, elapsed_s=self.now)
        assert self.router.report("f", self.numbers[name], report, now=self.now)

    def drain(self) -> list[str]:
        """Returns the names of the placed requests, and the reasons of refusals."""
        names = {number: name for name, number in self.numbers.items()}
        found = []
        for answer in self.router.drain_queue(now=self.now, wall=self.now):
            name = names[answer.ask_id]
            if isinstance(answer.outcome, Placement):
                self.reasons[name] = tuple(answer.outcome.reasons)
                found.append(name)
            else:
                found.append(f"{name}: {answer.outcome.reason}")
        return found


def test_late_requests_wait_for_requests_that_meet_the_target():
    """A late request waits while the worker is busy, newer requests overtake it, and it is placed when the worker has spare time."""
    stage = Stage()
    stage.fill()
    assert isinstance(stage.ask("late"), Queued)
    stage.now = 0.4
    stage.prefilled("on time 0")
    stage.prefilled("on time 1")
    assert isinstance(stage.ask("newer"), Placement)
    assert stage.drain() == []
    stage.now = 1.0
    for name in ("on time 2", "on time 3", "newer"):
        stage.prefilled(name)
    assert stage.drain() == ["late"]
    assert stage.reasons["late"][-1] == LATE
    assert LATE not in stage.reasons["late"][:-1]


def test_a_request_that_can_meet_the_target_again_is_placed():
    """A queued request is placed when the worker is faster than expected, or when the planner drops its target."""
    stage = Stage()
    stage.fill()
    assert isinstance(stage.ask("a"), Queued)
    assert isinstance(stage.ask("b"), Queued)
    for name in ("on time 0", "on time 1"):
        stage.prefilled(name)
    # 0.4 s of work is ahead of each request, and the first one adds 0.2 s.
    assert stage.drain() == ["a", "b"]
    assert isinstance(stage.ask("c"), Queued)
    stage.router.placer.set_bounds("demo", PlacementBounds())
    assert stage.drain() == ["c"]


def test_a_late_request_waits_for_a_bounded_time():
    """After `late_share` of the longest wait, a late request takes its normal turn, however busy the worker is."""
    stage = Stage(wait_s_max=10.0, late_share=0.5)
    stage.fill()
    assert isinstance(stage.ask("late"), Queued)
    stage.now = 4.9
    stage.router.fleet.workers["p1"].targets[0].add_prompt(5000, prefill_s=1.0, now=stage.now)
    assert stage.drain() == []
    stage.now = 5.0
    assert stage.drain() == ["late"]
    assert LATE not in stage.reasons["late"]


def test_a_late_request_waits_for_a_part_of_its_timeout():
    """It waits for two thirds of its timeout, which leaves the rest for the answer. An expected wait beyond the timeout does not refuse a late
    request."""
    stage = Stage()
    stage.fill()
    for number in range(3):
        assert isinstance(stage.ask(f"late {number}"), Queued)
    assert isinstance(stage.ask("hurry", timeout_s=3.0), Queued)
    stage.now = 2.1
    stage.router.fleet.workers["p1"].targets[0].add_prompt(5000, prefill_s=1.0, now=stage.now)
    assert stage.drain() == ["hurry"]


def test_an_overdue_request_does_not_wait_behind_a_late_one():
    """A request whose late time is over is placed even if the fair order among late requests puts another tenant first."""
    stage = Stage(wait_s_max=10.0, late_share=0.5)
    stage.fill()
    stage.ask("old", tenant="b")
    stage.now = 3.0
    stage.router.fleet.workers["p1"].targets[0].add_prompt(50_000, prefill_s=10.0, now=stage.now)
    stage.ask("young", tenant="a")
    stage.now = 5.0
    assert stage.drain() == ["old"]
    stage.now = 8.0
    assert stage.drain() == ["young"]


@pytest.mark.parametrize(
    "options",
    [
        {"attempt": 1},
        {"excluded_worker_ids": ("p9",)},
        {"priority": 1},
        {"tokens": 4600},
    ],
)
def test_some_requests_are_never_late(options):
    """Retries, hedges, requests of a high priority, and prompts that take too long even on an idle worker are placed at once."""
    stage = Stage()
    stage.fill()
    assert isinstance(stage.ask("x", **options), Placement)


@pytest.mark.parametrize("stage", [Stage(ttft_s=0.0), Stage(late_share=0.0), Stage(requests_max=0)])
def test_nothing_is_late_without_a_target_or_a_queue(stage):
    """Without a target, with a `late_share` of 0, or without a queue, requests are placed at once."""
    stage.fill()
    assert isinstance(stage.ask("x"), Placement)


def test_late_requests_make_room_in_a_full_queue():
    """A request that waits for capacity displaces a late one and counts in its normal priority. A full queue places a further late request at
    once."""
    stage = Stage(requests_max=2)
    stage.fill()
    stage.ask("late 0")
    stage.ask("late 1")
    assert {priority_class(priority) for priority in stage.router.queue.sums()} == {"late"}
    assert isinstance(stage.ask("late 2"), Placement), "a full queue does not refuse a late request"
    stage.router.fleet.workers["p1"].targets[0].prompt_tokens_in_flight = 10**9
    stage.router.fleet.workers["p1"].targets[0].write_queue()
    stage.router.fleet.workers["d1"].targets[0].reported_blocked = 10**9
    stage.router.fleet.workers["d1"].targets[0].write_batch()
    assert isinstance(stage.ask("waits"), Queued)
    assert [outcome.ask.request_id for outcome in stage.router.admission.take_outcomes()] == ["late 1"]
    assert {priority_class(priority) for priority in stage.router.queue.sums()} == {"normal", "late"}


def test_a_late_request_can_be_withdrawn():
    """A withdrawn late request leaves no state behind."""
    stage = Stage()
    stage.fill()
    stage.ask("late")
    assert stage.router.withdraw("f", stage.numbers["late"], now=0.1)
    assert stage.drain() == ["late: cancelled"]
    stage.now = 30.0
    assert stage.drain() == []
    assert not stage.router.queue.requests
    assert not stage.router.queue.sums()
