"""One engine as a member of the mesh: slots, leases, drain, KV and load feeds. Prefill and decode services share it."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvmesh.clock import Clock
from kvmesh.core import FinishReason, KvEvent, KvHandle, KvReader, Leg, LoadRecord, TokenLogprob
from kvmesh.engines.base import Engine, EngineDescription, EngineFinish, EngineRequest, StepOutput
from kvmesh.errors import (
    ENGINE_WEDGED,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.event_log import event_logger
from kvmesh.kv.lease import LeaseTable
from kvmesh.kv.seals import HandleSeals, SealScope
from kvmesh.telemetry import Span, TelemetrySettings, Tracing, fail_span
from kvmesh.worker.cancel_watch import CancelWatch
from kvmesh.worker.kv_batcher import KvEventBatcher
from kvmesh.worker.kv_feed import KvEventFeed
from kvmesh.worker.load_signal import LoadSignal
from kvmesh.worker.settings import WorkerSettings
from kvmesh.worker.slots import SLOT_BITS, SLOTS_MAX, LegRecord, LegTable, LinkStep, key_of, split_by_link

_log = event_logger(__name__)

HANDLES_POLL_S = 0.05
"""Engines do not report the end of a lease."""
SWEEPS_LATE = 2.0
"""Part of a sweep's interval that counts at most, so that a suspended process does not count as time of its engine."""
LAST_STEPS_S = 1.0
"""Longest wait for the engine's last finishes when closing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """The worker's identity. `address` is host:port of its gRPC server; `epoch` is new for every process."""

    worker_id: str
    epoch: int
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """A snapshot of the worker's own bookkeeping; the engine's is in its LoadRecord."""

    legs: int
    links: int
    kv_watchers: int
    leases: int
    unanswered_cancels: int
    is_draining: bool
    kv_blocks_announced: int


class Outlet(Protocol):
    """Receives the steps of one link. Its methods run in the step loop and must not block."""

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """Takes one step's tokens and finishes for the link. `logprobs` is keyed by engine key."""
        ...

    def on_lost(self, error: MeshError) -> None:
        """Called once, after the last step, when the engine has died or the worker stops."""
        ...


class CallerLink:
    """One caller's slots on the worker. Closing it cancels the caller's legs."""

    def __init__(self, worker: "Worker", *, number: int, outlet: Outlet, legs_max: int | None = None) -> None:
        self._worker = worker
        self.number = number
        self.outlet = outlet
        self.legs_max = legs_max

    def submit_nowait(self, slot: int, leg: Leg, timeout_s: float | None = None) -> None:
        """Accepts a leg on a free slot or raises; see `Engine.submit_nowait`, plus OverloadedError and UnavailableError of the
        worker. `timeout_s` None: the worker's own limit."""
        self._worker.submit_nowait(link=self.number, slot=slot, leg=leg, timeout_s=timeout_s)

    def cancel_nowait(self, slot: int) -> None:
        """Stops a leg; its finish follows. Unknown slots are ignored."""
        self._worker.cancel_nowait(key_of(self.number, slot=slot))

    def has_leg(self, slot: int) -> bool:
        """Returns True until the finish of the slot's leg was delivered."""
        return self._worker.has_leg(key_of(self.number, slot=slot))

    def close_nowait(self) -> None:
        """Cancels all legs and drops later steps. Idempotent."""
        self._worker.close_link_nowait(self.number)


