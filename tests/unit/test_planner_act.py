"""Applying decisions: the planner makes the right calls in the right order, only as leader, and survives failures."""

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
class Leadership:
    fencing_token: int = 7


@dataclass
class RecordingConnector:
    """A connector that records its calls. `failing`: the call that raises. `lead`: ends after the first call."""

    name = "recording"
    can_flip = True
    idle: dict[Role, Sequence[str]] = field(default_factory=dict)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    failing: str = ""
    fence: Fence = field(default_factory=Fence)
    lead: Leadership | None = None

    def _note(self, token: int, name: str, *words: object) -> None:
        self.fence.check(token)
        if name == self.failing:
            raise UnavailableError("no answer", reason="timeout")
        self.calls.append((name, *words))
        if self.lead is not None:
            # The planner loses its leadership while it acts.
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
        """Has nothing to release."""


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
    """The idlest workers are flipped and stopped first, and pools grow before other pools shrink."""
    recording = connector()
    done = apply(Actuator(recording, Leadership(), acts=True), decision(action, shape))
    assert recording.calls == calls
    assert done.outcome is (DecisionOutcome.ACCEPTED if calls else DecisionOutcome.NONE)


@pytest.mark.parametrize(
    ("ready", "workers", "stopped"), [(["d0"], 1, []), (["d1", "d0"], 1, ["d1"]), (["d1", "d0"], 2, []), ([], 1, [])]
)
def test_starting_workers_stop_before_ready_ones(ready: list[str], workers: int, stopped: list[str]) -> None:
    """If a pool shrinks while some of its workers still start, it stops ready workers only if there are more of them than its new size."""
    recording = RecordingConnector(idle={Role.PREFILL: [], Role.DECODE: ready})
    apply(
        Actuator(recording, Leadership(), acts=True),
        decision(DecisionAction.SCALE, Shape(prefill_workers=2, decode_workers=workers)),
    )
    assert recording.calls == [("scale", "decode", workers, *stopped)]


@pytest.mark.parametrize(("acts", "leads"), [(False, True), (True, False)])
def test_a_planner_that_does_not_lead_only_proposes(acts: bool, leads: bool) -> None:
    """A dry run and a planner that is not the leader call nothing."""
    recording = connector()
    actuator = Actuator(recording, Leadership(7 if leads else 0), acts=acts)
    for action in ACTIONS:
        shape = Shape(prefill_workers=3, decode_workers=2, deflect_tokens=9)
        assert apply(actuator, decision(action, shape)).outcome is DecisionOutcome.PROPOSED
    asyncio.run(actuator.repeat_bounds({"m": PlacementBounds(deflect_tokens=9)}))
    assert recording.calls == []


@pytest.mark.parametrize(("action", "failing"), list(zip(ACTIONS, ("set_bounds", "flip", "scale"), strict=True)))
def test_a_failing_connector_is_an_outcome(action: DecisionAction, failing: str) -> None:
    """A failed call becomes the outcome of the decision, and repeating the bounds raises no error."""
    actuator = Actuator(connector(failing=failing), Leadership(), acts=True)
    done = apply(actuator, decision(action, Shape(prefill_workers=3, decode_workers=2, deflect_tokens=9)))
    assert (done.outcome, done.outcome_detail) == (DecisionOutcome.FAILED, "no answer")
    asyncio.run(actuator.repeat_bounds({"m": PlacementBounds(deflect_tokens=9)}))


def test_losing_leadership_ends_the_action() -> None:
    """If leadership ends after the first of two calls, the second call is not made."""
    lead = Leadership()
    recording = connector(lead=lead)
    done = apply(
        Actuator(recording, lead, acts=True),
        decision(DecisionAction.SCALE, Shape(prefill_workers=3, decode_workers=4)),
    )
    assert len(recording.calls) == 1
    assert done.outcome is DecisionOutcome.FAILED


def test_an_old_leader_is_refused() -> None:
    """A planner that still believes that it leads is refused after another leader has acted."""
    recording = connector()
    recording.fence.check(8)
    done = apply(
        Actuator(recording, Leadership(7), acts=True),
        decision(DecisionAction.DEFLECT, Shape(deflect_tokens=4)),
    )
    assert done.outcome is DecisionOutcome.FAILED
    assert recording.calls == []


def test_the_last_worker_of_a_pool_is_not_flipped() -> None:
    """A flip of the only worker that the routers list fails, even if the planner counted more workers."""
    recording = RecordingConnector(idle={Role.DECODE: ["d0"], Role.PREFILL: []})
    done = apply(
        Actuator(recording, Leadership(), acts=True),
        decision(DecisionAction.FLIP, Shape(prefill_workers=3, decode_workers=2)),
    )
    assert (recording.calls, done.outcome) == ([], DecisionOutcome.FAILED)
