"""A simulated mesh under a load, with pools that a policy changes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core import Role
from kvmesh.core.planning import LatencyReport, PoolReport, Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.observation import ModelObservation, ObservationLimits, observe_model
from services.planner.plan import Window, WindowKeeper, latencies
from services.router.core_settings import CoreSettings
from services.router.metrics import priority_class
from services.router.workers.cost_settings import CostSettings
from services.whatif.engine import EngineShape, Job
from services.whatif.fleet import ChangingFleet, FleetTimes
from services.whatif.mesh import Replay, ReplayShape
from services.whatif.metrics import SimulatedMetrics
from services.whatif.placers import MODEL, RouterPlacer
from services.whatif.result import WhatIfResult, make_result

ROLES = (Role.PREFILL, Role.DECODE)
WINDOW_S = 60.0


class PoolPolicy(Protocol):
    """Changes the pools of a simulation."""

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        """Called at every tick."""
        ...


class Static:
    """Never changes anything."""

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated. `tick_s`: interval of the policy's decisions; 0: it makes none. `router` None: the ITL target is the targets'."""

    shape: Shape
    targets: Targets
    engine: EngineShape = field(default_factory=lambda: EngineShape(run_s=1.0))
    times: FleetTimes = field(default_factory=FleetTimes)
    router: CoreSettings | None = None
    tick_s: float = 1.0
    load_interval_s: float = 1.0
    seed: int = 1


class _Mesh(Replay):
    """Counts what happens to requests."""

    def __init__(self, settings: SimulationSettings, metrics: SimulatedMetrics) -> None:
        shape = ReplayShape(
            prefills=settings.shape.prefill_workers,
            decodes=settings.shape.decode_workers,
            engine=settings.engine,
            load_interval_s=settings.load_interval_s,
        )
        self._metrics = metrics
        self.router: RouterPlacer
        super().__init__(
            shape,
            lambda replay: self._make_placer(replay, settings.router or _router_settings(settings.targets)),
            settings.seed,
        )

    def _make_placer(self, replay: Replay, settings: CoreSettings) -> RouterPlacer:
        self.router = RouterPlacer(replay, settings)
        return self.router

    def place(self, job: Job) -> None:
        # Only the first attempt is an arrival; retries come here too.
        if job is self.jobs[-1] and not job.placed_s and job.arrived_s == self.now_s:
            self._metrics.on_arrival(job)
        super().place(job)

    def _on_prompt(self, job: Job, now_s: float) -> None:
        super()._on_prompt(job, now_s)
        if job.first_token_s == now_s:
            self._metrics.on_first_token(job)

    def _on_done(self, job: Job, now_s: float) -> None:
        self._metrics.on_done(job)
        super()._on_done(job, now_s)


def _router_settings(targets: Targets) -> CoreSettings:
    return CoreSettings(cost=CostSettings(itl_target_s=targets.itl_s)) if targets.itl_s else CoreSettings()


class Simulation:
    """Runs one load through one mesh."""

    def __init__(self, settings: SimulationSettings, policy: PoolPolicy) -> None:
        self._settings = settings
        self._policy = policy
        self._metrics = SimulatedMetrics(MODEL)
        self._mesh = _Mesh(settings, self._metrics)
        self.fleet = ChangingFleet(self._mesh, self._mesh.router, settings.times)
        self.fleet.deflect(settings.shape.deflect_tokens)
        self._windows = WindowKeeper(WINDOW_S)
        self.shapes: list[tuple[float, Shape]] = [(0.0, settings.shape)]

    def run(self, trace: Sequence[RecordedRequest]) -> WhatIfResult:
        """Runs until the last request ends. The hours of workers count until the last arrival."""
        if self._settings.tick_s:
            self._mesh.at(self._settings.tick_s, self._tick)
        worker_s: dict[Role, float] = {}
        self._mesh.at(trace[-1].at_s, lambda: worker_s.update({r: self.fleet.worker_s(r) for r in ROLES}))
        self._mesh.play(trace)
        return make_result(self._mesh.jobs, self._settings.targets, worker_s, fleet=self.fleet, shapes=self.shapes)

    def _tick(self) -> None:
        now_s = self._mesh.now_s
        self._mesh.router.drain_queue()
        if not isinstance(self._policy, Static):
            # A scrape of a thousand workers takes as long as tens of requests.
            window = self._windows.add(now_s, self._metrics.scrape(self.fleet, self._queued_tokens()))
            self._policy.tick(self._observe(window), self.fleet, now_s)
        wanted = self.fleet.wanted()
        if wanted != self.shapes[-1][1]:
            self.shapes.append((now_s, wanted))
        self._mesh.at(now_s + self._settings.tick_s, self._tick)

    def _observe(self, window: Window) -> ModelObservation:
        ready = self.fleet.ready()
        pools = [
            PoolReport(model=MODEL, role=Role.PREFILL, workers_ready=ready.prefill_workers),
            PoolReport(model=MODEL, role=Role.DECODE, workers_ready=ready.decode_workers),
        ]
        found: list[LatencyReport] = latencies(window)
        return observe_model(MODEL, window, pools, latency=found[0] if found else None, limits=ObservationLimits())

    def _queued_tokens(self) -> Mapping[str, float]:
        queued: Counter[str] = Counter()
        for priority, (_, tokens) in self._mesh.router.core.queue.sums().items():
            queued[priority_class(priority)] += tokens
        return queued
