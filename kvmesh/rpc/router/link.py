"""The frontend's end of RouterService.Route: streams to `routers` of the routers, each replaced when it breaks.

1. Asks are numbered once for the life of the link, whichever router is asked: those of a session always the same one, as long as
   the same ones are there; others in turns. An ask that was not answered when its stream broke is asked at once on another stream,
   or on the next one, as long as its own time lasts.
2. A router that for `answer_timeout_s` neither answers an ask nor says that it waits in its queue counts as hung: its stream is
   given up. An ask that waits there has all of its own time, not only that of placing.
3. Reports go to the router that placed. When that stream breaks, the link has another router adopt what is in flight, and
   reports there, naming the reservation. Without any stream, both wait for the next one.

Which routers those are is the matter of `router/streams.py`.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.clock import WAKING_S, Clock, stood_still
from kvmesh.core import Ask, Placement, Report, ReportKind
from kvmesh.core.routing import PREFILLED, PROGRESS, SETTLING
from kvmesh.discovery.base import Registry
from kvmesh.errors import DeadlineError, InvalidRequestError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import from_placement
from kvmesh.rpc.router.ranking import rank
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import RouterStream
from kvmesh.rpc.router.streams import RouterStreams
from kvmesh.rpc.status import from_detail

log = logging.getLogger(__name__)
TOLD_TIME_S = 0.001
"""Of an ask's time less is not told."""


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask without an answer, and the stream it was written to last; None: it waits for one.

    `queued_s` is when the router of that stream said last that it waits; None: it did not. `timer` looks at it again; `is_late`:
    its time was over before an answer came. `asleep_s`: how much of its time this process stood still, which does not count as
    the routers' silence.
    """

    ask: Ask
    answer: asyncio.Future[Placement]
    began_s: float
    stream: RouterStream | None = None
    queued_s: float | None = None
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False
    asleep_s: float = 0.0


@dataclass(slots=True, eq=False)
class _InFlight:
    """A placed request. `is_moved`: another router than the one that placed it is told of it."""

    stream: RouterStream
    reservation_id: str
    prefilled_after_s: float | None = None
    is_moved: bool = False


class GrpcRouterLink:
    """Implements `kvmesh.rpc.clients.RouterLink`. A running part: `run` keeps the streams, `aclose` ends them."""

    def __init__(
        self,
        registry: Registry,
        channels: Channels,
        *,
        frontend_id: str,
        clock: Clock,
        generator: Random,
        settings: RouterLinkSettings | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings or RouterLinkSettings()
        self._streams = RouterStreams(
            registry,
            channels,
            frontend_id=frontend_id,
            clock=clock,
            generator=generator,
            settings=self._settings,
            listener=self,
        )
        self._pending: dict[int, _Pending] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._unsent: list[tuple[int, Report]] = []
        self._asks = 0
        self._turns = 0
        self._running: asyncio.Task[None] | None = None
        self.reports_dropped = 0

    @property
    def is_up(self) -> bool:
        """True while a stream stands."""
        return bool(self._streams.standing)

    @property
    def router_ids(self) -> Sequence[str]:
        return tuple(self._streams.standing)

    @property
    def router_id(self) -> str:
        """The router in use for longest; empty without one."""
        return next(iter(self._streams.standing), "")

    @property
    def messages_sent(self) -> int:
        """Messages written to all routers since the start."""
        return self._streams.messages_sent

    @property
    def streams_broken(self) -> int:
        """Streams that ended otherwise than by moving."""
        return self._streams.broken

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """Asks for a placement; see the protocol."""
        if len(self._pending) >= self._settings.messages_max:
            raise OverloadedError("too many asks wait for the router", reason="router_link_full", retry_after_s=1.0)
        self._asks += 1
        ask_id = self._asks
        answer = asyncio.get_running_loop().create_future()
        pending = self._pending[ask_id] = _Pending(ask, answer, self._clock.now())
        self._send_ask(ask_id, pending)
        try:
            return Placed(ask_id=ask_id, placement=await self._answer(pending, timeout_s))
        except BaseException:
            # Cancelled or out of time: a router that places it after all must not keep the reservation.
            if ask_id in self._in_flight:
                self.report_nowait(ask_id, ReportKind.CANCELLED, elapsed_s=0.0)
            elif pending.is_late or pending.answer.cancelled():
                self._withdraw(ask_id, pending)
            raise
        finally:
            self._pending.pop(ask_id, None)

    async def _answer(self, pending: _Pending, timeout_s: float) -> Placement:
        self._set_timer(pending, timeout_s)
        try:
            return await pending.answer
        finally:
            if pending.timer is not None:
                pending.timer.cancel()

    def _set_timer(self, pending: _Pending, timeout_s: float) -> None:
        left_s = self._end_s(pending, timeout_s) - self._clock.now()
        silence_s = self._settings.answer_timeout_s
        asked = pending.stream if silence_s < left_s else None
        wait_s = max(0.0, min(left_s, silence_s))
        on_time = partial(self._on_time, pending, timeout_s, asked, self._clock.now() + wait_s)
        pending.timer = asyncio.get_running_loop().call_later(wait_s, on_time)

    def _on_time(self, pending: _Pending, timeout_s: float, stream: RouterStream | None, due_s: float) -> None:
        """An ask is without an answer for as long as `stream` may be silent, or for all of its time."""
        if pending.answer.done():
            return
        now_s = self._clock.now()
        if stood_still(due_s, now_s):
            # The answer may lie unread, or the streams broke meanwhile and are opened anew.
            pending.asleep_s += now_s - due_s
            self._set_timer(pending, timeout_s)
            return
        if self._end_s(pending, timeout_s) > self._clock.now():
            if stream is not None and stream is pending.stream and self._is_silent(pending):
                log.warning("router_silent", extra={"data": {"router": stream.router_id}})
                stream.give_up()
            self._set_timer(pending, timeout_s)
            return
        pending.is_late = True
        if pending.queued_s is not None:
            pending.answer.set_exception(DeadlineError("the request's time was over before a worker had room"))
        else:
            pending.answer.set_exception(
                UnavailableError("no router answered in time", reason="no_router", retry_after_s=1.0)
            )

    def _end_s(self, pending: _Pending, timeout_s: float) -> float:
        own_s = pending.ask.timeout_s
        if pending.queued_s is not None and own_s is not None:
            # The request's own time goes on while this process stands still; what came meanwhile is read first.
            return pending.began_s + max(timeout_s, own_s) + min(pending.asleep_s, WAKING_S)
        end_s = pending.began_s + timeout_s + pending.asleep_s
        return end_s if own_s is None else min(end_s, pending.began_s + max(timeout_s, own_s) + WAKING_S)

    def _is_silent(self, pending: _Pending) -> bool:
        queued_s = pending.queued_s
        return queued_s is None or self._clock.now() - queued_s >= self._settings.answer_timeout_s

    def report_nowait(
        self,
        ask_id: int,
        kind: ReportKind,
        *,
        elapsed_s: float,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
        error: MeshError | None = None,
        failed_worker_id: str = "",
        is_answered_by_prefill: bool = False,
    ) -> None:
        """Tells how a placed request goes; see the protocol."""
        placed = self._in_flight.get(ask_id)
        if placed is None:
            self.reports_dropped += 1
            return
        report = Report(
            kind=kind,
            elapsed_s=elapsed_s,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            error=error,
            failed_worker_id=failed_worker_id,
            reservation_id="" if placed.stream.is_up and not placed.is_moved else placed.reservation_id,
            is_answered_by_prefill=is_answered_by_prefill,
        )
        if kind in SETTLING:
            del self._in_flight[ask_id]
        elif placed.prefilled_after_s is None and kind is not PROGRESS:
            placed.prefilled_after_s = elapsed_s
        self._send_report(placed.stream, ask_id, report)

    async def start(self) -> None:
        """Nothing to wait for: asks wait for the first router within their own time."""

    async def run(self) -> None:
        self._running = asyncio.current_task()
        await self._streams.run()

    async def aclose(self) -> None:
        """Ends the streams; asks in flight fail as unavailable."""
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(UnavailableError("the link to the router is closed", reason="no_router"))

    # Streams

    def on_begun(self, stream: RouterStream) -> None:
        """What waited for a stream goes out on this one."""
        for ask_id, placed in self._in_flight.items():
            if not placed.stream.is_up:
                self._have_adopted(ask_id, placed, stream)
        unsent, self._unsent = self._unsent, []
        for ask_id, report in unsent:
            stream.report(ask_id, report)
        for ask_id, pending in self._pending.items():
            if pending.stream is None:
                self._send_ask(ask_id, pending)

    def on_broken(self, stream: RouterStream) -> None:
        """Asks, and who is told of what is in flight, move to another stream; without one they wait."""
        other = self._any_stream()
        for ask_id, placed in self._in_flight.items():
            if placed.stream is stream and other is not None:
                self._have_adopted(ask_id, placed, other)
        for ask_id, report in stream.take_reports():
            self._send_report(stream, ask_id, report)
        for ask_id, pending in self._pending.items():
            if pending.stream is stream:
                pending.stream = None
                self._send_ask(ask_id, pending)

    def is_used(self, stream: RouterStream) -> bool:
        """Whether something is unanswered or in flight on it."""
        if stream.has_unwritten or any(pending.stream is stream for pending in self._pending.values()):
            return True
        return any(placed.stream is stream for placed in self._in_flight.values())

    def _have_adopted(self, ask_id: int, placed: _InFlight, stream: RouterStream) -> None:
        """Says that a request is in flight which another router placed, or this one on an earlier stream."""
        placed.stream, placed.is_moved = stream, True
        elapsed_s = placed.prefilled_after_s
        kind = PROGRESS if elapsed_s is None else PREFILLED
        stream.report(ask_id, Report(kind=kind, elapsed_s=elapsed_s or 0.0, reservation_id=placed.reservation_id))

    def _any_stream(self) -> RouterStream | None:
        return next(iter(self._streams.asked()), None)

    # Asks and reports

    def _stream_for(self, ask: Ask) -> RouterStream | None:
        """Those of a session to the same router from every frontend, others in turns."""
        streams = self._streams.asked()
        if not streams:
            return None
        if ask.session_id:
            return max(streams, key=lambda stream: rank(ask.session_id, stream.router_id))
        self._turns += 1
        return streams[self._turns % len(streams)]

    def _send_ask(self, ask_id: int, pending: _Pending) -> None:
        stream = self._stream_for(pending.ask)
        if stream is None or pending.answer.done():
            return
        ask = pending.ask
        waited_s = self._clock.now() - pending.began_s
        if ask.timeout_s is not None and waited_s >= TOLD_TIME_S:
            ask = replace(ask, timeout_s=max(TOLD_TIME_S, ask.timeout_s - waited_s))
        pending.stream, pending.queued_s = stream, None
        stream.ask(ask_id, ask)

    def _withdraw(self, ask_id: int, pending: _Pending) -> None:
        if pending.stream is not None:
            pending.stream.withdraw(ask_id)

    def _send_report(self, stream: RouterStream, ask_id: int, report: Report) -> None:
        """On the stream of the router that placed, else on another one or the next."""
        standing = stream if stream.is_up else self._any_stream()
        if len(self._unsent if standing is None else standing) >= self._settings.messages_max:
            self.reports_dropped += 1
        elif standing is None:
            self._unsent.append((ask_id, report))
        else:
            standing.report(ask_id, report)

    # What routers say

    def on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None:
        kind = message.WhichOneof("kind")
        if kind == "answers":
            answers = message.answers
            self._on_answers(stream, answers.placements, answers.refusals, answers.queued_ask_ids)
        elif kind == "placement":
            self._on_answers(stream, (message.placement,), (), ())
        elif kind == "refusal":
            self._on_answers(stream, (), (message.refusal,), ())
        elif kind == "queued":
            self._on_answers(stream, (), (), message.queued.ask_ids)
        # Anything else is said by a newer router; this build has no use for it.

    def _on_answers(
        self,
        stream: RouterStream,
        placements: Iterable[pb.Placement],
        refusals: Iterable[pb.Refusal],
        queued: Iterable[int],
    ) -> None:
        now = self._clock.now()
        heard = list(queued)
        for ask_id in heard:
            pending = self._pending.get(ask_id)
            if pending is not None:
                pending.queued_s = now
        for refusal in refusals:
            heard.append(refusal.ask_id)
            if (pending := self._asked(stream, refusal.ask_id)) is not None:
                pending.answer.set_exception(from_detail(refusal.error))
        for placement in placements:
            heard.append(ask_id := placement.ask_id)
            if (pending := self._asked(stream, ask_id)) is not None:
                self._on_placement(stream, ask_id, pending, placement)
        stream.heard(heard)

    def _asked(self, stream: RouterStream, ask_id: int) -> _Pending | None:
        """None: it is answered, or withdrawn, of which the router hears or has heard, or was asked of another one meanwhile."""
        pending = self._pending.get(ask_id)
        return None if pending is None or pending.answer.done() or pending.stream is not stream else pending

    def _on_placement(self, stream: RouterStream, ask_id: int, pending: _Pending, message: pb.Placement) -> None:
        try:
            placement = from_placement(message)
        except InvalidRequestError as error:
            pending.answer.set_exception(
                UnavailableError(f"the router's answer is wrong: {error.message}", reason="bad_answer")
            )
            return
        pending.answer.set_result(placement)
        self._in_flight[ask_id] = _InFlight(stream, placement.reservation_id)
