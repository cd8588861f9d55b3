"""A frontend's link to the routers: asks and reports over Route streams, which `streams.py` keeps.

1. Asks have one numbering for the life of the link. Those of a session go to the same router while the routers are the same; others go
   to the routers in turn. When a stream breaks, its unanswered asks are sent on another stream, or on the next one to open, as long as
   their own time lasts.
2. A router that neither answers an ask nor lists it as queued for `answer_timeout_s` counts as hung: its stream is given up. An ask
   that is queued may wait for its own timeout, not only for that of placing.
3. Reports go to the router that placed the request. When that stream breaks, the link has another router adopt the requests in flight
   and reports there with the reservation's id. Without any stream, adoptions and reports wait for the next one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.clock import WAKING_S, Clock, stood_still
from kvmesh.core import Ask, Placement, Report, ReportKind
from kvmesh.core.routing import PREFILLED, PROGRESS, SETTLING
from kvmesh.discovery.base import Registry
from kvmesh.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import from_placement
from kvmesh.rpc.router.ranking import rank
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import RouterStream
from kvmesh.rpc.router.streams import RouterStreams
from kvmesh.rpc.status import from_detail

_log = event_logger(__name__)
TIME_LEFT_MIN_S = 0.001
"""Shortest `timeout_s` sent with an ask that is sent again; a shorter wait does not change it."""


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingAsk:
    """An ask without an answer. `stream`: the one it was sent on last; None: it waits for one.

    `queued_s`: when that router last listed it as queued. `asleep_s`: time for which this process stood still, which does not count as
    silence of the router.
    """

    ask: Ask
    answer: asyncio.Future[Placement]
    timeout_s: float
    began_s: float
    stream: RouterStream | None = None
    queued_s: float | None = None
    timer: asyncio.TimerHandle | None = None
    is_timed_out: bool = False
    asleep_s: float = 0.0
    stream_by_s: float | None = None
    """When the wait for a stream ends; None: when the ask's own timeout ends."""

    def end_s(self) -> float:
        end_s = self._answer_by_s()
        return end_s if self.stream_by_s is None else min(end_s, self.stream_by_s + self.asleep_s)

    def _answer_by_s(self) -> float:
        own_s = self.ask.timeout_s
        if self.queued_s is not None and own_s is not None:
            # The request's timeout continues while this process is suspended. Responses that arrived in that time are read first.
            return self.began_s + max(self.timeout_s, own_s) + min(self.asleep_s, WAKING_S)
        end_s = self.began_s + self.timeout_s + self.asleep_s
        return end_s if own_s is None else min(end_s, self.began_s + max(self.timeout_s, own_s) + WAKING_S)


@dataclass(slots=True, eq=False, kw_only=True)
class _InFlight:
    """A placed request. `is_adopted`: another router than the one that placed it adopted it."""

    stream: RouterStream
    reservation_id: str
    prefilled_after_s: float | None = None
    is_adopted: bool = False


