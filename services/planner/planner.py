"""The planner's loop: observes the registry and the metrics each interval and keeps the newest plan."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from kvmesh.clock import Clock
from kvmesh.core.plan import PlanReport
from kvmesh.core.planning import Targets
from kvmesh.discovery.base import SERVICES, Instance, Registry, View
from kvmesh.errors import MeshError, OverloadedError
from services.planner.metrics import PlannerMetrics
from services.planner.observe import MetricsSource
from services.planner.plan import latencies, pools

log = logging.getLogger(__name__)
MODE = "observe"
MODELS_MAX = 256
"""Models with targets. SetTargets could otherwise fill the memory."""


class Planner:
    """Observes the mesh and reports. It does not act."""

    def __init__(
        self, registry: Registry, source: MetricsSource, metrics: PlannerMetrics, clock: Clock, *, interval_s: float
    ) -> None:
        self._registry = registry
        self._source = source
        self._metrics = metrics
        self._clock = clock
        self._interval_s = interval_s
        self._problems: frozenset[str] = frozenset()
        self._targets: dict[str, Targets] = {}
        self._changed = asyncio.Event()
        self.has_stopped = False
        self.newest = PlanReport(mode=MODE, source=source.name, problems=("nothing has been observed yet",))

    async def start(self) -> None:
        """Does nothing: a plan without an observation says so."""

    async def run(self) -> None:
        """Observes each interval, until cancelled."""
        while True:
            began_s = self._clock.now()
            await self.observe()
            await self._clock.sleep(max(0.1, self._interval_s - (self._clock.now() - began_s)))

    async def observe(self) -> PlanReport:
        """Makes one observation and returns its plan. Pools come from the registry, so that pools without metrics are included."""
        instances, registry_problems = await self._instances()
        observation = await self._source.observe(instances)
        problems = (*registry_problems, *observation.problems)
        report = PlanReport(
            mode=MODE,
            source=self._source.name,
            observed_at_s=self._clock.wall(),
            pools=pools(observation.window, instances),
            latencies=latencies(observation.window) if observation.window is not None else (),
            problems=problems,
            targets=self.targets,
        )
        self._publish(report)
        self._metrics.record_observation(len(problems))
        self._log_new_problems(problems)
        return self.newest

    @property
    def targets(self) -> Sequence[Targets]:
        """The targets of all models, sorted by model."""
        return [self._targets[model] for model in sorted(self._targets)]

    def set_targets(self, targets: Targets) -> None:
        """Replaces the targets of a model. The next plan follows them. Raises OverloadedError beyond MODELS_MAX models."""
        if targets.model not in self._targets and len(self._targets) >= MODELS_MAX:
            raise OverloadedError(
                f"there are targets for {MODELS_MAX} models already", reason="targets_full", retry_after_s=60.0
            )
        self._targets[targets.model] = targets
        self._publish(replace(self.newest, targets=self.targets))

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
            log.warning("observation_problem", extra={"data": {"problem": problem}})
        self._problems = frozenset(problems)
