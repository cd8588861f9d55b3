"""Placement in a replay by the router's core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvmesh.core import (
    Ask,
    Capabilities,
    Handoff,
    KvBatch,
    KvEvent,
    LoadRecord,
    ModelCard,
    PerformanceProfile,
    Placement,
    Report,
    ReportKind,
    Role,
    WorkerDescription,
    WorkerRef,
)
from kvmesh.core.planning import PlacementBounds
from kvmesh.errors import OverloadedError
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.placement.policies import Policy
from services.router.queue.admission import Queued
from services.router.workers.worker import RegisteredWorker
from services.whatif.engine import EngineShape, Job, ReplayEngine

if TYPE_CHECKING:
    from services.whatif.mesh import Replay

FRONTEND = "replay"
MODEL = "replay"


class QueuedByRouter(Exception):
    """The request waits in the router's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The workers of a request."""

    prefill: ReplayEngine | None
    decode: ReplayEngine


class SimulatedPlacer(Protocol):
    """Places requests, and receives the events that a router would receive."""

    def place(self, job: Job) -> Spot | None:
        """Returns workers, or None if rejected for lack of capacity. Raises Waits if the request is queued; `Replay.go` is called later."""

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        """Receives changes of a worker's cache, after the event delay."""

    def on_load(self, engine: ReplayEngine) -> None:
        """Receives a load record."""

    def on_prefilled(self, job: Job) -> None:
        """Receives that the prompt is computed."""

    def on_first_token(self, job: Job) -> None:
        """Receives that the first token was generated."""

    def on_done(self, job: Job) -> None:
        """Receives that the answer is complete."""


