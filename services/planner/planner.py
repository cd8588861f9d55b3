"""The planner's loop: observes the registry and the metrics each interval, decides, acts, and keeps the newest plan."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvmesh.clock import Clock
from kvmesh.core import Role
from kvmesh.core.planning import (
    Decision,
    DecisionOutcome,
    LatencyReport,
    PlacementBounds,
    PlanReport,
    PoolLimits,
    PoolReport,
    PoolState,
    Shape,
    Targets,
)
from kvmesh.core.whatif import SimulationRequest
from kvmesh.discovery.base import SERVICES, Instance, Registry, View
from kvmesh.errors import MeshError, OverloadedError
from kvmesh.event_log import event_logger
from services.planner.act import CALL_TIMEOUT_S, Actuator, Lead
from services.planner.connectors.base import Connector, NoConnector
from services.planner.decide.model_planner import ModelPlanner
from services.planner.decisions import DecisionLog
from services.planner.metrics import PlannerMetrics
from services.planner.observation import ModelObservation, ObservationLimits, observe_model
from services.planner.observe import FetchError, MetricsSource
from services.planner.plan import Window, latencies, pools
from services.planner.settings import PlannerSettings
from services.planner.sizing.size import cost_of
from services.planner.sizing.speed import Speed, profile_of
from services.planner.speeds import WorkerSpeeds

_log = event_logger(__name__)
WINDOW_S_MIN = 10.0
"""Requests of a shorter time say too little of a rate."""
MODELS_MAX = 256
"""Models with targets. SetTargets could otherwise fill the memory."""


class PlannerLead(Lead, Protocol):
    """Which planner acts. `leader_id` empty: none, or unknown."""

    leader_id: str


class NoLead:
    """A planner that never acts."""

    leader_id = ""
    fencing_token = 0


class Planner:
    """Observes the mesh and reports. In the modes `dry_run` and `act` it decides; in `act` the leader carries decisions out."""

    def __init__(
        self,
        *,
        registry: Registry,
        source: MetricsSource,
        metrics: PlannerMetrics,
        clock: Clock,
        settings: PlannerSettings,
        speeds: WorkerSpeeds | None = None,
        connector: Connector | None = None,
        lead: PlannerLead | None = None,
        history: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """`history`: past request rates by model, oldest first, at the interval of the decisions' settings."""
        self._registry = registry
        self._source = source
        self._metrics = metrics
        self._clock = clock
        self._settings = settings
        self._speeds = speeds
        self._connector = connector or NoConnector()
        self._lead = lead or NoLead()
        decide = settings.decide
        self._decide_settings = decide if self._connector.can_flip else replace(decide, flips=False)
        self._actuator = Actuator(self._connector, self._lead, acts=settings.mode == "act")
        self._history: Mapping[str, Sequence[float]] = history or {}
        self._problems: frozenset[str] = frozenset()
        self._targets: dict[str, Targets] = {}
        self._models: dict[str, ModelPlanner] = {}
        self._known_speeds: Mapping[str, Speed] = {}
        self._log = DecisionLog()
        self._decided = 0
        self._changed = asyncio.Event()
        self.has_stopped = False
        self.newest = PlanReport(mode=settings.mode, source=source.name, problems=("nothing has been observed yet",))

    async def start(self) -> None:
        """Reads the past load, from which predictions start. Without it they start from nothing: that is logged, and no failure."""
        settings = self._settings
        if self._history or settings.mode == "observe" or not settings.history_s:
            return
        try:
            self._history = await self._source.history(
                span_s=min(settings.history_s, settings.decide.history_max * settings.decide.interval_s),
                step_s=settings.decide.interval_s,
            )
        except FetchError as error:
            _log.warning("history_not_read", detail=str(error))

    async def run(self) -> None:
        """Observes and decides each interval, until cancelled."""
        while True:
            began_s = self._clock.now()
            await self.observe()
            await self._clock.sleep(max(0.1, self._settings.interval_s - (self._clock.now() - began_s)))

    async def observe(self) -> PlanReport:
        """Makes one observation and returns its plan. Pools come from the registry, so that pools without metrics are included."""
        instances, problems = await self._instances()
        observation = await self._source.observe(instances)
        problems += observation.problems
        found = pools(observation.window, instances)
        seen = latencies(observation.window) if observation.window is not None else []
        models = self._observe_models(observation.window, found, seen)
        if self._speeds is not None:
            self._known_speeds = await self._speeds.update(instances)
        if self._settings.mode != "observe":
            problems += await self._decide(models)
        report = PlanReport(
            mode=self._settings.mode,
            source=self._source.name,
            observed_at_s=self._clock.wall(),
            pools=tuple(self._planned(pool) for pool in found),
            latencies=tuple(replace(each, state=models[each.model].state) for each in seen),
            problems=tuple(problems),
            targets=tuple(self.targets),
            decisions=tuple(self._log.newest_first()),
            is_leader=self._settings.mode == "act" and bool(self._lead.fencing_token),
            leader_id=self._lead.leader_id,
        )
        self._publish(report)
        self._metrics.record_observation(len(problems))
        self._log_new_problems(problems)
        return self.newest

    @property
    def targets(self) -> Sequence[Targets]:
        """The targets of all models, sorted by model."""
        known = {model: self.targets_of(model) for model in (*self._models, *self._targets)}
        return [targets for _, targets in sorted(known.items()) if targets is not None]

    def targets_of(self, model: str) -> Targets | None:
        return self._targets.get(model) or self._settings.targets.of_model(model)

    def set_targets(self, targets: Targets) -> None:
        """Replaces the targets of a model. The next plan follows them. Raises OverloadedError beyond MODELS_MAX models."""
        if targets.model not in self._targets and len(self._targets) >= MODELS_MAX:
            raise OverloadedError(
                f"{MODELS_MAX} models already have targets", reason="targets_full", retry_after_s=60.0
            )
        self._targets[targets.model] = targets
        self._publish(replace(self.newest, targets=self.targets))

    def complete(self, request: SimulationRequest) -> SimulationRequest:
        """Adds the model's present targets and speed to a request that has none."""
        speed = self._known_speeds.get(request.model)
        return replace(
            request,
            targets=request.targets or self.targets_of(request.model),
            profile=request.profile or (profile_of(speed) if speed is not None else None),
        )

    async def wait_plan(self, *, after: PlanReport | None) -> PlanReport:
        """Waits until the newest plan is another one than `after`, or the planner stops. Returns the newest plan."""
        while self.newest is after and not self.has_stopped:
            await self._changed.wait()
        return self.newest

    def end_watches(self) -> None:
        """Ends all waits, now and later: their callers must not delay the server's stop."""
        self.has_stopped = True
        self._changed.set()

    async def aclose(self) -> None:
        """Ends all waits; the runner cancels `run`."""
        self.end_watches()

    def _observe_models(
        self, window: Window | None, found: Sequence[PoolReport], seen: Sequence[LatencyReport]
    ) -> Mapping[str, ModelObservation]:
        limits = ObservationLimits(
            window_s_min=min(WINDOW_S_MIN, self._settings.window_s), age_s_max=self._settings.age_s_max
        )
        by_model = {each.model: each for each in seen}
        names = sorted({pool.model for pool in found} | set(by_model))
        return {
            model: observe_model(model, window, found, latency=by_model.get(model), limits=limits) for model in names
        }

    async def _decide(self, models: Mapping[str, ModelObservation]) -> list[str]:
        """Decides for each model that has workers. Returns the problems."""
        states, problems = await self._pools()
        wanted = wanted_shapes(states)
        for model, observation in models.items():
            if observation.ready.prefill_workers or observation.ready.decode_workers or model in self._models:
                targets = self.targets_of(model)
                if targets is not None:
                    # Costs are computed anew for each model, because the decisions before this one changed what their models want.
                    targets = within_budget(limited(targets, states), self._settings.budget_max, self._costs(models))
                await self._decide_model(observation, targets, self._known_speeds.get(model), wanted=wanted.get(model))
        await self._actuator.repeat_bounds({model: self._bounds_of(model) for model in self._models})
        return problems

    async def _decide_model(
        self, observation: ModelObservation, targets: Targets | None, speed: Speed | None, *, wanted: Shape | None
    ) -> None:
        model, now_s = observation.model, self._clock.now()
        planner = self._planner_of(model)
        choice, inputs = planner.tick(observation, targets=targets, speed=speed, wanted=wanted, now_s=now_s)
        self._decided += 1
        decision = Decision(
            number=self._decided,
            model=model,
            decided_at_s=self._clock.wall(),
            action=choice.action,
            reason=choice.reason,
            detail=choice.detail,
            inputs=inputs,
            alternatives=choice.alternatives,
        )
        decision = await self._actuator.apply(decision, ttft_s=self._bounds_of(model).ttft_s)
        if decision.outcome is DecisionOutcome.ACCEPTED:
            planner.accept(decision, now_s)
        is_new = self._log.add(decision)
        self._metrics.record_decision(decision, is_new=is_new)
        if is_new:
            _log.info("decided", **_logged(decision))

    def _bounds_of(self, model: str) -> PlacementBounds:
        targets = self.targets_of(model)
        ttft_s = None if targets is None else targets.ttft_s
        return PlacementBounds(deflect_tokens=self._models[model].deflection, ttft_s=ttft_s or 0.0)

    def _costs(self, models: Mapping[str, ModelObservation]) -> Mapping[str, float]:
        """Returns the cost of each model's wanted workers; of its ready workers before the first decision."""
        costs = {}
        for model, observation in models.items():
            planner = self._models.get(model)
            shape = planner.wanted if planner is not None else None
            costs[model] = cost_of(shape or observation.ready, self.targets_of(model) or Targets(model=model))
        return costs

    def _planner_of(self, model: str) -> ModelPlanner:
        planner = self._models.get(model)
        if planner is None:
            planner = self._models[model] = ModelPlanner(model, self._decide_settings)
            planner.history.warm_up(self._history.get(model, ()))
        return planner

    async def _pools(self) -> tuple[Sequence[PoolState], list[str]]:
        """Returns the pools as the connector sees them."""
        try:
            return await self._connector.pools(timeout_s=CALL_TIMEOUT_S), []
        except MeshError as error:
            return (), [f"the connector {self._connector.name} does not answer: {error.message}"]

    def _planned(self, pool: PoolReport) -> PoolReport:
        decision = self._log.newest(pool.model)
        return pool if decision is None else replace(pool, workers_planned=decision.shape.workers(pool.role))

    def _publish(self, report: PlanReport) -> None:
        self.newest = report
        # Waiters wake in the next iteration of the event loop; a wait that starts later needs the new event.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _instances(self) -> tuple[list[Instance], list[str]]:
        views = await asyncio.gather(*map(self._view, SERVICES))
        problems = sorted({view for view in views if isinstance(view, str)})
        return [i for view in views if isinstance(view, View) for i in view.instances], problems

    async def _view(self, service: str) -> View | str:
        try:
            return await self._registry.instances(service)
        except MeshError as error:
            return f"the registry does not answer: {error.message}"

    def _log_new_problems(self, problems: Sequence[str]) -> None:
        for problem in sorted(frozenset(problems) - self._problems):
            _log.warning("observation_problem", detail=problem)
        self._problems = frozenset(problems)


