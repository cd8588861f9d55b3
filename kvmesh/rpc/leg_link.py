"""The frontend's end of Attach on prefill and decode workers: one stream per worker, and one sink per leg for what comes back.

Protobuf step frames are read here directly, not through the codec: translating each frame into a value first costs more
than all the rest of the link (one list per frame is made, nothing per token).
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpc.aio import AioRpcError

from kvmesh.api.decode.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.clock import Clock, awake_timeout
from kvmesh.core import FinishReason, Leg, LegFinish, LegTask, Role, TokenLogprob, WorkerRef
from kvmesh.errors import (
    WORKER_UNREACHABLE,
    CancelledByCallerError,
    InternalError,
    InvalidRequestError,
    LostError,
    MeshError,
    OverloadedError,
    PermissionDeniedError,
    UnavailableError,
)
from kvmesh.event_log import event_logger
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.clients import LegLink, LegSink
from kvmesh.rpc.codec.legs import LEG_TASKS, fill_leg, from_finish
from kvmesh.rpc.codec.scalars import fill_positive_duration, from_duration
from kvmesh.rpc.codec.types import from_logprobs
from kvmesh.rpc.paced import DEFAULT_PACE_S, PacedWrites
from kvmesh.rpc.status import from_rpc_error

_log = event_logger(__name__)

SUBMISSIONS_PER_MESSAGE = 1024
RELEASES_PER_MESSAGE = 1024
MESSAGE_BYTES = 1 << 20
"""A message is closed once it is that large; long prompts in one message would reach gRPC's limit together."""
SUBMISSION_BYTES_MAX = 60 << 20
"""What fits gRPC's default limit of 64 MiB with some room."""
STUBS: Mapping[Role, Callable[[Any], Any]] = {Role.PREFILL: PrefillServiceStub, Role.DECODE: DecodeServiceStub}
SUSPECT_HEARTBEATS = 3
"""Heartbeats that may be missed before legs without a token start elsewhere. A leg with a constraint may be what keeps the worker from
sending, so it does not."""
SILENT_HEARTBEATS = 10
"""Heartbeats that may be missed before all legs count as lost. To continue a leg elsewhere its prompt and tokens are computed again, so a
worker that only stalls, on a busy machine or in a collection of garbage, gets more time."""
LINK_CLOSED, WORKER_CHANGED = "link_closed", "worker_changed"
REOPEN_PAUSE_S = 0.5
"""Between two attempts to open a lost link."""
REOPEN_TIMEOUT_S = 3.0
"""Longest try: as long as a try to connect. A shorter one would not survive a lost packet."""
UNWANTED_S = 10.0
"""A lost link that no request asked for in this time is not tried again before the next one does. Longer than any pause of a path."""


