"""Decisions for one model: transcripts, and invariants."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvmesh.core.planning import Decision, DecisionAction, Load, ObservationState, PoolLimits, Shape, Targets
from services.planner.decide import model_planner
from services.planner.decide.model_planner import ActionChoice, ModelPlanner
from services.planner.decide.settings import DecideSettings
from services.planner.decide.stabiliser import Stabiliser
from services.planner.observation import ModelObservation
from services.planner.planner import within_budget
from services.planner.sizing.size import cost_of
from services.planner.sizing.speed import Speed
from tests.demand import demand_of

TRANSCRIPT = Path(__file__).parents[1] / "transcripts" / "planner.txt"
TARGETS = Targets(model="m", ttft_s=2.0, itl_s=0.05)
SETTINGS = DecideSettings(start_s=30.0, calm_s=60.0, hold_s=120.0)


@pytest.fixture(autouse=True)
def short_dwell_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the dwell times, so that the transcript includes a second flip and the end of a deflection."""
    monkeypatch.setattr(model_planner, "FLIP_DWELL_S", 30.0)
    monkeypatch.setattr(model_planner, "DEFLECT_CALM_S", 10.0)


class Drive:
    """Simulates a model whose pools follow the decisions: at once for flips and deflections, `start_s` later for new workers."""

    def __init__(self, shape: Shape, settings: DecideSettings = SETTINGS, targets: Targets = TARGETS) -> None:
        self.settings, self.targets = settings, targets
        self.planner = ModelPlanner("m", settings)
        self.ready = self.wanted = shape
        self.now_s = 0.0
        self.lines: list[str] = []
        self.choices: list[tuple[float, ActionChoice]] = []
        self._coming: list[tuple[float, Shape]] = []
        self._reason = ""

    def run(self, seconds: int, rate: float, **observation: object) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self._grow()
            self.tick(rate, **observation)

    def tick(self, rate: float, **observation: object) -> ActionChoice:
        load = Load(requests_per_s=rate, prompt_tokens=1200, output_tokens=200)
        seen = ModelObservation(
            model="m",
            state=ObservationState.COMPLETE,
            demand=demand_of(load),
            recent_rate=rate,
            ready=self.ready,
        )
        choice, inputs = self.planner.tick(
            replace(seen, **observation),
            targets=self.targets,
            speed=Speed(),
            wanted=self.wanted,
            now_s=self.now_s,
        )
        decision = Decision(
            number=1,
            model="m",
            decided_at_s=self.now_s,
            action=choice.action,
            reason=choice.reason,
            inputs=inputs,
            alternatives=choice.alternatives,
        )
        self.choices.append((self.now_s, choice))
        if choice.action.changes_pools:
            self._carry_out(decision)
            self.planner.accept(decision, self.now_s)
        if choice.action.changes_pools or choice.reason != self._reason:
            self.lines.append(line(decision, rate))
        self._reason = choice.reason
        return choice

    def actions(self) -> list[DecisionAction]:
        return [choice.action for _, choice in self.choices if choice.action.changes_pools]

    def _carry_out(self, decision: Decision) -> None:
        shape = decision.shape
        if decision.action is DecisionAction.SCALE:
            self._coming.append((self.now_s + self.settings.start_s, shape))
            self.ready = replace(
                self.ready,
                prefill_workers=min(self.ready.prefill_workers, shape.prefill_workers),
                decode_workers=min(self.ready.decode_workers, shape.decode_workers),
            )
        elif decision.action is DecisionAction.FLIP:
            moved = shape.prefill_workers - self.wanted.prefill_workers
            self.ready = replace(
                self.ready,
                prefill_workers=self.ready.prefill_workers + moved,
                decode_workers=self.ready.decode_workers - moved,
            )
        self.ready = replace(self.ready, deflect_tokens=shape.deflect_tokens)
        self.wanted = shape

    def _grow(self) -> None:
        for at_s, shape in list(self._coming):
            if self.now_s >= at_s:
                self._coming.remove((at_s, shape))
                self.ready = replace(
                    self.ready,
                    prefill_workers=max(
                        self.ready.prefill_workers, min(shape.prefill_workers, self.wanted.prefill_workers)
                    ),
                    decode_workers=max(
                        self.ready.decode_workers, min(shape.decode_workers, self.wanted.decode_workers)
                    ),
                )


def line(decision: Decision, rate: float) -> str:
    """Formats a decision: time, load, ready pools, the chosen action, and the alternatives with goodput and cost."""
    ready, shape = decision.inputs.ready, decision.shape
    others = "; ".join(
        f"{each.action.value} {text(each.shape)} {each.goodput_per_s:.1f}/s cost {each.cost:.0f}"
        for each in decision.alternatives[1:4]
    )
    best = f" {decision.alternatives[0].goodput_per_s:.1f}/s" if decision.alternatives else ""
    return (
        f"{decision.decided_at_s:5.0f} s  {rate:5.1f}/s  ready {text(ready):<8} {decision.action.value} {text(shape)}{best}"
        f"  ({decision.reason})" + (f"  instead of {others}" if others else "")
    )