class GrpcRouterLink:
    """Implements `kvmesh.rpc.clients.RouterLink`. A running part."""

    def __init__(
        self,
        registry: Registry,
        channels: ChannelPool,
        *,
        frontend_id: str,
        clock: Clock,
        generator: Random,
        settings: RouterLinkSettings | None = None,
        no_stream_s: float | None = None,
    ) -> None:
        """`no_stream_s`: longest wait of an ask while no stream is open, if `knows_router`. None: the ask's own timeout."""
        self._no_stream_s = no_stream_s
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
        self._pending: dict[int, _PendingAsk] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._unsent: list[tuple[int, Report]] = []
        """Reports that wait for a stream."""
        self._asks = 0
        self._turns = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def knows_router(self) -> bool:
        """Whether the registry has listed a router since the start, also one that takes no requests yet."""
        return self._streams.has_listed_router

    @property
    def router_ids(self) -> Sequence[str]:
        """The routers with an open stream, the oldest first."""
        return tuple(self._streams.streams)

    @property
    def messages_sent(self) -> int:
        return self._streams.messages_sent

    async def start(self) -> None:
        """Required by the interface. Asks wait for the first router within their own timeout."""

    async def run(self) -> None:
        self._running = asyncio.current_task()
        await self._streams.run()

    async def aclose(self) -> None:
        """Ends the streams; pending asks fail as unavailable."""
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(UnavailableError("the link to the router is closed", reason="no_router"))

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        if len(self._pending) >= self._settings.messages_max:
            raise OverloadedError("too many asks wait for the router", reason="router_link_full", retry_after_s=1.0)
        self._asks += 1
        ask_id = self._asks
        answer = asyncio.get_running_loop().create_future()
        pending = self._pending[ask_id] = _PendingAsk(
            ask=ask, answer=answer, timeout_s=timeout_s, began_s=self._clock.now()
        )
        self._send_ask(ask_id, pending)
        self._set_timer(pending)
        self._limit_wait(pending)
        try:
            return Placed(ask_id=ask_id, placement=await answer)
        except BaseException:
            # Cancelled or timed out: a router that places it after all must not keep the reservation.
            if ask_id in self._in_flight:
                # The placement arrived, but this task was cancelled before it resumed.
                self.report_nowait(ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))
            elif pending.stream is not None and (pending.is_timed_out or answer.cancelled()):
                # After a refusal or `aclose` there is nothing to withdraw.
                pending.stream.withdraw(ask_id)
            raise
        finally:
            if pending.timer is not None:
                pending.timer.cancel()
            del self._pending[ask_id]

    def report_nowait(self, ask_id: int, report: Report) -> None:
        placed = self._in_flight.get(ask_id)
        if placed is None:
            return
        # A router that did not place the request knows only the reservation.
        if placed.is_adopted or not placed.stream.is_up:
            report = replace(report, reservation_id=placed.reservation_id)
        if report.kind in SETTLING:
            del self._in_flight[ask_id]
        elif placed.prefilled_after_s is None and report.kind is not PROGRESS:
            # Every other report shows that the prompt is computed. A router that adopts the request later needs that time.
            placed.prefilled_after_s = report.elapsed_s
        self._send_report(placed.stream, ask_id, report)

    # Streams

    def on_stream_up(self, stream: RouterStream) -> None:
        """Sends the asks and reports that waited for a stream."""
        # Adoptions first: the router must know a request before it gets the reports about it.
        for ask_id, placed in self._in_flight.items():
            if not placed.stream.is_up:
                self._have_adopted(ask_id, placed, stream)
        unsent, self._unsent = self._unsent, []
        for ask_id, report in unsent:
            stream.send_report(ask_id, report)
        for ask_id, pending in self._pending.items():
            if pending.stream is None:
                self._send_ask(ask_id, pending)

    def on_stream_lost(self, stream: RouterStream) -> None:
        """Moves the stream's asks and requests in flight to another stream. If there is none, they wait."""
        other = self._first_stream()
        for ask_id, placed in self._in_flight.items():
            if placed.stream is stream and other is not None:
                self._have_adopted(ask_id, placed, other)
        for ask_id, report in stream.take_reports():
            self._send_report(stream, ask_id, report)
        for ask_id, pending in self._pending.items():
            if pending.stream is stream:
                pending.stream = pending.queued_s = None
                self._send_ask(ask_id, pending)
                self._limit_wait(pending)

    def is_used(self, stream: RouterStream) -> bool:
        if stream.has_unwritten or any(pending.stream is stream for pending in self._pending.values()):
            return True
        return any(placed.stream is stream for placed in self._in_flight.values())

    def on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None:
        now = self._clock.now()
        answered = list(message.queued_ask_ids)
        for ask_id in answered:
            queued = self._pending.get(ask_id)
            if queued is not None:
                queued.queued_s = now
        for refusal in message.refusals:
            answered.append(refusal.ask_id)
            if (pending := self._pending_on(stream, refusal.ask_id)) is not None:
                pending.answer.set_exception(from_detail(refusal.error))
        for placement in message.placements:
            answered.append(ask_id := placement.ask_id)
            if (pending := self._pending_on(stream, ask_id)) is not None:
                self._on_placement(stream, ask_id, pending, message=placement)
        stream.on_answered(answered)

    def _pending_on(self, stream: RouterStream, ask_id: int) -> _PendingAsk | None:
        """Returns the ask. None: it has been answered, withdrawn, or sent to another router, so the answer is ignored."""
        pending = self._pending.get(ask_id)
        return None if pending is None or pending.answer.done() or pending.stream is not stream else pending

    def _on_placement(self, stream: RouterStream, ask_id: int, pending: _PendingAsk, *, message: pb.Placement) -> None:
        try:
            placement = from_placement(message)
        except InvalidRequestError as error:
            pending.answer.set_exception(
                UnavailableError(f"the router's answer is invalid: {error.message}", reason="bad_answer")
            )
            return
        pending.answer.set_result(placement)
        self._in_flight[ask_id] = _InFlight(stream=stream, reservation_id=placement.reservation_id)

    def _have_adopted(self, ask_id: int, placed: _InFlight, stream: RouterStream) -> None:
        """Reports a request in flight to a router that did not place it, or did so on an earlier stream."""
        placed.stream, placed.is_adopted = stream, True
        elapsed_s = placed.prefilled_after_s
        kind = PROGRESS if elapsed_s is None else PREFILLED
        stream.send_report(ask_id, Report(kind=kind, elapsed_s=elapsed_s or 0.0, reservation_id=placed.reservation_id))

    def _first_stream(self) -> RouterStream | None:
        return next(iter(self._streams.for_asks()), None)

    # Asks and reports

    def _stream_for(self, ask: Ask) -> RouterStream | None:
        """Every frontend sends the asks of a session to the same router."""
        streams = self._streams.for_asks()
        if not streams:
            return None
        if ask.session_id:
            return max(streams, key=lambda stream: rank(ask.session_id, router_id=stream.router_id))
        self._turns += 1
        return streams[self._turns % len(streams)]

    def _send_ask(self, ask_id: int, pending: _PendingAsk) -> None:
        stream = self._stream_for(pending.ask)
        if stream is None or pending.answer.done():
            return
        ask = pending.ask
        waited_s = self._clock.now() - pending.began_s
        if ask.timeout_s is not None and waited_s >= TIME_LEFT_MIN_S:
            ask = replace(ask, timeout_s=max(TIME_LEFT_MIN_S, ask.timeout_s - waited_s))
        pending.stream, pending.queued_s, pending.stream_by_s = stream, None, None
        stream.send_ask(ask_id, ask)

    def _limit_wait(self, pending: _PendingAsk) -> None:
        is_waiting = pending.stream is None and not pending.answer.done()
        if is_waiting and self._no_stream_s is not None and self.knows_router:
            pending.stream_by_s = self._clock.now() + self._no_stream_s
            if pending.timer is not None:
                pending.timer.cancel()
            self._set_timer(pending)

    def _send_report(self, stream: RouterStream, ask_id: int, report: Report) -> None:
        """Sends it on the stream; if that is down, on another one or the next. Drops it if the messages that wait are too many."""
        used = stream if stream.is_up else self._first_stream()
        if len(self._unsent if used is None else used) >= self._settings.messages_max:
            return
        if used is None:
            self._unsent.append((ask_id, report))
        else:
            used.send_report(ask_id, report)

    # Timeouts

    def _set_timer(self, pending: _PendingAsk) -> None:
        """Sets the timer to the earlier of the ask's end and `answer_timeout_s` from now."""
        now_s = self._clock.now()
        left_s = pending.end_s() - now_s
        silence_s = self._settings.answer_timeout_s
        # A timer of the ask's own end says nothing about the router.
        stream = pending.stream if silence_s < left_s else None
        wait_s = max(0.0, min(left_s, silence_s))
        on_timer = partial(self._on_timer, pending, stream, now_s + wait_s)
        pending.timer = asyncio.get_running_loop().call_later(wait_s, on_timer)

    def _on_timer(self, pending: _PendingAsk, stream: RouterStream | None, due_s: float) -> None:
        """Gives up `stream` if the ask was on it since the timer was set and its router is silent. Fails an ask that timed out."""
        if pending.answer.done():
            return
        now_s = self._clock.now()
        if stood_still(due_s=due_s, now_s=now_s):
            # The answer may be unread in a socket, or the streams broke in the meantime and are opening again.
            pending.asleep_s += now_s - due_s
            self._set_timer(pending)
        elif pending.end_s() > now_s:
            if stream is not None and stream is pending.stream and self._is_silent(pending, now_s):
                _log.warning("router_silent", router_id=stream.router_id)
                stream.give_up()
            self._set_timer(pending)
        else:
            pending.is_timed_out = True
            pending.answer.set_exception(
                UnavailableError("no router answered in time", reason="no_router", retry_after_s=1.0)
                if pending.queued_s is None
                else DeadlineError("the request timed out before a worker had capacity")
            )

    def _is_silent(self, pending: _PendingAsk, now_s: float) -> bool:
        return pending.queued_s is None or now_s - pending.queued_s >= self._settings.answer_timeout_s
