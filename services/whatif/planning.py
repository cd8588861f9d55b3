"""The planner as a policy of a simulation: its decisions apply to simulated workers immediately."""

from collections.abc import Callable

from kvmesh.core.planning import Decision, DecisionAction, DecisionOutcome, Shape, Targets
from services.planner.decide.model_planner import ModelPlanner
from services.planner.decide.settings import DecideSettings
from services.planner.observation import ModelObservation
from services.planner.sizing.speed import Speed
from services.whatif.fleet import ChangingFleet


class PlannerPolicy:
    """`on_decision` receives every decision that changes something, and the first of every run of others."""

    def __init__(
        self,
        *,
        targets: Targets,
        speed: Speed,
        settings: DecideSettings,
        on_decision: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self._targets = targets
        self._speed = speed
        self.planner = ModelPlanner(targets.model, settings)
        self._on_decision = on_decision
        self._reason = ""
        self._number = 0

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        fleet.set_ttft(self._targets.ttft_s or 0.0)
        choice, inputs = self.planner.tick(
            observation, targets=self._targets, speed=self._speed, wanted=fleet.wanted(), now_s=now_s
        )
        self._number += 1
        decision = Decision(
            number=self._number,
            model=self._targets.model,
            decided_at_s=now_s,
            action=choice.action,
            reason=choice.reason,
            detail=choice.detail,
            inputs=inputs,
            alternatives=choice.alternatives,
            outcome=DecisionOutcome.ACCEPTED if choice.action.changes_pools else DecisionOutcome.NONE,
        )
        if choice.action.changes_pools:
            carry_out(decision, fleet)
            self.planner.accept(decision, now_s)
        if choice.action.changes_pools or choice.reason != self._reason:
            self._on_decision(decision)
        self._reason = choice.reason


def carry_out(decision: Decision, fleet: ChangingFleet) -> None:
    """Does what a connector would do."""
    shape: Shape = decision.shape
    fleet.deflect(shape.deflect_tokens)
    if decision.action is DecisionAction.FLIP:
        fleet.flip(shape.prefill_workers - decision.inputs.wanted.prefill_workers)
    elif decision.action is DecisionAction.SCALE:
        fleet.scale(shape)