def text(shape: Shape) -> str:
    return f"{shape.prefill_workers}+{shape.decode_workers}" + (
        f" d{shape.deflect_tokens}" if shape.deflect_tokens else ""
    )


def stories() -> Iterable[tuple[str, Drive]]:
    burst = Drive(Shape(prefill_workers=2, decode_workers=3))
    burst.run(30, 10.0)
    burst.run(90, 26.0)
    burst.run(240, 10.0)
    yield "A burst: deflect at once, flip when the dwell allows it, scale, and shrink after the calm", burst
    limited = Drive(
        Shape(prefill_workers=2, decode_workers=1),
        targets=replace(TARGETS, prefill=PoolLimits(workers_max=2), decode=PoolLimits(workers_max=1)),
    )
    limited.run(40, 40.0)
    yield "More than the limits allow: the limit is named, and nothing is tried again and again", limited
    blind = Drive(Shape(prefill_workers=2, decode_workers=1))
    blind.run(10, 10.0)
    blind.run(20, 40.0, state=ObservationState.STALE, problems=("samples are 40 s old",))
    blind.run(3, 10.0)
    yield "Stale metrics hold the plan", blind


def test_decisions_are_those_of_the_transcript(request: pytest.FixtureRequest) -> None:
    """The decisions match the transcript. After an intended change delete the file and run the test again, which writes it, and review the
    diff."""
    found = "\n".join("\n".join([f"# {title}", *drive.lines, ""]) for title, drive in stories())
    if not TRANSCRIPT.exists():
        TRANSCRIPT.write_text(found)
    assert found == TRANSCRIPT.read_text()


def test_a_burst_triggers_the_fastest_action_first():
    """A burst triggers a deflection within the first second, a flip next, and new workers only after these."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=3))
    drive.run(30, 10.0)
    assert not drive.actions()
    drive.run(60, 26.0)
    first = {action: next(at_s for at_s, c in drive.choices if c.action is action) for action in set(drive.actions())}
    assert first[DecisionAction.DEFLECT] == 31
    assert 31 < first[DecisionAction.FLIP] <= 41
    assert first[DecisionAction.FLIP] <= first.get(DecisionAction.SCALE, 1e9)


def test_a_surge_of_one_tick_is_deflected_and_starts_no_worker():
    """A single second of 40 requests at a rate of 10/s causes a deflection, which ends by itself, and no other action."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=3))
    drive.run(30, 10.0)
    drive.run(1, 10.0, surge_rate=40.0)
    assert drive.actions() == [DecisionAction.DEFLECT]
    assert drive.wanted.deflect_tokens > 0
    drive.run(29, 10.0)
    assert drive.actions() == [DecisionAction.DEFLECT, DecisionAction.DEFLECT]
    assert drive.wanted == Shape(prefill_workers=2, decode_workers=3)


def test_workers_start_at_once_when_a_flip_cannot_help():
    """If both pools are too small, workers start in the same tick as the deflection."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=1))
    drive.run(30, 8.0)
    drive.run(1, 24.0)
    assert drive.actions() == [DecisionAction.SCALE]
    assert drive.wanted.prefill_workers > 2


def test_a_surge_does_not_delay_new_workers():
    """If the estimated rate has risen, workers start in the same tick, even if that tick is also a surge."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=1))
    drive.run(30, 8.0)
    drive.run(1, 24.0, surge_rate=24.0)
    assert drive.actions() == [DecisionAction.SCALE]
    assert drive.wanted.deflect_tokens > 0


def test_noise_causes_at_most_one_reversal():
    """Ten minutes of 20 requests/s with 10 % noise change the direction of a pool's size at most once."""
    drive = Drive(Shape(prefill_workers=3, decode_workers=2))
    for i in range(600):
        drive.run(1, 20.0 * (1 + 0.1 * ((i * 7919) % 200 / 100 - 1)))
    sizes = [
        (c.alternatives[0].shape.prefill_workers, c.alternatives[0].shape.decode_workers) for _, c in drive.choices
    ]
    for pool in (0, 1):
        changes = [b[pool] - a[pool] for a, b in pairwise(sizes) if a[pool] != b[pool]]
        assert sum(a * b < 0 for a, b in pairwise(changes)) <= 1


