"""Carries out decisions through a connector."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvmesh.core import Role
from kvmesh.core.planning import Decision, DecisionAction, DecisionOutcome, PlacementBounds, PoolTarget
from kvmesh.errors import MeshError, NotFoundError, UnavailableError
from kvmesh.event_log import event_logger
from services.planner.connectors.base import Connector

_log = event_logger(__name__)
CALL_TIMEOUT_S = 10.0
"""Longest call of a connector. A call returns when the change is accepted."""
POOLS = (Role.PREFILL, Role.DECODE)


class Lead(Protocol):
    """Whether this planner acts for the mesh; see LeaderElection. `fencing_token` 0: it does not lead."""

    @property
    def fencing_token(self) -> int: ...


class Actuator:
    """Acts if `acts` is set and while this planner leads; otherwise decisions are proposals.

    Invariant: each call carries the fencing token of the leadership in which its decision was made, so that a late call is refused.
    """

    def __init__(self, connector: Connector, lead: Lead, *, acts: bool) -> None:
        self._connector = connector
        self._lead = lead
        self._acts = acts

    async def apply(self, decision: Decision, *, ttft_s: float = 0.0) -> Decision:
        """Returns the decision with its outcome. `ttft_s`: the model's target, which routers get with the bound of deflection; 0: none.

        Never raises a MeshError: the planner decides again at the next interval.
        """
        if not decision.action.changes_pools:
            return replace(decision, outcome=DecisionOutcome.NONE)
        if not self._acts or not self._lead.fencing_token:
            return replace(decision, outcome=DecisionOutcome.PROPOSED)
        decision = replace(decision, fencing_token=self._lead.fencing_token)
        steps: Mapping[DecisionAction, Callable[[], Awaitable[str]]] = {
            DecisionAction.DEFLECT: partial(self._deflect, decision, ttft_s),
            DecisionAction.FLIP: partial(self._flip, decision),
            DecisionAction.SCALE: partial(self._scale, decision),
        }
        try:
            detail = await steps[decision.action]()
        except MeshError as error:
            _log.warning(
                "decision_failed",
                number=decision.number,
                action=decision.action.value,
                reason=error.reason,
                detail=error.message,
            )
            return replace(decision, outcome=DecisionOutcome.FAILED, outcome_detail=error.message)
        _log.info("decision_accepted", number=decision.number, action=decision.action.value, model=decision.model)
        return replace(decision, outcome=DecisionOutcome.ACCEPTED, outcome_detail=detail)

    async def repeat_bounds(self, bounds_by_model: Mapping[str, PlacementBounds]) -> None:
        """Sends bounds again, for routers that have started since. Failures are logged: the next interval repeats them."""
        for model, bounds in bounds_by_model.items():
            # Checked for each model: the leadership may end during a call.
            if not self._acts or not self._lead.fencing_token:
                return
            try:
                await self._connector.set_bounds(
                    model, bounds, fencing_token=self._lead.fencing_token, timeout_s=CALL_TIMEOUT_S
                )
            except MeshError as error:
                _log.warning("bounds_not_repeated", model=model, reason=error.reason, detail=error.message)

    async def _deflect(self, decision: Decision, ttft_s: float) -> str:
        await self._connector.set_bounds(
            decision.model,
            PlacementBounds(deflect_tokens=decision.shape.deflect_tokens, ttft_s=ttft_s),
            fencing_token=decision.fencing_token,
            timeout_s=CALL_TIMEOUT_S,
        )
        return ""

    async def _flip(self, decision: Decision) -> str:
        """Moves the workers with the fewest requests."""
        moved = decision.shape.prefill_workers - decision.inputs.wanted.prefill_workers
        source, target = (Role.DECODE, Role.PREFILL) if moved > 0 else (Role.PREFILL, Role.DECODE)
        candidates = await self._connector.idle_first(decision.model, source, timeout_s=CALL_TIMEOUT_S)
        # A pool is never emptied: its last worker would take the requests of the whole mesh with it.
        chosen = candidates[: min(abs(moved), len(candidates) - 1)]
        if not chosen:
            raise NotFoundError(f"no {source.value} worker can leave its pool", reason="no_worker")
        for worker_id in chosen:
            # Another planner may have become the leader during the previous await.
            self._check_lead(decision)
            await self._connector.flip(
                worker_id, target, fencing_token=decision.fencing_token, timeout_s=CALL_TIMEOUT_S
            )
        return f"{', '.join(chosen)} to {target.value}"

    async def _scale(self, decision: Decision) -> str:
        """Grows pools before it shrinks others, so that capacity never falls below that of either shape."""
        details = []
        changes = [(role, decision.shape.workers(role), decision.inputs.wanted.workers(role)) for role in POOLS]
        for role, workers, wanted in sorted(changes, key=lambda change: change[2] - change[1]):
            if workers == wanted:
                continue
            self._check_lead(decision)
            drained: tuple[str, ...] = ()
            if workers < wanted:
                candidates = await self._connector.idle_first(decision.model, role, timeout_s=CALL_TIMEOUT_S)
                # The wanted ones that do not serve yet go first: the pool keeps as many of those that serve as it will have.
                drained = tuple(candidates[: max(0, len(candidates) - workers)])
            target = PoolTarget(model=decision.model, role=role, workers=workers, drain_worker_ids=drained)
            accepted = await self._connector.scale(
                target, fencing_token=decision.fencing_token, timeout_s=CALL_TIMEOUT_S
            )
            details.append(f"{role.value} {wanted} to {accepted.workers_wanted}")
        return ", ".join(details)

    def _check_lead(self, decision: Decision) -> None:
        if self._lead.fencing_token != decision.fencing_token:
            raise UnavailableError("this planner is no longer the leader", reason="not_leader")