class RouterPlacer:
    """Places with the router's core. `policy` replaces the one of the settings."""

    def __init__(
        self,
        replay: "Replay",
        settings: CoreSettings,
        *,
        policy: type[Policy] | None = None,
        router_id: str = "replay",
    ) -> None:
        self._replay = replay
        self._engines: dict[str, ReplayEngine] = {}
        self._waiting: dict[int, Job] = {}
        self._sequences: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self.core = RouterCore(settings, router_id=router_id, run_id=router_id, policy=policy, generator=replay.random)
        for engine in replay.prefills:
            self.join(engine, Role.PREFILL)
        for engine in replay.decodes:
            self.join(engine, Role.DECODE)

    def place(self, job: Job) -> Spot | None:
        size = self._replay.shape.engine.block_tokens
        ask = Ask(
            request_id=str(job.ask_id),
            model=MODEL,
            prompt_tokens=job.trace.prompt_tokens,
            block_hashes=job.names,
            block_size_tokens=size,
        )
        now_s = self._replay.now_s
        try:
            answer = self.core.ask(FRONTEND, job.ask_id, ask, now=now_s, wall=now_s)
        except OverloadedError:
            return None
        if isinstance(answer, Queued):
            self._waiting[job.ask_id] = job
            raise QueuedByRouter
        return self._spot(answer)

    def _drain(self) -> None:
        """Drains the queue: any event may have freed capacity."""
        while self._waiting:
            answers = self.core.drain_queue(now=self._replay.now_s, wall=self._replay.now_s)
            for answer in answers:
                job = self._waiting.pop(answer.ask_id)
                if isinstance(answer.outcome, Placement):
                    self._replay.go(job, self._spot(answer.outcome))
                else:
                    self._replay.place_later(job)
            if not self.core.admission.has_more:
                break

    def _spot(self, placement: Placement) -> Spot:
        prefill = self._engines[placement.prefill.worker_id] if placement.prefill is not None else None
        return Spot(prefill=prefill, decode=self._engines[placement.decode.worker_id])

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        self._sequences[engine.name] += 1
        worker = self.core.fleet.workers.get(engine.name)
        if worker is None:
            return
        assert worker.feed is not None
        epoch = self._epochs[engine.name]
        worker.feed.apply(KvBatch(epoch=epoch, sequence=self._sequences[engine.name], events=events))

    def on_load(self, engine: ReplayEngine) -> None:
        worker = self.core.fleet.workers.get(engine.name)
        if worker is None:
            return
        shape = self._replay.shape.engine
        free = engine.pool.available
        record = LoadRecord(
            worker_id=engine.name,
            epoch=self._epochs[engine.name],
            sequence=engine.steps,
            taken_at_s=self._replay.now_s,
            step=engine.steps,
            running_requests=engine.running,
            waiting_requests=len(engine.waiting),
            waiting_prompt_tokens=engine.waiting_tokens,
            kv_blocks_used=shape.kv_blocks - free,
            kv_blocks_free=free,
            kv_blocks_total=shape.kv_blocks,
            running_requests_max=shape.speed.running_max,
            step_s=engine.last_step_s,
            prompt_tokens_total=engine.computed_tokens,
            output_tokens_total=engine.output_tokens,
        )
        self.core.fleet.on_load_record(worker, record)
        self._drain()

    def on_prefilled(self, job: Job) -> None:
        self._report(job, ReportKind.PREFILLED)

    def on_first_token(self, job: Job) -> None:
        self._report(job, ReportKind.FIRST_TOKEN)

    def on_done(self, job: Job) -> None:
        self._report(job, ReportKind.FINISHED)

    def _report(self, job: Job, kind: ReportKind) -> None:
        elapsed_s = self._replay.now_s - job.placed_s
        note = Report(kind=kind, elapsed_s=elapsed_s, cached_tokens=job.cached_tokens)
        self.core.report(FRONTEND, job.ask_id, note, now=self._replay.now_s)
        self._drain()

    def join(self, engine: ReplayEngine, role: Role) -> None:
        """Adds a worker with an empty cache."""
        shape = self._replay.shape.engine
        self._engines[engine.name] = engine
        epoch = self._epochs[engine.name] = self._epochs.get(engine.name, 0) + 1
        worker = self._register(engine, role, is_draining=False)
        self.core.fleet.describe(worker, _description(engine.name, role, shape, epoch=epoch))
        assert worker.feed is not None
        # An empty snapshot: without one the feed would not apply the events that follow.
        worker.feed.apply(KvBatch(epoch=epoch, sequence=0, is_snapshot=True))
        self.core.fleet.connected(worker)
        self._sequences[engine.name] = 0
        self._drain()

    def mark_draining(self, engine: ReplayEngine, role: Role) -> None:
        """Sets the drain mark: the worker gets no more requests."""
        self._register(engine, role, is_draining=True)

    def leave(self, engine: ReplayEngine) -> None:
        """Removes a worker."""
        self.core.fleet.unregister(engine.name)
        self._engines.pop(engine.name, None)

    @property
    def bounds(self) -> PlacementBounds:
        """What the planner wants of placements."""
        return self.core.placer.bounds_of(MODEL)

    def set_bounds(self, bounds: PlacementBounds) -> None:
        self.core.placer.set_bounds(MODEL, bounds)

    def drain_queue(self) -> None:
        """Places queued requests for which there is room, and ends those that waited for too long."""
        self._drain()

    def _register(self, engine: ReplayEngine, role: Role, *, is_draining: bool) -> RegisteredWorker:
        return self.core.fleet.register(
            engine.name, address=f"{engine.name}:1", role=role, labels={}, is_critical=False, is_draining=is_draining
        )


def _description(name: str, role: Role, shape: EngineShape, *, epoch: int) -> WorkerDescription:
    speed = shape.speed
    return WorkerDescription(
        worker=WorkerRef(worker_id=name, address=f"{name}:1", epoch=epoch),
        role=role,
        model=ModelCard(name=MODEL, source=MODEL, context_tokens_max=1 << 20, vocabulary_size=1000),
        capabilities=Capabilities(
            engine="simulated",
            engine_version="1",
            handoffs=(Handoff.SEQUENTIAL,),
            roles=(Role.PREFILL, Role.DECODE),
            features=("kv_events",),
        ),
        kv_compatibility_hash="same",
        block_size_tokens=shape.block_tokens,
        kv_blocks_total=shape.kv_blocks,
        profile=PerformanceProfile(
            prefill_base_s=speed.prefill_base_s,
            prefill_s_per_token=speed.prefill_s_per_token,
            prefill_s_per_token_pair=speed.prefill_s_per_token_pair or None,
            decode_step_base_s=speed.decode_step_base_s,
            decode_s_per_request=speed.decode_s_per_request,
            decode_s_per_kv_token=speed.decode_s_per_kv_token or None,
            kv_bytes_per_token=speed.kv_bytes_per_token,
            transfer_bytes_per_s=speed.transfer_bytes_per_s,
        ),
    )