def test_a_manual_change_is_kept_for_hold_s():
    """After an operator scales a pool, the planner changes nothing for `hold_s`, and then plans from the new size."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=1))
    drive.run(5, 10.0)
    drive.wanted = drive.ready = Shape(prefill_workers=5, decode_workers=1)
    drive.run(119, 10.0)
    assert {(c.action, c.reason) for at_s, c in drive.choices if at_s > 5} == {(DecisionAction.HOLD, "manual_change")}
    drive.run(120, 10.0)
    assert drive.wanted.prefill_workers < 5


def test_first_sizes_of_a_connector_are_not_a_manual_change():
    """A planner that starts before its scaler takes over the first sizes that the scaler reports, and decides at once."""
    planner = ModelPlanner("m", SETTINGS)
    seen = replace(
        ModelObservation(model="m", state=ObservationState.COMPLETE, ready=Shape(decode_workers=1)),
        demand=demand_of(Load(requests_per_s=30.0, prompt_tokens=1200, output_tokens=200)),
        recent_rate=30.0,
    )
    options = {"targets": TARGETS, "speed": Speed()}
    planner.tick(replace(seen, state=ObservationState.MISSING), wanted=None, now_s=1.0, **options)
    wanted = Shape(prefill_workers=1, decode_workers=1)
    choice, inputs = planner.tick(replace(seen, ready=wanted), wanted=wanted, now_s=2.0, **options)
    assert choice.action.changes_pools
    assert inputs.wanted == wanted


def test_workers_that_start_later_are_wanted_without_a_connector():
    """If no connector reports wanted sizes, the planner wants the workers that are ready, even if they started after it."""
    planner = ModelPlanner("m", SETTINGS)
    seen = ModelObservation(model="m", state=ObservationState.COMPLETE, ready=Shape(decode_workers=1))
    options = {"targets": TARGETS, "speed": Speed(), "wanted": None}
    planner.tick(seen, now_s=1.0, **options)
    ready = Shape(prefill_workers=3, decode_workers=2)
    choice, inputs = planner.tick(replace(seen, ready=ready), now_s=2.0, **options)
    assert (choice.action, inputs.wanted) == (DecisionAction.KEEP, ready)


def test_a_late_count_of_a_flip_is_not_a_manual_change():
    """A connector may report the old sizes until the flipped worker has drained."""
    drive = Drive(Shape(prefill_workers=2, decode_workers=3))
    drive.run(5, 10.0)
    before = drive.wanted
    drive.run(2, 26.0)
    assert drive.actions()[-1] is DecisionAction.FLIP
    drive.wanted = before
    assert drive.tick(26.0).reason != "manual_change"


def test_a_failed_change_is_decided_again():
    """The planner repeats a decision that was not accepted, from the actual sizes."""
    drive = Drive(Shape(prefill_workers=1, decode_workers=1), replace(SETTINGS, flips=False, deflects=False))
    drive.run(3, 5.0)
    seen = replace(
        ModelObservation(model="m", state=ObservationState.COMPLETE),
        demand=demand_of(Load(requests_per_s=30.0, prompt_tokens=1200, output_tokens=200)),
        recent_rate=30.0,
        ready=drive.ready,
    )
    for now_s in (4.0, 5.0):
        choice, inputs = drive.planner.tick(seen, targets=TARGETS, speed=Speed(), wanted=drive.wanted, now_s=now_s)
        assert choice.action is DecisionAction.SCALE
        assert inputs.wanted == drive.wanted


def test_several_models_share_one_budget():
    """Models whose loads peak in turn never want more than the budget together, and each can grow after the other has shrunk."""
    budget = 9.0
    drives = {name: Drive(Shape(prefill_workers=1, decode_workers=1)) for name in ("a", "b")}
    largest = dict.fromkeys(drives, 0.0)
    for rates in ((26.0, 4.0), (26.0, 26.0), (4.0, 26.0)):
        for _ in range(100):
            for name, drive in drives.items():
                costs = {each: cost_of(other.wanted, TARGETS) for each, other in drives.items()}
                drive.targets = within_budget(replace(TARGETS, model=name), budget, costs)
                drive.run(1, rates[0 if name == "a" else 1])
                largest[name] = max(largest[name], cost_of(drive.wanted, TARGETS))
            assert sum(cost_of(drive.wanted, TARGETS) for drive in drives.values()) <= budget
    assert min(largest.values()) > 4.0
    assert within_budget(TARGETS, None, {}) == TARGETS
    assert within_budget(replace(TARGETS, cost_max=2.0), 9.0, {"m": 3.0, "n": 5.0}).cost_max == 2.0


@pytest.mark.parametrize(("missing", "reason"), [({"targets": None}, "no_targets"), ({"speed": None}, "no_profile")])
def test_missing_inputs_hold_the_plan(missing: dict[str, None], reason: str):
    """Without targets or a profile the planner changes nothing, and its reason names the missing input."""
    planner = ModelPlanner("m", SETTINGS)
    seen = ModelObservation(model="m", state=ObservationState.COMPLETE, ready=Shape(decode_workers=1))
    options = {"targets": TARGETS, "speed": Speed(), **missing}
    choice, _ = planner.tick(seen, wanted=None, now_s=1.0, **options)
    assert (choice.action, choice.reason) == (DecisionAction.HOLD, reason)


def test_pools_grow_at_once_and_shrink_to_the_recent_maximum():
    """A pool grows at once, and shrinks only to the largest need of the calm time, so that a dip of a few seconds stops no worker."""
    stabiliser = Stabiliser(10.0)
    wanted = Shape(prefill_workers=4, decode_workers=4)
    small = Shape(prefill_workers=2, decode_workers=2)
    assert stabiliser.settle(Shape(prefill_workers=6, decode_workers=4), wanted, 0.0).prefill_workers == 6
    for now_s in range(1, 10):
        assert stabiliser.settle(small, wanted, float(now_s)) == wanted
    assert stabiliser.settle(Shape(prefill_workers=3, decode_workers=2), wanted, 11.0) == Shape(
        prefill_workers=3, decode_workers=2
    )
