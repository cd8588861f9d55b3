"""Acting on decisions: the right calls in the right order, by the leader only, and failures that harm nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvmesh.core import Role
from kvmesh.core.planning import (
    Alternative,
    Decision,
    DecisionAction,
    DecisionInputs,
    DecisionOutcome,
    Fence,
    PlacementBounds,
    PoolState,
    PoolTarget,
    Shape,
)
from kvmesh.errors import UnavailableError
from services.planner.act import Actuator

ACTIONS = (DecisionAction.DEFLECT, DecisionAction.FLIP, DecisionAction.SCALE)


@dataclass
class OwnLead:
    fencing_token: int = 7


@dataclass
class RecordingConnector:
    """A connector that keeps its calls. `failing`: the call that raises."""

    name = "recording"
    can_flip = True
    idle: dict[Role, Sequence[str]] = field(default_factory=dict)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    failing: str = ""
    fence: Fence = field(default_factory=Fence)
    lead: OwnLead | None = None

    def _note(self, token: int, name: str, *words: object) -> None:
        self.fence.check(token)
        if name == self.failing:
            raise UnavailableError("no answer", reason="timeout")
        self.calls.append((name, *words))
        if self.lead is not None:
            # The lead ends while the planner acts.
            self.lead.fencing_token = 0

    async def pools(self, *, timeout_s: float) -> Sequence[PoolState]:
        return ()

    async def scale(self, target: PoolTarget, *, fencing_token: int, timeout_s: float) -> PoolState:
        self._note(fencing_token, "scale", target.role.value, target.workers, *target.drain_worker_ids)
        return PoolState(model=target.model, role=target.role, workers_wanted=target.workers, workers_running=0)

    async def flip(self, worker_id: str, role: Role, *, fencing_token: int, timeout_s: float) -> None:
        self._note(fencing_token, "flip", worker_id, role.value)

    async def set_bounds(self, model: str, bounds: PlacementBounds, *, fencing_token: int, timeout_s: float) -> None:
        self._note(fencing_token, "set_bounds", model, bounds.deflect_tokens, bounds.ttft_s)

    async def idle_first(self, model: str, role: Role, *, timeout_s: float) -> Sequence[str]:
        return self.idle[role]

    async def aclose(self) -> None:
        """Nothing to release."""


def connector(**changes: object) -> RecordingConnector:
    return RecordingConnector(idle={Role.PREFILL: ["p1", "p0"], Role.DECODE: ["d2", "d0", "d1"]}, **changes)  # type: ignore[arg-type]


def decision(action: DecisionAction, shape: Shape, wanted: Shape | None = None) -> Decision:
    return Decision(
        number=1,
        model="m",
        decided_at_s=0.0,
        action=action,
        reason="test",
        inputs=DecisionInputs(wanted=wanted or Shape(prefill_workers=2, decode_workers=3)),
        alternatives=(Alternative(action=action, shape=shape),),
    )


def apply(actuator: Actuator, made: Decision) -> Decision:
    return asyncio.run(actuator.apply(made, ttft_s=2.0))


@pytest.mark.parametrize(
    ("action", "shape", "calls"),
    [
        (
            DecisionAction.DEFLECT,
            Shape(prefill_workers=2, decode_workers=3, deflect_tokens=512),
            [("set_bounds", "m", 512, 2.0)],
        ),
        (DecisionAction.FLIP, Shape(prefill_workers=3, decode_workers=2), [("flip", "d2", "prefill")]),
        (DecisionAction.FLIP, Shape(prefill_workers=1, decode_workers=4), [("flip", "p1", "decode")]),
        (
            DecisionAction.SCALE,
            Shape(prefill_workers=1, decode_workers=5),
            [("scale", "decode", 5), ("scale", "prefill", 1, "p1")],
        ),
        (DecisionAction.SCALE, Shape(prefill_workers=2, decode_workers=1), [("scale", "decode", 1, "d2", "d0")]),
        (DecisionAction.KEEP, Shape(prefill_workers=2, decode_workers=3), []),
        (DecisionAction.HOLD, Shape(), []),
    ],
)
def test_a_decision_becomes_calls(action: DecisionAction, shape: Shape, calls: list[object]) -> None:
    """The workers with the fewest requests are moved and stopped, and pools grow before others shrink."""
    recording = connector()
    done = apply(Actuator(recording, OwnLead(), acts=True), decision(action, shape))
    assert recording.calls == calls
    assert done.outcome is (DecisionOutcome.ACCEPTED if calls else DecisionOutcome.NONE)


@pytest.mark.parametrize(
    ("ready", "workers", "stopped"), [(["d0"], 1, []), (["d1", "d0"], 1, ["d1"]), (["d1", "d0"], 2, []), ([], 1, [])]
)
def test_workers_that_start_stop_before_those_that_serve(ready: list[str], workers: int, stopped: list[str]) -> None:
    """Three are wanted, and not all of them serve yet: the pool keeps as many of those that do as it will have."""
    recording = RecordingConnector(idle={Role.PREFILL: [], Role.DECODE: ready})
    apply(
        Actuator(recording, OwnLead(), acts=True),
        decision(DecisionAction.SCALE, Shape(prefill_workers=2, decode_workers=workers)),
    )
    assert recording.calls == [("scale", "decode", workers, *stopped)]


@pytest.mark.parametrize(("acts", "leads"), [(False, True), (True, False)])
def test_who_does_not_lead_proposes(acts: bool, leads: bool) -> None:
    """A dry run, and a planner that another one leads, call nothing."""
    recording = connector()
    actuator = Actuator(recording, OwnLead(7 if leads else 0), acts=acts)
    for action in ACTIONS:
        shape = Shape(prefill_workers=3, decode_workers=2, deflect_tokens=9)
        assert apply(actuator, decision(action, shape)).outcome is DecisionOutcome.PROPOSED
    asyncio.run(actuator.repeat_bounds({"m": PlacementBounds(deflect_tokens=9)}))
    assert recording.calls == []


@pytest.mark.parametrize(("action", "failing"), list(zip(ACTIONS, ("set_bounds", "flip", "scale"), strict=True)))
def test_a_failing_connector_is_an_outcome(action: DecisionAction, failing: str) -> None:
    """The planner goes on and decides again."""
    actuator = Actuator(connector(failing=failing), OwnLead(), acts=True)
    done = apply(actuator, decision(action, Shape(prefill_workers=3, decode_workers=2, deflect_tokens=9)))
    assert (done.outcome, done.outcome_detail) == (DecisionOutcome.FAILED, "no answer")
    asyncio.run(actuator.repeat_bounds({"m": PlacementBounds(deflect_tokens=9)}))


def test_a_lead_that_ends_in_the_middle_ends_the_action() -> None:
    """Of two calls the second is not made."""
    lead = OwnLead()
    recording = connector(lead=lead)
    done = apply(
        Actuator(recording, lead, acts=True),
        decision(DecisionAction.SCALE, Shape(prefill_workers=3, decode_workers=4)),
    )
    assert len(recording.calls) == 1
    assert done.outcome is DecisionOutcome.FAILED


def test_an_old_leader_is_refused() -> None:
    """It still believes that it leads, but another one has acted since."""
    recording = connector()
    recording.fence.check(8)
    done = apply(
        Actuator(recording, OwnLead(7), acts=True),
        decision(DecisionAction.DEFLECT, Shape(deflect_tokens=4)),
    )
    assert done.outcome is DecisionOutcome.FAILED
    assert recording.calls == []


def test_the_last_worker_of_a_pool_stays() -> None:
    """Whatever the decision says: the routers may see fewer workers than the planner counted."""
    recording = RecordingConnector(idle={Role.DECODE: ["d0"], Role.PREFILL: []})
    done = apply(
        Actuator(recording, OwnLead(), acts=True),
        decision(DecisionAction.FLIP, Shape(prefill_workers=3, decode_workers=2)),
    )
    assert (recording.calls, done.outcome) == ([], DecisionOutcome.FAILED)
