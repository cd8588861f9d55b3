"""Placement in a replay: by the router's core with one of its policies, or by an oracle that sees all caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bench.policies.dynamo_cost import DynamoCostPolicy
from bench.replay.engine import Job, ReplayEngine
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
from kvmesh.errors import OverloadedError
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.queue.admission import Queued

if TYPE_CHECKING:
    from bench.replay.mesh import Replay

FRONTEND = "replay"


class Waits(Exception):
    """The request waits in the router's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The workers of a request."""

    prefill: ReplayEngine | None
    decode: ReplayEngine


class Placer(Protocol):
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
    """Places with the router's core."""

    def __init__(self, replay: "Replay", policy: str, router_id: str = "replay") -> None:
        self._replay = replay
        self._engines = {engine.name: engine for engine in (*replay.prefills, *replay.decodes)}
        self._waiting: dict[int, Job] = {}
        self._sequences: dict[str, int] = {}
        is_dynamo = policy == "dynamo_cost"
        self.core = RouterCore(
            CoreSettings() if is_dynamo else CoreSettings(policy=policy),
            router_id=router_id,
            run_id=router_id,
            policy=DynamoCostPolicy if is_dynamo else None,
            generator=replay.random,
        )
        for engine in replay.prefills:
            self._join(engine, Role.PREFILL)
        for engine in replay.decodes:
            self._join(engine, Role.DECODE)

    def place(self, job: Job) -> Spot | None:
        size = self._replay.shape.engine.block_tokens
        ask = Ask(
            request_id=str(job.ask_id),
            model="replay",
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
            raise Waits
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
        feed = self.core.fleet.workers[engine.name].feed
        assert feed is not None
        feed.apply(KvBatch(epoch=1, sequence=self._sequences[engine.name], events=events))

    def on_load(self, engine: ReplayEngine) -> None:
        shape = self._replay.shape.engine
        free = engine.pool.available
        record = LoadRecord(
            worker_id=engine.name,
            epoch=1,
            sequence=engine.steps,
            taken_at_s=self._replay.now_s,
            step=engine.steps,
            running_requests=engine.running,
            waiting_requests=len(engine.waiting),
            waiting_prompt_tokens=engine.waiting_tokens,
            kv_blocks_used=shape.kv_blocks - free,
            kv_blocks_free=free,
            kv_blocks_total=shape.kv_blocks,
            running_requests_max=shape.running_max,
            step_s=engine.last_step_s,
            prompt_tokens_total=engine.computed_tokens,
            output_tokens_total=engine.output_tokens,
        )
        self.core.fleet.on_load_record(self.core.fleet.workers[engine.name], record)
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

    def _join(self, engine: ReplayEngine, role: Role) -> None:
        shape = self._replay.shape.engine
        worker = self.core.fleet.register(
            engine.name, address=f"{engine.name}:1", role=role, labels={}, is_critical=False, is_draining=False
        )
        description = WorkerDescription(
            worker=WorkerRef(worker_id=engine.name, address=f"{engine.name}:1", epoch=1),
            role=role,
            model=ModelCard(name="replay", source="replay", context_tokens_max=1 << 20, vocabulary_size=1000),
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
                prefill_base_s=shape.profile.base_s,
                prefill_s_per_token=shape.profile.per_prefill_token_s,
                decode_step_base_s=shape.profile.base_s,
                decode_s_per_request=shape.profile.per_decode_request_s,
                kv_bytes_per_token=shape.kv_bytes_per_token,
                transfer_bytes_per_s=shape.transfer_bytes_per_s,
            ),
        )
        self.core.fleet.describe(worker, description)
        assert worker.feed is not None
        worker.feed.apply(KvBatch(epoch=1, sequence=0, is_snapshot=True))
        self.core.fleet.connected(worker)
        self._sequences[engine.name] = 0


class OraclePlacer:
    """Places with perfect knowledge of all caches and queues; prompts being computed count as cached.

    It takes the worker that will finish the prompt first. It does not know the future.
    """

    def __init__(self, replay: "Replay") -> None:
        self._computing = replay.prefills or replay.decodes
        self._decodes = replay.decodes
        self._has_prefills = bool(replay.prefills)
        self._coming: dict[str, dict[int, int]] = {engine.name: {} for engine in self._computing}
        self._uncached: dict[int, int] = {}
        self._ahead: dict[str, int] = dict.fromkeys(self._coming, 0)

    def place(self, job: Job) -> Spot | None:
        uncached = {engine.name: self._uncached_tokens(engine, job) for engine in self._computing}
        best = min(self._computing, key=lambda engine: self._ahead[engine.name] + uncached[engine.name])
        self._uncached[job.ask_id] = uncached[best.name]
        self._ahead[best.name] += uncached[best.name]
        coming = self._coming[best.name]
        for name in job.names:
            coming[name] = coming.get(name, 0) + 1
        decode = min(self._decodes, key=lambda engine: engine.running + len(engine.waiting))
        return Spot(prefill=best, decode=decode) if self._has_prefills else Spot(prefill=None, decode=best)

    def on_events(self, engine: ReplayEngine, events: Sequence[KvEvent]) -> None:
        """Does nothing: the oracle sees the caches."""

    def on_load(self, engine: ReplayEngine) -> None:
        """Does nothing: the oracle sees the queues."""

    def on_prefilled(self, job: Job) -> None:
        """Counts the prompt as cached."""
        engine = job.prefill or job.decode
        uncached = self._uncached.pop(job.ask_id, None)
        if uncached is None or engine is None:
            return
        self._ahead[engine.name] -= uncached
        coming = self._coming[engine.name]
        for name in job.names:
            coming[name] -= 1
            if not coming[name]:
                del coming[name]

    def on_first_token(self, job: Job) -> None:
        """Counts the prompt as cached, without a prefill worker."""
        self.on_prefilled(job)

    def on_done(self, job: Job) -> None:
        """Does nothing: the oracle keeps no state."""

    def _uncached_tokens(self, engine: ReplayEngine, job: Job) -> int:
        held = len(engine.pool.match(job.names))
        coming = self._coming[engine.name]
        for name in job.names[held:]:
            if name not in coming:
                break
            held += 1
        return max(1, job.trace.prompt_tokens - held * self._size(engine))

    @staticmethod
    def _size(engine: ReplayEngine) -> int:
        return engine.shape.block_tokens
