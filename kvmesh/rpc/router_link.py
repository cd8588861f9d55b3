"""The frontend's end of RouterService.Route: one stream to one healthy router, replaced when it breaks.

1. Asks are numbered once for the life of the link. An ask that was not answered before its stream broke is asked again on
   the next one, as long as its own time lasts.
2. A router that for `answer_timeout_s` neither answers an ask nor says that it waits in its queue counts as hung: its stream is
   given up. An ask that waits there has all of its own time, not only that of placing.
3. Reports go out on the stream that stands; without one they are dropped, and the router's grace settles the reservation.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

from grpc.aio import EOF, AioRpcError

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.clock import Clock
from kvmesh.core import Ask, Placement, ReportKind
from kvmesh.discovery.base import ROUTER, Health, Instance, Registry, View
from kvmesh.errors import DeadlineError, InvalidRequestError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.codec.router import Report, from_placement, to_ask, to_report
from kvmesh.rpc.status import from_detail, from_rpc_error
from kvmesh.settings import setting

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLinkSettings:
    """Bounds of the link to the router."""

    answer_timeout_s: float = setting(2.0, "A router that leaves an ask unanswered for so long is given up.", min=0.01)
    reconnect_min_s: float = setting(0.05, "First pause after a router could not be reached.", min=0.001)
    reconnect_max_s: float = setting(1.0, "Longest pause between attempts.", min=0.001)
    messages_max: int = setting(65_536, "Asks and reports that wait to be written.", min=1)


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask without an answer. `stream` is the number of the stream it was written to last.

    `queued_s` is when the router of that stream said last that it waits; None: it did not.
    """

    ask: Ask
    answer: asyncio.Future[Placement]
    stream: int = 0
    queued_s: float | None = None


