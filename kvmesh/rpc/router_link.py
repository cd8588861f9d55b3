"""The frontend's end of RouterService.Route: streams to `routers` of the routers, each replaced when it breaks.

1. Asks are numbered once for the life of the link, whichever router is asked: those of a session always the same one, as long as
   the same ones are there; others in turns. An ask that was not answered when its stream broke is asked at once on another stream,
   or on the next one, as long as its own time lasts.
2. A router that for `answer_timeout_s` neither answers an ask nor says that it waits in its queue counts as hung: its stream is
   given up. An ask that waits there has all of its own time, not only that of placing.
3. Reports go to the router that placed. When that stream breaks, the link has another router adopt what is in flight, and
   reports there, naming the reservation. Without any stream, both wait for the next one.
4. Which routers: those that the frontend ranks highest (`router_choice.py`). When that set changes, streams move one at a time:
   the new one first, then the old one is asked no more and ends when what it placed has ended, or after `leave_s`.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement, ReportKind
from kvmesh.discovery.base import ROUTER, Instance, Registry, View
from kvmesh.errors import DeadlineError, InvalidRequestError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import ASKS_MAX, Report, from_placement
from kvmesh.rpc.router_choice import best, better, rank, usable, worst
from kvmesh.rpc.router_stream import Pace, RouterStream
from kvmesh.rpc.status import from_detail
from kvmesh.settings import setting

log = logging.getLogger(__name__)
TOLD_TIME_S = 0.001
"""Of an ask's time less is not told."""
LEAVE_TICK_S = 0.05
"""How often a stream that is left is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLinkSettings:
    """Bounds of the link to the routers."""

    routers: int = setting(2, "Routers to keep a stream to; a second one takes over at once.", min=1, max=16)
    answer_timeout_s: float = setting(
        2.0, "A router that leaves an ask, or a new stream, unanswered for so long is given up.", min=0.01
    )
    report_delay_s: float = setting(
        0.01,
        "Longest time for which news of a request waits to be sent with others; failures are told at once. 0: none waits.",
        min=0,
        max=1,
    )
    ask_delay_s: float = setting(
        0.001,
        "Longest time for which an ask waits to be sent with others while `asks_ahead` of its stream are unanswered. 0: none waits.",
        min=0,
        max=1,
    )
    asks_ahead: int = setting(
        2,
        "Unanswered asks of a stream from which on the next ones go out together: one message costs more than one ask.",
        min=1,
    )
    asks_max: int = setting(
        16, "Asks in a message: the first of them waits for the decision on the last.", min=1, max=ASKS_MAX
    )
    reconnect_min_s: float = setting(0.05, "First pause after a router could not be reached.", min=0.001)
    reconnect_max_s: float = setting(1.0, "Longest pause between attempts.", min=0.001)
    move_pause_s: float = setting(
        5.0, "Mean pause before a stream moves to a router that is preferred, and between two moves.", min=0.01
    )
    shun_s: float = setting(
        60.0,
        "Time for which no stream moves to a router whose stream broke: one that hangs looks well until it is asked.",
        min=0,
    )
    leave_s: float = setting(
        10.0, "Longest time for which a stream that moves waits for the ends of what its router placed.", min=0
    )
    messages_max: int = setting(65_536, "Asks and reports that wait to be written.", min=1)


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask without an answer, and the stream it was written to last; None: it waits for one.

    `queued_s` is when the router of that stream said last that it waits; None: it did not. `timer` looks at it again; `is_late`:
    its time was over before an answer came.
    """

    ask: Ask
    answer: asyncio.Future[Placement]
    began_s: float
    stream: RouterStream | None = None
    queued_s: float | None = None
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False


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
        self._registry = registry
        self._channels = channels
        self._frontend_id = frontend_id
        self._clock = clock
        self._random = generator
        self._settings = settings or RouterLinkSettings()
        self._routers: dict[str, Instance] = {}
        self._taken: set[str] = set()
        """Routers to which a stream stands or is tried."""
        self._streams: dict[str, RouterStream] = {}
        """Those that stand."""
        self._shunned: dict[str, float] = {}
        """Routers to which no stream moves, and until when."""
        self._leaving: dict[RouterStream, None] = {}
        """Those of them that are asked no more."""
        self._keepers = 0
        self._tasks = asyncio.TaskGroup()
        self._viewed = asyncio.Event()
        self._freed = asyncio.Event()
        self._pending: dict[int, _Pending] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._unsent: list[tuple[int, Report]] = []
        self._asks = 0
        self._turns = 0
        self._running: asyncio.Task[None] | None = None
        self._messages_of_past_streams = 0
        self.reports_dropped = 0
        self.streams_broken = 0

    @property
    def is_up(self) -> bool:
        """True while a stream stands."""
        return bool(self._streams)

    @property
    def router_ids(self) -> Sequence[str]:
        """The routers in use."""
        return tuple(self._streams)

    @property
    def router_id(self) -> str:
        """The router in use for longest; empty without one."""
        return next(iter(self._streams), "")

    @property
    def messages_sent(self) -> int:
        """Messages written to all routers since the start."""
        return self._messages_of_past_streams + sum(stream.messages_sent for stream in self._streams.values())

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
        on_time = partial(self._on_time, pending, timeout_s, asked)
        pending.timer = asyncio.get_running_loop().call_later(max(0.0, min(left_s, silence_s)), on_time)

    def _on_time(self, pending: _Pending, timeout_s: float, stream: RouterStream | None) -> None:
        """An ask is without an answer for as long as `stream` may be silent, or for all of its time."""
        if pending.answer.done():
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
        if pending.queued_s is not None and pending.ask.timeout_s is not None:
            return pending.began_s + max(timeout_s, pending.ask.timeout_s)
        return pending.began_s + timeout_s

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
        )
        if kind.settles:
            del self._in_flight[ask_id]
        elif placed.prefilled_after_s is None and kind is not ReportKind.PROGRESS:
            placed.prefilled_after_s = elapsed_s
        self._send_report(placed.stream, ask_id, report)

    async def start(self) -> None:
        """Nothing to wait for: asks wait for the first router within their own time."""

    async def run(self) -> None:
        """Keeps the streams until `aclose`."""
        self._running = asyncio.current_task()
        async with self._tasks:
            self._tasks.create_task(self._watch_routers(), name="router-link-watch")
            self._tasks.create_task(self._move_streams(), name="router-link-move")
            for _ in range(self._settings.routers):
                self._begin_keeper()

    async def aclose(self) -> None:
        """Ends the streams; asks in flight fail as unavailable."""
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(UnavailableError("the link to the router is closed", reason="no_router"))

    # Which routers

    async def _watch_routers(self) -> None:
        async with aclosing(self._registry.watch(ROUTER)) as views:
            async for view in views:
                self._on_view(view)

    def _on_view(self, view: View) -> None:
        if view.is_stale:
            return
        self._routers = {instance.instance_id: instance for instance in view.instances}
        self._shunned = {name: until_s for name, until_s in self._shunned.items() if name in self._routers}
        self._viewed = _renewed(self._viewed)
        self._freed = _renewed(self._freed)
        for router_id, stream in self._streams.items():
            router = self._routers.get(router_id)
            if router is not None and router.is_draining and any(r.takes_requests for r in self._routers.values()):
                stream.give_up()

    def _next_router(self, tried: set[str]) -> Instance | None:
        """A router without a stream and not tried since the last one that stood, the most preferred; None: there is none."""
        routers = usable(self._routers.values())
        fresh = [r for r in routers if r.instance_id not in tried and r.instance_id not in self._taken]
        return next(iter(best(self._frontend_id, fresh, 1)), None)

    def _begin_keeper(self, router: Instance | None = None) -> None:
        self._keepers += 1
        self._tasks.create_task(self._keep_stream(router), name=f"router-link-{self._keepers}")

    async def _keep_stream(self, first: Instance | None) -> None:
        """One of `routers` streams at a time, or one more until it stands and another one is left."""
        pause_s, tried = self._settings.reconnect_min_s, set[str]()
        if first is not None and first.instance_id not in self._taken:
            await self._use(first)
            tried.add(first.instance_id)
        while self._keepers <= self._settings.routers:
            router = self._next_router(tried)
            if router is not None:
                if await self._use(router):
                    tried.clear()
                    pause_s = self._settings.reconnect_min_s
                tried.add(router.instance_id)
                continue
            if tried:
                pause_s = await self._pause(pause_s)
            else:
                await self._freed.wait()  # All there are have a stream.
            tried.clear()
        self._keepers -= 1

    async def _move_streams(self) -> None:
        """Brings streams to where they belong, one at a time; frontends that see a router come do not all run there at once."""
        while True:
            await self._clock.sleep(self._settings.move_pause_s * (0.5 + self._random.random()))
            standing = [stream.router_id for stream in self._asked_streams()]
            if self._keepers == len(standing) == self._settings.routers:
                now = self._clock.now()
                shunned = {each for each, until_s in self._shunned.items() if until_s > now and each not in standing}
                routers = {name: router for name, router in self._routers.items() if name not in shunned}
                router = better(self._frontend_id, routers, standing)
                if router is not None and router.instance_id not in self._taken:
                    self._begin_keeper(router)

    async def _leave(self, stream: RouterStream) -> None:
        """Ends a stream that is asked no more when nothing is left of it; the rest is taken over by others."""
        until_s = self._clock.now() + self._settings.leave_s
        while stream.is_up and self._clock.now() < until_s and self._is_used(stream):
            await self._clock.sleep(LEAVE_TICK_S)
        stream.give_up()

    def _is_used(self, stream: RouterStream) -> bool:
        if stream.has_unwritten or any(pending.stream is stream for pending in self._pending.values()):
            return True
        return any(placed.stream is stream for placed in self._in_flight.values())

    def _asked_streams(self) -> Sequence[RouterStream]:
        """Streams on which asks go out; when all are being left, those."""
        asked = [stream for stream in self._streams.values() if stream not in self._leaving]
        return asked or list(self._streams.values())

    async def _pause(self, pause_s: float) -> float:
        """Until the registry says something or the time is over; gives the next pause."""
        try:
            async with asyncio.timeout(pause_s * (0.5 + self._random.random() / 2)):
                await self._viewed.wait()
        except TimeoutError:
            return min(2 * pause_s, self._settings.reconnect_max_s)
        return pause_s

    # One stream

    async def _use(self, router: Instance) -> bool:
        """One stream, until it breaks. True: it stood."""
        stub: Any = RouterServiceStub(self._channels.channel(router.address))
        settings = self._settings
        pace = Pace(
            report_delay_s=settings.report_delay_s,
            ask_delay_s=settings.ask_delay_s,
            asks_ahead=settings.asks_ahead,
            asks_max=settings.asks_max,
        )
        stream = RouterStream(stub.Route(), router.instance_id, self._frontend_id, pace)
        self._taken.add(router.instance_id)
        try:
            problem = await stream.run(self._on_begun, self._on_message, connect_timeout_s=settings.answer_timeout_s)
        finally:
            self._taken.discard(router.instance_id)
            self._messages_of_past_streams += stream.messages_sent
            if self._streams.pop(router.instance_id, None) is not None:
                self._on_broken(stream)
            was_left = stream in self._leaving
            self._leaving.pop(stream, None)
        if was_left:
            log.info("router_left", extra={"data": {"router": router.instance_id}})
            return True
        self.streams_broken += 1
        self._shunned[router.instance_id] = self._clock.now() + self._settings.shun_s
        data = {"router": router.instance_id, "reason": problem.reason, "message": problem.message}
        log.warning("router_stream_broken", extra={"data": data})
        return stream.has_stood

    def _on_begun(self, stream: RouterStream) -> None:
        """What waited for a stream goes out on this one. Another one may be left for it."""
        self._streams[stream.router_id] = stream
        asked = {each.router_id: each for each in self._asked_streams()}
        if len(asked) > self._settings.routers:
            left = asked[worst(self._frontend_id, self._routers, asked)]
            self._leaving[left] = None
            self._tasks.create_task(self._leave(left), name=f"router-leave-{left.router_id}")
        for ask_id, placed in self._in_flight.items():
            if not placed.stream.is_up:
                self._have_adopted(ask_id, placed, stream)
        unsent, self._unsent = self._unsent, []
        for ask_id, report in unsent:
            stream.report(ask_id, report)
        for ask_id, pending in self._pending.items():
            if pending.stream is None:
                self._send_ask(ask_id, pending)

    def _on_broken(self, stream: RouterStream) -> None:
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
        self._freed = _renewed(self._freed)

    def _have_adopted(self, ask_id: int, placed: _InFlight, stream: RouterStream) -> None:
        """Says that a request is in flight which another router placed, or this one on an earlier stream."""
        placed.stream, placed.is_moved = stream, True
        elapsed_s = placed.prefilled_after_s
        kind = ReportKind.PROGRESS if elapsed_s is None else ReportKind.PREFILLED
        stream.report(ask_id, Report(kind=kind, elapsed_s=elapsed_s or 0.0, reservation_id=placed.reservation_id))

    def _any_stream(self) -> RouterStream | None:
        return next(iter(self._asked_streams()), None)

    # Asks and reports

    def _stream_for(self, ask: Ask) -> RouterStream | None:
        """Those of a session to the same router from every frontend, others in turns."""
        streams = self._asked_streams()
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

    def _on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None:
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


def _renewed(event: asyncio.Event) -> asyncio.Event:
    """Wakes whoever waits for the event; the next one."""
    event.set()
    return asyncio.Event()