def wanted_shapes(states: Sequence[PoolState]) -> dict[str, Shape]:
    """Returns the wanted sizes by model."""
    sizes: dict[str, dict[Role, int]] = {}
    for state in states:
        sizes.setdefault(state.model, {})[state.role] = state.workers_wanted
    return {
        model: Shape(prefill_workers=found.get(Role.PREFILL, 0), decode_workers=found.get(Role.DECODE, 0))
        for model, found in sizes.items()
    }


def limited(targets: Targets, states: Sequence[PoolState]) -> Targets:
    """Targets within the limits of the connector."""
    most = {state.role: state.workers_max for state in states if state.model == targets.model}
    return replace(
        targets,
        prefill=_at_most(targets.prefill, most.get(Role.PREFILL)),
        decode=_at_most(targets.decode, most.get(Role.DECODE)),
    )


def within_budget(targets: Targets, budget: float | None, costs: Mapping[str, float]) -> Targets:
    """Limits a model to the part of the budget that the others do not use.

    `costs`: the cost that each model wants now, by its name. `budget` None: no limit.

    If each model is limited by what the others want now, all together never exceed the budget. A model keeps the workers that it already
    wants, so one model's load never stops another's workers. It returns them when it no longer needs them.
    """
    if budget is None:
        return targets
    others = sum(cost for model, cost in costs.items() if model != targets.model)
    left = max(costs.get(targets.model, 0.0), budget - others, 1e-9)
    return replace(targets, cost_max=left if targets.cost_max is None else min(left, targets.cost_max))


def _at_most(limits: PoolLimits, most: int | None) -> PoolLimits:
    if most is None:
        return limits
    workers_max = most if limits.workers_max is None else min(limits.workers_max, most)
    return replace(limits, workers_max=workers_max, workers_min=min(limits.workers_min, workers_max))


def _logged(decision: Decision) -> dict[str, object]:
    shape = decision.shape
    return {
        "model": decision.model,
        "action": decision.action.value,
        "reason": decision.reason,
        "outcome": decision.outcome.value,
        "prefill_workers": shape.prefill_workers,
        "decode_workers": shape.decode_workers,
        "deflect_tokens": shape.deflect_tokens,
    }