class GrpcRouterLink:
    """Implements `kvmesh.rpc.clients.RouterLink`. A running part: `run` keeps the stream, `aclose` ends it."""

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
        self._tried: set[str] = set()
        self._changed = asyncio.Event()
        self._wakeup = asyncio.Event()
        self._pending: dict[int, _Pending] = {}
        self._outgoing: list[pb.RouteRequest] = []
        self._asks = 0
        self._stream = 0
        self._call: Any = None
        self._router_id = ""
        self._running: asyncio.Task[None] | None = None
        self.reports_dropped = 0
        self.streams_broken = 0

    @property
    def is_up(self) -> bool:
        """True while a stream stands."""
        return self._call is not None

    @property
    def router_id(self) -> str:
        """The router in use; empty without one."""
        return self._router_id if self.is_up else ""

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """Asks for a placement; see the protocol."""
        if len(self._outgoing) >= self._settings.messages_max:
            raise OverloadedError("too many asks wait for the router", reason="router_link_full", retry_after_s=1.0)
        self._asks += 1
        ask_id = self._asks
        pending = self._pending[ask_id] = _Pending(ask, asyncio.get_running_loop().create_future())
        if self.is_up:
            self._send_ask(ask_id, pending)
        try:
            return Placed(ask_id=ask_id, placement=await self._answer(pending, timeout_s))
        except BaseException:
            # Cancelled or out of time: a router that places it after all must not keep the reservation.
            if pending.stream and not _is_refused(pending):
                self.report_nowait(ask_id, ReportKind.CANCELLED, elapsed_s=0.0)
            raise
        finally:
            self._pending.pop(ask_id, None)

    async def _answer(self, pending: _Pending, timeout_s: float) -> Placement:
        began_s = self._clock.now()
        while (left_s := self._end_s(pending, began_s, timeout_s) - self._clock.now()) > 0:
            stream = pending.stream
            wait_s = min(left_s, self._settings.answer_timeout_s)
            # The future is shielded by `wait`, which leaves it pending when the time is up.
            done, _ = await asyncio.wait([pending.answer], timeout=wait_s)
            if done:
                return pending.answer.result()
            if stream and stream == self._stream and self.is_up and wait_s < left_s and self._is_silent(pending):
                log.warning("router_silent", extra={"data": {"router": self._router_id}})
                self._give_up_stream()
        if pending.queued_s is not None:
            raise DeadlineError("the request's time was over before a worker had room")
        raise UnavailableError("no router answered in time", reason="no_router", retry_after_s=1.0)

    def _end_s(self, pending: _Pending, began_s: float, timeout_s: float) -> float:
        if pending.queued_s is not None and pending.ask.timeout_s is not None:
            return began_s + max(timeout_s, pending.ask.timeout_s)
        return began_s + timeout_s

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
        if not self.is_up or len(self._outgoing) >= self._settings.messages_max:
            self.reports_dropped += 1
            return
        report = Report(
            kind=kind,
            elapsed_s=elapsed_s,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            error=error,
            failed_worker_id=failed_worker_id,
        )
        self._send(pb.RouteRequest(report=to_report(ask_id, report)))

    async def start(self) -> None:
        """Nothing to wait for: asks wait for the first router within their own time."""

    async def run(self) -> None:
        """Keeps a stream to a router until `aclose`."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_routers(), name="router-link-watch")
            tasks.create_task(self._keep_stream(), name="router-link-stream")

    async def aclose(self) -> None:
        """Ends the stream; asks in flight fail as unavailable."""
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(UnavailableError("the link to the router is closed", reason="no_router"))

    async def _watch_routers(self) -> None:
        async with aclosing(self._registry.watch(ROUTER)) as views:
            async for view in views:
                self._on_view(view)

    def _on_view(self, view: View) -> None:
        if view.is_stale:
            return
        self._routers = {instance.instance_id: instance for instance in view.instances}
        self._changed.set()
        router = self._routers.get(self._router_id)
        if self.is_up and router is not None and router.is_draining and any(self._healthy()):
            self._give_up_stream()

    def _healthy(self) -> Iterator[Instance]:
        return (router for router in self._routers.values() if router.takes_requests)

    def _next_router(self) -> Instance | None:
        """A router not tried since the last stream that stood, healthy ones first; None when there is none."""
        routers = list(self._healthy()) or [r for r in self._routers.values() if r.health is not Health.CRITICAL]
        fresh = [router for router in routers if router.instance_id not in self._tried]
        return self._random.choice(fresh) if fresh else None

    async def _keep_stream(self) -> None:
        pause_s = self._settings.reconnect_min_s
        while True:
            router = self._next_router()
            if router is not None:
                answered = await self._use(router)
                if answered:
                    self._tried.clear()
                    pause_s = self._settings.reconnect_min_s
                self._tried.add(router.instance_id)
                continue
            self._tried.clear()
            self._changed.clear()
            try:
                async with asyncio.timeout(pause_s * (0.5 + self._random.random() / 2)):
                    await self._changed.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, self._settings.reconnect_max_s)

    async def _use(self, router: Instance) -> bool:
        """One stream, until it breaks. True: the router answered something."""
        self._begin_stream(router)
        writer = asyncio.create_task(self._write(self._call), name="router-link-write")
        answered = False
        problem: MeshError = UnavailableError("the router ended the stream", reason="stream_ended")
        try:
            while (message := await self._call.read()) is not EOF:
                answered = True
                self._on_message(message)
        except AioRpcError as error:
            problem = from_rpc_error(error, where=router.instance_id)
        except asyncio.CancelledError:
            if not self._call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            problem = UnavailableError("the stream was given up", reason="router_silent")
        finally:
            self._call.cancel()
            self._call = None
            writer.cancel()
            await asyncio.wait([writer])
        self.streams_broken += 1
        data = {"router": router.instance_id, "reason": problem.reason, "message": problem.message}
        log.warning("router_stream_broken", extra={"data": data})
        return answered

    def _begin_stream(self, router: Instance) -> None:
        """From here on the stream stands; what it breaks is known when it is read."""
        stub: Any = RouterServiceStub(self._channels.channel(router.address))
        self._call = stub.Route()
        self._router_id = router.instance_id
        self._stream += 1
        self._outgoing = [pb.RouteRequest(hello=pb.Hello(frontend_id=self._frontend_id))]
        for ask_id, pending in self._pending.items():
            self._send_ask(ask_id, pending)
        self._wakeup.set()

    def _give_up_stream(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _send_ask(self, ask_id: int, pending: _Pending) -> None:
        if not pending.answer.done():
            pending.stream = self._stream
            pending.queued_s = None
            self._send(pb.RouteRequest(ask=to_ask(ask_id, pending.ask)))

    def _send(self, message: pb.RouteRequest) -> None:
        self._outgoing.append(message)
        self._wakeup.set()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                messages, self._outgoing = self._outgoing, []
                for message in messages:
                    await call.write(message)
        except (AioRpcError, asyncio.InvalidStateError):
            return  # The reader sees the same end and tells everybody.

    def _on_queued(self, ask_ids: Iterable[int]) -> None:
        now = self._clock.now()
        for ask_id in ask_ids:
            pending = self._pending.get(ask_id)
            if pending is not None:
                pending.queued_s = now

    def _on_message(self, message: pb.RouteResponse) -> None:
        kind = message.WhichOneof("kind")
        if kind is None:
            return  # A newer router says something that this build has no use for.
        if kind == "queued":
            self._on_queued(message.queued.ask_ids)
            return
        body = message.placement if kind == "placement" else message.refusal
        pending = self._pending.get(body.ask_id)
        if pending is None or pending.answer.done():
            return
        if kind == "refusal":
            pending.answer.set_exception(from_detail(message.refusal.error))
            return
        try:
            pending.answer.set_result(from_placement(message.placement))
        except InvalidRequestError as error:
            pending.answer.set_exception(
                UnavailableError(f"the router's answer is wrong: {error.message}", reason="bad_answer")
            )


def _is_refused(pending: _Pending) -> bool:
    return pending.answer.done() and not pending.answer.cancelled() and pending.answer.exception() is not None