class GrpcLegLink:
    """One Attach stream. Made by GrpcLegLinks; it ends with the stream and is then replaced, never reopened.

    Invariants: 1. a slot is in `_sinks` exactly from submit until the worker's finish; 2. after the stream's end no slot is left;
    3. a leg that was given up as silent has the sink `_IGNORED` until then.
    """

    def __init__(
        self,
        worker: WorkerRef,
        call: Any,
        clock: Clock,
        *,
        pace_s: float = DEFAULT_PACE_S,
        on_lost: "Callable[[GrpcLegLink], None]" = lambda _: None,
        on_broken: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_broken` is called with the worker's id when the connection breaks. `on_lost` is called once with this link: when the worker
        becomes suspect, or when the link ends for another reason than `aclose`."""
        self.worker = worker
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._call = call
        self._clock = clock
        self._sinks: dict[int, LegSink] = {}
        self._kept: set[int] = set()
        """Slots whose legs stay on a suspect worker: those with tokens, and those with a constraint, which no other worker gets."""
        # A slot is the short name of a leg in step frames. A new leg may use it after the worker's finish of the earlier one.
        self._free_slots: list[int] = []
        self._slots_made = 0
        self._requests: deque[pb.AttachRequest] = deque()
        """Submissions that wait to be written, by the message in which they will be."""
        self._request_bytes = 0
        self._cancels: dict[int, None] = {}  # An ordered set of slots.
        self._releases: deque[str] = deque()
        self._writes = PacedWrites(call, pace_s=pace_s)
        self._heard_at_s = clock.now()
        self._suspected_s: float | None = None
        """Arrival of the newest frame when the worker last became suspect."""
        self._heartbeat_s = 1.0
        self._submissions_max = 0
        self.tasks: frozenset[LegTask] = frozenset()
        self.is_up = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that run. One that has ended would keep the link, by the traceback of its cancellation."""

    async def open(self, frontend_id: str, timeout_s: float) -> None:
        """Sends Hello and waits for the Welcome."""
        try:
            async with awake_timeout(timeout_s):
                await self._call.write(pb.AttachRequest(hello=pb.Hello(frontend_id=frontend_id)))
                response = await self._call.read()
        except (TimeoutError, AioRpcError, asyncio.InvalidStateError) as error:
            # grpc.aio raises InvalidStateError for a write on a call that has ended.
            self._call.cancel()
            raise self._unreachable(error) from error
        except BaseException:
            self._call.cancel()
            raise
        # `read` returns EOF, which is not a message, if the worker ends the stream.
        if not isinstance(response, pb.AttachResponse) or response.WhichOneof("kind") != "welcome":
            self._call.cancel()
            raise self._unreachable(None)
        if not self._is_meant(response.welcome):
            self._call.cancel()
            raise UnavailableError(
                "another worker answers at this address", reason=WORKER_CHANGED, where=self.worker.worker_id
            )
        # The minimum keeps `_watch` from becoming a busy loop if the worker sends 0.
        self._heartbeat_s = max(0.01, from_duration(response.welcome.heartbeat))
        self._submissions_max = response.welcome.submissions_max
        self.tasks = frozenset(LEG_TASKS[number] for number in response.welcome.tasks if number in LEG_TASKS)
        self._heard_at_s = self._clock.now()
        self.is_up = True
        name = self.worker.worker_id
        self._tasks = {
            asyncio.create_task(self._read(), name=f"leg-link-read-{name}"),
            asyncio.create_task(self._writes.run(self._take_request), name=f"leg-link-write-{name}"),
            asyncio.create_task(self._watch(), name=f"leg-link-watch-{name}"),
        }
        for task in self._tasks:
            task.add_done_callback(self._tasks.discard)

    @property
    def is_retired(self) -> bool:
        """True once the worker has missed heartbeats: it may stall, or the path to it may be cut. The link then only ends its legs."""
        return self._suspected_s is not None

    def _is_meant(self, welcome: pb.Welcome) -> bool:
        """Returns False if the worker has restarted or another worker uses its port. Epoch 0: unknown."""
        return welcome.worker_id == self.worker.worker_id and self.worker.epoch in (0, welcome.epoch)

    def _unreachable(self, error: BaseException | None) -> MeshError:
        if isinstance(error, AioRpcError):
            # Nothing was done yet, so whatever broke or stopped the stream can be tried elsewhere.
            mesh_error = from_rpc_error(error, where=self.worker.worker_id, has_begun=True)
            if not isinstance(mesh_error, LostError | CancelledByCallerError):
                return _not_the_clients(mesh_error, UnavailableError)
        return _unreachable(self.worker)

    def submit_nowait(self, leg: Leg, sink: LegSink, *, timeout_s: float) -> Callable[[], None]:
        """Queues a leg; see the protocol."""
        if not self.is_up or self.is_retired:
            raise UnavailableError("the link is down", reason=WORKER_UNREACHABLE, where=self.worker.worker_id)
        if len(self._sinks) >= self._submissions_max:
            raise OverloadedError(
                "too many requests on this link", reason="link_full", retry_after_s=1.0, where=self.worker.worker_id
            )
        # The slot stays free until `_add_submission` has returned, because that may refuse the leg.
        slot = self._free_slots[-1] if self._free_slots else self._slots_made
        self._add_submission(slot, leg, timeout_s)
        if self._free_slots:
            self._free_slots.pop()
        self._slots_made = max(self._slots_made, slot + 1)
        self._sinks[slot] = sink
        if leg.generation.sampling.constraint is not None:
            self._kept.add(slot)
        self._writes.wake()

        def cancel() -> None:
            # The leg may have finished, and another leg may use its slot.
            if self._sinks.get(slot) is sink:
                self._cancels[slot] = None
                self._writes.wake()

        return cancel

    def release_nowait(self, handle_id: str) -> None:
        """Gives a handle back; see the protocol."""
        if self.is_up:
            self._releases.append(handle_id)
            self._writes.wake()

    def _add_submission(self, slot: int, leg: Leg, timeout_s: float) -> None:
        """Adds to the next message, or to a new one if the next one is full."""
        requests = self._requests
        if (
            not requests
            or self._request_bytes >= MESSAGE_BYTES
            or len(requests[-1].submissions) == SUBMISSIONS_PER_MESSAGE
        ):
            requests.append(pb.AttachRequest())
            self._request_bytes = 0
        submission = requests[-1].submissions.add()
        try:
            submission.slot = slot
            fill_leg(submission.leg, leg)
            if not math.isinf(timeout_s):
                fill_positive_duration(submission.timeout, timeout_s)
        except BaseException:
            # A half of it would run on the worker, in a slot that the next leg gets, and end the stream with all its legs.
            del requests[-1].submissions[-1]
            raise
        size = submission.ByteSize()
        if size > SUBMISSION_BYTES_MAX:
            # gRPC would end the stream, and every other request on it, for one that is too large.
            del requests[-1].submissions[-1]
            raise InvalidRequestError(
                f"the request has {size} bytes; at most {SUBMISSION_BYTES_MAX} can be sent", reason="message_too_large"
            )
        self._request_bytes += size

    def _take_request(self) -> pb.AttachRequest:
        """Returns the next message. Cancels travel with the last submissions, never before the one that they cancel."""
        request = self._requests.popleft() if self._requests else pb.AttachRequest()
        for _ in range(min(len(self._releases), RELEASES_PER_MESSAGE)):
            request.releases.append(self._releases.popleft())
        if not self._requests:
            request.cancels.extend(self._cancels)
            self._cancels.clear()
        # PacedWrites writes one message per wake.
        if self._requests or self._releases:
            self._writes.wake()
        return request

    async def _read(self) -> None:
        error: MeshError = LostError("the worker ended the stream", reason="stream_ended", where=self.worker.worker_id)
        try:
            while isinstance(response := await self._call.read(), pb.AttachResponse):
                self._heard_at_s = self._clock.now()
                self._on_frame(response.frame)
        except AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, where=self.worker.worker_id, has_begun=True)
            error = _not_the_clients(error, LostError)
        except (InvalidRequestError, ValueError, IndexError) as problem:
            # A malformed frame: the codec refuses a value, or arrays differ in length (`strict`).
            _log.error("frame_refused", worker_id=self.worker.worker_id, detail=str(problem))
            error = InternalError("the worker sent a frame that cannot be read", where=self.worker.worker_id)
        finally:
            self._on_end(error)

    def _on_frame(self, frame: pb.StepFrame) -> None:
        # The order that LegSink promises: the prompt, then tokens, then the finish.
        for entry in frame.prompt_logprobs:
            if (owner := self._sinks.get(entry.slot)) is not None:
                owner.on_prompt(from_logprobs(entry.logprobs))
        if frame.slots:
            self._on_tokens(frame)
        for message in frame.finishes:
            sink = self._sinks.pop(message.slot, None)
            if sink is not None:
                self._free_slots.append(message.slot)
                self._kept.discard(message.slot)
                # A cancel that crossed with this must not meet the next leg on the slot.
                self._cancels.pop(message.slot, None)
                sink.on_finish(from_finish(message))

    def _on_tokens(self, frame: pb.StepFrame) -> None:
        sinks, came_s = self._sinks, self._heard_at_s
        # A slice is copied by the protobuf library; an iterator would ask it once per number.
        slots, token_ids = frame.slots[:], frame.token_ids[:]
        self._kept.update(slots)
        # The common frame has one token per slot and no log-probabilities.
        if not frame.counts and not frame.logprobs:
            for slot, token_id in zip(slots, token_ids, strict=True):
                if (sink := sinks.get(slot)) is not None:
                    sink.on_tokens((token_id,), None, came_s)
            return
        logprobs = {entry.slot: from_logprobs(entry.logprobs) for entry in frame.logprobs}
        counts = list(frame.counts) or [1] * len(slots)
        start = 0
        for slot, count in zip(slots, counts, strict=True):
            if (sink := sinks.get(slot)) is not None:
                sink.on_tokens(token_ids[start : start + count], logprobs.get(slot), came_s)
            start += count
        if start != len(token_ids):
            raise ValueError(f"{len(token_ids)} token ids for {start} places")

    def _on_end(self, error: MeshError) -> None:
        """Ends every leg as lost: a worker that went away took its work with it, whatever the status of the stream."""
        # The reader that the first call cancels calls again.
        if not self.is_up:
            return
        self.is_up = False
        self._call.cancel()
        self._requests.clear()
        self._cancels.clear()
        self._releases.clear()
        lost = LostError(error.message, reason=error.reason, where=self.worker.worker_id)
        # The reason of a broken connection (see `from_rpc_error`): the worker may have died.
        if error.reason == LostError.default_reason:
            self._on_broken(self.worker.worker_id)
        # Replaced before the calls: a sink that cancels its leg in `on_finish` must not find its slot.
        sinks, self._sinks = self._sinks, {}
        self._kept.clear()
        for sink in sinks.values():
            sink.on_finish(LegFinish(reason=FinishReason.ERROR, error=lost))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if error.reason != LINK_CLOSED and not self.is_retired:
            self._on_lost(self)

    async def _watch(self) -> None:
        # A retired link has done its work when only legs that were given up are left.
        while not (self.is_retired and all(sink is _IGNORED for sink in self._sinks.values())):
            # True if no frame arrived since the worker became suspect. After a frame the worker is not suspect, but the link stays retired.
            is_suspect = self._suspected_s == self._heard_at_s
            limit_s = (SILENT_HEARTBEATS if is_suspect else SUSPECT_HEARTBEATS) * self._heartbeat_s
            left_s = self._heard_at_s + limit_s - self._clock.now()
            if left_s > 0:
                # Wakes earlier than the longer limit of a suspect: if a frame arrives meanwhile, the shorter limit counts again.
                await self._sleep(sleep_s=min(left_s, SUSPECT_HEARTBEATS * self._heartbeat_s), limit_s=limit_s)
            elif is_suspect:
                break
            else:
                self._suspect()
        self._on_end(self._silent())

    async def _sleep(self, sleep_s: float, limit_s: float) -> None:
        due_s = self._clock.now() + sleep_s
        await self._clock.sleep(sleep_s)
        if self._clock.now() - due_s > self._heartbeat_s / 10:
            # This process was suspended, not the worker: frames that arrived in that time are unread. One more heartbeat shows it.
            self._heard_at_s = max(self._heard_at_s, self._clock.now() - limit_s + self._heartbeat_s)

    def _suspect(self) -> None:
        """Ends legs that have no token and no constraint as lost, and cancels them on the worker in case it only stalls."""
        was_retired, self._suspected_s = self.is_retired, self._heard_at_s
        for slot, sink in list(self._sinks.items()):
            if slot not in self._kept and sink is not _IGNORED:
                self._sinks[slot] = _IGNORED
                self._cancels[slot] = None
                sink.on_finish(LegFinish(reason=FinishReason.ERROR, error=self._silent()))
        self._writes.wake()
        if not was_retired:
            self._on_lost(self)

    def _silent(self) -> LostError:
        return LostError("the worker has gone silent", reason="worker_silent", where=self.worker.worker_id)

    async def aclose(self) -> None:
        """Ends the stream; legs on it fail as lost."""
        if self.is_up:
            self._on_end(LostError("the frontend closed the link", reason=LINK_CLOSED, where=self.worker.worker_id))
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _IgnoredSink:
    """For legs that were given up and whose finish is still to come."""

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        """Nothing to do."""

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Nothing to do."""

    def on_finish(self, finish: LegFinish) -> None:
        """Nothing to do."""


_IGNORED = _IgnoredSink()
_LinkKey = tuple[str, Role, int]


class GrpcLegLinks:
    """Implements `kvmesh.rpc.clients.LegLinks`: at most one open link per worker, role and epoch.

    A link that was lost, or could not be opened, is opened again in the background while requests need it. So a request does not wait for
    a connection over a cut path, and the link returns soon after the path works again. The old link stays until its legs have ended, in
    case the worker only stalled.
    """

    def __init__(
        self,
        channels: ChannelPool,
        *,
        frontend_id: str,
        clock: Clock,
        pace_s: float = DEFAULT_PACE_S,
        on_broken: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_broken` is called with the id of each worker whose connection breaks, also if no leg was on it."""
        self._channels = channels
        self._pace_s = pace_s
        self._on_broken = on_broken
        self._frontend_id = frontend_id
        self._clock = clock
        self._links: dict[tuple[str, Role], GrpcLegLink] = {}
        self._retired: list[GrpcLegLink] = []
        self._opening: dict[_LinkKey, asyncio.Task[GrpcLegLink]] = {}
        self._reopening: dict[_LinkKey, asyncio.Task[None]] = {}
        self._wanted_s: dict[_LinkKey, float] = {}
        """When a request last asked for each link that is being reopened."""
        self._is_closed = False

    async def link(self, worker: WorkerRef, role: Role, *, timeout_s: float, waits_for_lost: bool = True) -> LegLink:
        """Returns the open link or a new one; see the protocol. All callers that wait for one worker share one attempt."""
        link = self._links.get((worker.address, role))
        if link is not None and link.is_up and link.worker.epoch == worker.epoch:
            return link
        if self._is_closed:
            raise UnavailableError("the links are closed", reason="links_closed")
        key = (worker.address, role, worker.epoch)
        if key in self._reopening:
            self._wanted_s[key] = self._clock.now()
            if not waits_for_lost:
                raise _unreachable(worker)
        return await self._join(key, worker, role, timeout_s=timeout_s)

    async def _join(self, key: _LinkKey, worker: WorkerRef, role: Role, *, timeout_s: float) -> GrpcLegLink:
        opening = self._opening.get(key)
        if opening is None:
            opening = asyncio.create_task(self._open(worker, role, timeout_s), name=f"leg-link-open-{worker.worker_id}")
            self._opening[key] = opening
            opening.add_done_callback(lambda task: self._opened(key, worker, task))
        try:
            # Not cancelled with its first caller: others may wait for it, and its own timeout bounds it.
            async with awake_timeout(timeout_s):
                return await asyncio.shield(opening)
        except TimeoutError:
            raise _unreachable(worker) from None
        finally:
            # The error's traceback has this frame, and the task has the error: a reference cycle for each attempt to reach an unreachable
            # worker.
            del opening

    def _reopen_soon(self, key: _LinkKey, worker: WorkerRef, *, pause_s: float = 0.0) -> None:
        if self._is_closed or key in self._reopening:
            return
        self._wanted_s[key] = self._clock.now()
        reopening = asyncio.create_task(self._reopen(key, worker, pause_s), name=f"leg-link-reopen-{worker.worker_id}")
        self._reopening[key] = reopening
        reopening.add_done_callback(lambda _: self._reopened(key))

    def _on_lost(self, link: GrpcLegLink, role: Role) -> None:
        worker = link.worker
        if self._links.get((worker.address, role)) is link:
            del self._links[(worker.address, role)]
        self._retired = [each for each in (*self._retired, link) if each.is_up]
        self._reopen_soon((worker.address, role, worker.epoch), worker)

    async def _reopen(self, key: _LinkKey, worker: WorkerRef, pause_s: float) -> None:
        while self._clock.now() - self._wanted_s[key] < UNWANTED_S:
            await self._clock.sleep(pause_s)
            pause_s = REOPEN_PAUSE_S
            try:
                await self._join(key, worker, key[1], timeout_s=REOPEN_TIMEOUT_S)
            except MeshError as error:
                if error.reason == WORKER_CHANGED:
                    return
            else:
                return

    def _reopened(self, key: _LinkKey) -> None:
        del self._reopening[key], self._wanted_s[key]

    async def _open(self, worker: WorkerRef, role: Role, timeout_s: float) -> GrpcLegLink:
        stub = STUBS[role](self._channels.channel(worker.address, MeshRole(role.value)))
        link = GrpcLegLink(
            worker,
            stub.Attach(),
            self._clock,
            pace_s=self._pace_s,
            on_lost=partial(self._on_lost, role=role),
            on_broken=self._on_broken,
        )
        await link.open(self._frontend_id, timeout_s)
        # A link to an earlier process at this address, or one that has ended.
        replaced = self._links.get((worker.address, role))
        self._links[(worker.address, role)] = link
        if replaced is not None:
            await replaced.aclose()
        return link

    def _opened(self, key: _LinkKey, worker: WorkerRef, task: "asyncio.Task[GrpcLegLink]") -> None:
        del self._opening[key]
        if not task.cancelled():
            error = task.exception()  # Marks the error as retrieved, even if every caller was cancelled.
            if isinstance(error, UnavailableError) and error.reason != WORKER_CHANGED:
                self._reopen_soon(key, worker, pause_s=REOPEN_PAUSE_S)
        # Restarted workers have new ports, so dead entries would accumulate.
        self._links = {address: link for address, link in self._links.items() if link.is_up}

    def statistics(self) -> dict[str, int]:
        return {link.worker.worker_id: len(link._sinks) for link in self._links.values() if link.is_up}

    async def aclose(self) -> None:
        self._is_closed = True
        waiting = [*self._reopening.values(), *self._opening.values()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        links, self._links, self._retired = [*self._links.values(), *self._retired], {}, []
        for link in links:
            await link.aclose()


def _unreachable(worker: WorkerRef) -> UnavailableError:
    return UnavailableError("the worker cannot be reached", reason=WORKER_UNREACHABLE, where=worker.worker_id)


def _not_the_clients(error: MeshError, instead: type[MeshError]) -> MeshError:
    """Returns a worker that refuses the frontend itself: clients must not take it for a refusal of theirs, and another worker may accept it."""
    if not isinstance(error, PermissionDeniedError):
        return error
    _log.warning("worker_refuses_calls", worker_id=error.where, reason=error.reason)
    return instead("the worker does not accept calls of this frontend", reason=error.reason, where=error.where)