class Worker:
    """Owns the engine and the state of its legs.

    Call `start` first; `run` returns when the engine dies. All methods run on one event loop.

    1. The link of an accepted leg receives exactly one finish for it or one `on_lost`, unless the link was closed.
    2. A handle is delivered to a link or released immediately. No handle waits for its lease to expire because no link received it.
    3. Once the engine is dead or the worker stops, `ended` is set, watches end, and legs are refused.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        identity: WorkerIdentity,
        settings: WorkerSettings,
        clock: Clock,
        tracing: Tracing | None = None,
        seals: HandleSeals | None = None,
    ) -> None:
        self.engine = engine
        self._seals = seals
        self._tracing = tracing or Tracing(TelemetrySettings(), service="worker")
        self._spans: dict[int, Span] = {}
        self.identity = identity
        self.settings = settings
        self._clock = clock
        self._legs = LegTable()
        self._leases = LeaseTable()
        self._cancels = CancelWatch(limit_s=settings.cancel_timeout_s, sweep_s_max=SWEEPS_LATE * settings.lease_check_s)
        self._links: dict[int, CallerLink] = {}
        self._next_link = 0
        self._draining = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: MeshError | None = None
        self.ended = asyncio.Event()
        """Set when the engine is dead or the worker stops: streams that are served from here end."""
        self._end: MeshError | None = None
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_sequence = 0
        self.load_signal = LoadSignal()
        """Notifies watchers when the load has changed."""
        self.kv_feed = KvEventFeed(epoch=identity.epoch)
        self._kv_batcher = KvEventBatcher(self._publish_kv)

    async def start(self) -> None:
        """Loads the engine and starts reading from it."""
        await self.engine.start()
        if self.description.removes_kv_from_ends:
            self.kv_feed.expect_whole_runs()
        self._tasks = [
            asyncio.create_task(self._supervised(self._read_steps()), name="worker-steps"),
            asyncio.create_task(self._supervised(self._read_kv_events()), name="worker-kv-events"),
            asyncio.create_task(self._supervised(self._sweep()), name="worker-sweep"),
        ]

    async def _supervised(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the worker's loops. An unexpected exception ends the worker, since legs would hang without the loop."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  # Logged; it ends the worker.
            _log.error("worker_loop_failed", exc_info=error)
            self._on_defect(error)

    def _on_defect(self, error: Exception) -> None:
        self._on_lost(InternalError(f"{type(error).__name__} in a loop of the worker", reason="worker_defect"))

    @property
    def description(self) -> EngineDescription:
        return self.engine.describe()

    @property
    def is_draining(self) -> bool:
        """True while new legs are refused."""
        return bool(self._draining)

    @property
    def legs(self) -> int:
        """How many are in the engine."""
        return len(self._legs)

    def open_link(self, outlet: Outlet, legs_max: int | None = None) -> CallerLink:
        """Opens a link with slots of its own and at most `legs_max` legs at a time. Calls `on_lost` now if `ended` is set."""
        link = CallerLink(self, number=self._next_link, outlet=outlet, legs_max=legs_max)
        # `_end_streams` has reached only the links that were open then.
        if self._end is not None:
            outlet.on_lost(self._end)
        self._links[link.number] = link
        self._next_link += 1
        return link

    def submit_nowait(self, *, link: int, slot: int, leg: Leg, timeout_s: float | None) -> None:
        """Checks a leg and submits it to the engine. A refused leg leaves no state."""
        self._check_open()
        self._check_link(link)
        self._check_leg(link, slot=slot, leg=leg)
        life_s = self._life_s(timeout_s)
        key = key_of(link, slot=slot)
        # After the worker's other checks, because it uses the handle's seal up.
        scope = self._check_seal(leg)
        self.engine.submit_nowait(
            EngineRequest(
                key=key,
                leg_id=leg.leg_id,
                task=leg.task,
                generation=leg.generation,
                handle=leg.handle,
                rendezvous=leg.rendezvous,
                dimensions=leg.dimensions,
            )
        )
        self._legs.add(key, LegRecord(leg_id=leg.leg_id, deadline_s=self._clock.now() + life_s, scope=scope))
        self._idle.clear()
        self.load_signal.notify()
        if self._tracing.is_on:
            self._spans[key] = self._tracing.start_span(
                f"{leg.task.value} leg",
                parent=leg.generation.traceparent,
                attributes={"kvmesh.leg_id": leg.leg_id, "kvmesh.worker_id": self.identity.worker_id},
            )

    def _check_open(self) -> None:
        if self._lost is not None:
            raise UnavailableError("the engine has died", reason="engine_lost", where=self.identity.worker_id)
        if self._draining:
            raise UnavailableError("the worker is draining", reason="draining", where=self.identity.worker_id)
        if len(self._legs) >= self.settings.legs_max:
            raise OverloadedError(
                f"the worker already has {len(self._legs)} requests",
                reason="worker_full",
                retry_after_s=1.0,
                where=self.identity.worker_id,
            )

    def _check_link(self, number: int) -> None:
        link = self._links.get(number)
        if link is None:
            raise UnavailableError("the link is closed", reason="link_closed", where=self.identity.worker_id)
        if link.legs_max is not None and self._legs.count_of_link(number) >= link.legs_max:
            raise OverloadedError(
                f"{link.legs_max} requests are in flight on this stream already",
                reason="link_full",
                retry_after_s=1.0,
                where=self.identity.worker_id,
            )

    def _life_s(self, timeout_s: float | None) -> float:
        """Returns the seconds that a leg may run. `timeout_s` 0 is a deadline that has passed; None means that there is none."""
        if timeout_s is None:
            return self.settings.request_timeout_s
        if timeout_s <= 0:
            raise DeadlineError("the request's deadline has passed", where=self.identity.worker_id)
        return min(timeout_s, self.settings.request_timeout_s)

    def _check_leg(self, link: int, slot: int, leg: Leg) -> None:
        """Checks model, slot and id. The engine checks the generation."""
        model = self.description.model
        if leg.generation.model != model.name:
            raise NotFoundError(f"this worker serves {model.name}", reason="model_not_found", field="generation.model")
        if not 0 <= slot < SLOTS_MAX:
            raise InvalidRequestError("slot must be below 2^31", field="slot")
        if self._legs.get(key_of(link, slot=slot)) is not None:
            raise InvalidRequestError(f"slot {slot} is in use", field="slot", reason="slot_in_use")
        if self._legs.has_leg_id(leg.leg_id):
            raise InvalidRequestError("a leg with this id is already running", field="leg_id", reason="leg_id_in_use")

    def _check_seal(self, leg: Leg) -> SealScope | None:
        """Uses the handle that a leg brings. KvLostError when it is not sealed for it. Returns whom the leg's own handle is for."""
        if self._seals is None:
            return None
        if leg.handle is not None:
            reader = KvReader(worker_id=self.identity.worker_id, leg_id=leg.leg_id)
            self._seals.use(leg.handle, SealScope.of(reader, leg.generation))
        return SealScope.of(leg.reader, leg.generation) if leg.reader is not None else None

    def has_leg(self, key: int) -> bool:
        """Returns True until the engine has finished the leg."""
        return self._legs.get(key) is not None

    def cancel_nowait(self, key: int) -> None:
        """Stops a leg. If it produces a handle before it stops, the handle is released."""
        if (record := self._legs.get(key)) is not None:
            record.is_cancelled = True
            self._cancel(key)

    def _cancel(self, key: int) -> None:
        self._cancels.add(key)
        self.engine.cancel_nowait(key)

    def close_link_nowait(self, number: int) -> None:
        """Cancels a link's legs and drops their finishes."""
        if self._links.pop(number, None) is None:
            return
        for key in self._legs.keys_of_link(number):
            self._cancel(key)

    def release_nowait(self, handle_id: str) -> bool:
        self._leases.remove(handle_id)
        return self.engine.release_nowait(handle_id)

    def release_leg_nowait(self, leg_id: str) -> bool:
        """Ends a leg whose finish its caller did not receive: cancels it, or releases the handle that it made. False: there is neither."""
        if (key := self._legs.key_of_leg_id(leg_id)) is not None:
            self.cancel_nowait(key)
            return True
        handle_id = self._leases.handle_of(leg_id)
        return handle_id is not None and self.release_nowait(handle_id)

    def lease_left_s(self, handle: KvHandle | None) -> float:
        """Returns the remaining lease time of a handle, which has become shorter since the engine made it. 0: there is no lease."""
        expires_at_s = None if handle is None else self._leases.expires_at_s(handle.handle_id)
        return 0.0 if expires_at_s is None else max(0.0, expires_at_s - self._clock.now())

    async def _read_steps(self) -> None:
        try:
            await self.engine.deliver(self._on_step)
        except MeshError as error:
            self._on_lost(error)
        else:
            self._on_lost(LostError("the engine was closed", reason="engine_closed"))

    def _on_step(self, output: StepOutput) -> None:
        # Before `_complete` removes the legs: the share of a link's last leg must still find its link.
        links = self._legs.links()
        if output.finishes:
            output = replace(output, finishes=[self._complete(finish) for finish in output.finishes])
        for number, share in split_by_link(output, links).items():
            link = self._links.get(number)
            if link is not None:
                link.outlet.on_step(output.step, share, output.logprobs)
        self.load_signal.notify()

    def _complete(self, finish: EngineFinish) -> EngineFinish:
        record = self._legs.remove(finish.key)
        self._cancels.remove(finish.key)
        self._end_span(finish)
        if not len(self._legs):
            self._idle.set()
        failure = record.failure if record is not None else None
        is_wanted = failure is None and not (record is not None and record.is_cancelled)
        if finish.handle is not None:
            finish = (
                self._lease_handle(finish, finish.handle, record)
                if is_wanted
                else self._discard_handle(finish, finish.handle)
            )
        if failure is not None:
            return replace(finish, reason=FinishReason.ERROR, error=failure)
        return finish

    def _end_span(self, finish: EngineFinish) -> None:
        span = self._spans.pop(finish.key, None)
        if span is None:
            return
        span.set_attribute("gen_ai.response.finish_reasons", [finish.reason.value])
        span.set_attribute("gen_ai.usage.output_tokens", finish.usage.output_tokens)
        span.set_attribute("kvmesh.queue_s", finish.queue_s)
        if finish.error is not None:
            fail_span(span, finish.error.reason)
        span.end()

    def _lease_handle(self, finish: EngineFinish, handle: KvHandle, record: LegRecord | None) -> EngineFinish:
        handle = replace(handle, worker_id=self.identity.worker_id, worker_epoch=self.identity.epoch)
        if self._seals is not None and record is not None and record.scope is not None:
            handle = self._seals.seal(handle, record.scope)
        leg_id = record.leg_id if record is not None else ""
        self._leases.add(handle.handle_id, self._clock.now() + handle.lease_s, leg_id=leg_id)
        # The link was closed and the cancel came too late: no caller receives the handle (invariant 2).
        if finish.key >> SLOT_BITS not in self._links:
            self.release_nowait(handle.handle_id)
        return replace(finish, handle=handle)

    def _discard_handle(self, finish: EngineFinish, handle: KvHandle) -> EngineFinish:
        """Releases the handle of a leg that was cancelled while the engine made it."""
        self.engine.release_nowait(handle.handle_id)
        return replace(finish, reason=FinishReason.CANCELLED, handle=None)

    def _on_lost(self, error: MeshError) -> None:
        if self._lost is not None:
            return
        self._lost = LostError(error.message, reason=error.reason, where=self.identity.worker_id)
        if not self._is_closing:
            _log.error("engine_lost", reason=error.reason, detail=error.message)
        self._end_streams(self._lost)
        # A dead engine sends no finishes, so nothing else would remove these legs.
        self._legs.clear()
        self._cancels.clear()
        self._idle.set()

    def _end_streams(self, error: MeshError) -> None:
        """Ends all streams. gRPC's server would otherwise wait its whole grace period for them."""
        self._end = error
        self.ended.set()
        self.load_signal.notify_all()
        self._kv_batcher.flush_nowait()
        self.kv_feed.close_nowait(UnavailableError(error.message, reason=error.reason, where=self.identity.worker_id))
        for link in list(self._links.values()):
            link.outlet.on_lost(error)

    def stop_nowait(self) -> None:
        """Ends all streams, and legs in flight as lost. `aclose` closes the engine."""
        self._is_closing = True
        self.set_draining(True, "stopping")
        stopping = LostError("the worker is stopping", reason="worker_stopping", where=self.identity.worker_id)
        for key in self._legs.all_keys():
            self._fail(key, stopping)
        self._end_streams(self._lost or stopping)

    async def _read_kv_events(self) -> None:
        async with aclosing(self.engine.kv_events()) as batches:  # type: ignore[type-var]
            async for events in batches:
                self._kv_batcher.put_nowait(events)

    def _publish_kv(self, events: Sequence[KvEvent]) -> None:
        """Runs in a timer callback, so it must handle its errors: routers would otherwise use a stale view of the cache."""
        try:
            self.kv_feed.append_nowait(events)
        except Exception as error:  # noqa: BLE001  # Logged; it ends the worker.
            _log.error("worker_loop_failed", exc_info=error)
            self._on_defect(error)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self.settings.lease_check_s)
            now_s = self._clock.now()
            for handle_id in self._leases.collect_expired(now_s):
                self.engine.release_nowait(handle_id)
            for key in self._legs.collect_overdue(now_s):
                self._fail(key, DeadlineError("the request's deadline has passed", where=self.identity.worker_id))
            if wedged := self._cancels.sweep(now_s):
                _log.error("engine_wedged", cancelled_legs=wedged)
                limit_s = self.settings.cancel_timeout_s
                self._on_lost(
                    LostError(
                        f"the engine did not end {wedged} cancelled legs within {limit_s:g} s", reason=ENGINE_WEDGED
                    )
                )

    def _fail(self, key: int, error: MeshError) -> None:
        record = self._legs.get(key)
        if record is not None and record.failure is None:
            record.failure = error
            self._cancel(key)

    def set_draining(self, is_draining: bool, reason: str = "draining") -> None:
        """Refuses new legs, or accepts them again. A worker that stops never accepts again."""
        self._draining = reason if is_draining or self._is_closing else ""
        self.load_signal.notify()

    async def wait_idle(self) -> None:
        """Waits until no leg is in the engine."""
        await self._idle.wait()

    async def run(self) -> None:
        """Waits until the engine ends. Raises the cause, unless `aclose` ended it."""
        await self.ended.wait()
        if self._lost is not None and not self._is_closing:
            raise self._lost

    async def drain(self, timeout_s: float | None = None) -> int:
        """Refuses new legs and waits for those in flight. Returns the number left after `timeout_s`."""
        self.set_draining(True)
        limit_s = self.settings.drain_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.wait_idle()
        except TimeoutError:
            pass
        return len(self._legs)

    async def wait_handles_gone(self) -> None:
        """Waits until every handle was pulled, released or has expired; at most as long as a lease.

        A worker that stops before that makes decode workers compute the prompts again.
        """
        ends_s = self._clock.now() + self.description.lease_s
        while self.engine.leased_handles() and self._clock.now() < ends_s and not self.ended.is_set():
            await self._clock.sleep(HANDLES_POLL_S)

    def load_record(self, load: LoadRecord) -> LoadRecord:
        """Returns a rank's load with the worker's identity. Each call increments the sequence."""
        self._load_sequence += 1
        return replace(
            load,
            worker_id=self.identity.worker_id,
            epoch=self.identity.epoch,
            sequence=self._load_sequence,
            taken_at_s=self._clock.wall(),
            is_draining=self.is_draining,
        )

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(
            legs=len(self._legs),
            links=len(self._links),
            kv_watchers=self.kv_feed.watchers_count(),
            leases=self.engine.leased_handles(),
            unanswered_cancels=len(self._cancels),
            is_draining=self.is_draining,
            kv_blocks_announced=self.kv_feed.blocks_count(),
        )

    async def aclose(self) -> None:
        """Fails legs in flight as lost, frees leased KV, closes the engine. Idempotent."""
        self.stop_nowait()
        for handle_id in self._leases.handle_ids():
            self.release_nowait(handle_id)
        await self.engine.aclose()
        if self._tasks:
            # Delivers the engine's last finishes.
            await asyncio.wait(self._tasks[:1], timeout=LAST_STEPS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
