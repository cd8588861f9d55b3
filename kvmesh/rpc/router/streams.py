"""Keeps a frontend's streams to routers: replaces broken ones and moves streams to preferred routers."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from typing import Any, Protocol

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.clock import Clock
from kvmesh.discovery.base import ROUTER, Instance, Registry, View
from kvmesh.rpc.channels import Channels
from kvmesh.rpc.router.ranking import best, better, usable, worst
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import Pace, RouterStream

log = logging.getLogger(__name__)
LEAVE_TICK_S = 0.05
"""How often a stream that is left is looked at."""


class StreamListener(Protocol):
    """Who speaks on the streams."""

    def on_begun(self, stream: RouterStream) -> None: ...

    def on_broken(self, stream: RouterStream) -> None:
        """One that stood is over, and not among those that stand any more."""
        ...

    def on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None: ...

    def is_used(self, stream: RouterStream) -> bool:
        """Whether something is unanswered or in flight on it."""
        ...


class RouterStreams:
    """Streams to the `routers` routers that the frontend ranks highest (`router/ranking.py`).

    When that set changes, streams move one at a time: the new one first, then the old one is asked no more and ends when the
    listener does not use it any more, or after `leave_s`.
    """

    def __init__(
        self,
        registry: Registry,
        channels: Channels,
        *,
        frontend_id: str,
        clock: Clock,
        generator: Random,
        settings: RouterLinkSettings,
        listener: StreamListener,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._frontend_id = frontend_id
        self._clock = clock
        self._random = generator
        self._settings = settings
        self._listener = listener
        self._routers: dict[str, Instance] = {}
        self._taken: set[str] = set()
        """Routers to which a stream stands or is tried."""
        self.standing: dict[str, RouterStream] = {}
        """By router, in the order in which they began."""
        self._shunned: dict[str, float] = {}
        """Routers to which no stream moves, and until when."""
        self._leaving: dict[RouterStream, None] = {}
        """Those that stand and are asked no more."""
        self._keepers = 0
        self._tasks = asyncio.TaskGroup()
        self._viewed = asyncio.Event()
        self._freed = asyncio.Event()
        self._messages_of_past_streams = 0
        self.broken = 0
        """Streams that ended otherwise than by being left."""

    @property
    def messages_sent(self) -> int:
        """Messages written to all routers since the start."""
        return self._messages_of_past_streams + sum(stream.messages_sent for stream in self.standing.values())

    def asked(self) -> Sequence[RouterStream]:
        """Streams on which asks go out; when all are being left, those."""
        asked = [stream for stream in self.standing.values() if stream not in self._leaving]
        return asked or list(self.standing.values())

    async def run(self) -> None:
        async with self._tasks:
            self._tasks.create_task(self._watch_routers(), name="router-link-watch")
            self._tasks.create_task(self._move_streams(), name="router-link-move")
            for _ in range(self._settings.routers):
                self._begin_keeper()

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
        for router_id, stream in self.standing.items():
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
            standing = [stream.router_id for stream in self.asked()]
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
        while stream.is_up and self._clock.now() < until_s and self._listener.is_used(stream):
            await self._clock.sleep(LEAVE_TICK_S)
        stream.give_up()

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
            problem = await stream.run(
                self._on_begun, self._listener.on_message, connect_timeout_s=settings.answer_timeout_s
            )
        finally:
            self._taken.discard(router.instance_id)
            self._messages_of_past_streams += stream.messages_sent
            if self.standing.pop(router.instance_id, None) is not None:
                self._listener.on_broken(stream)
                self._freed = _renewed(self._freed)
            was_left = stream in self._leaving
            self._leaving.pop(stream, None)
        if was_left:
            log.info("router_left", extra={"data": {"router": router.instance_id}})
            return True
        self.broken += 1
        self._shunned[router.instance_id] = self._clock.now() + self._settings.shun_s
        data = {"router": router.instance_id, "reason": problem.reason, "message": problem.message}
        log.warning("router_stream_broken", extra={"data": data})
        return stream.has_stood

    def _on_begun(self, stream: RouterStream) -> None:
        """Another one may be left for it."""
        self.standing[stream.router_id] = stream
        asked = {each.router_id: each for each in self.asked()}
        if len(asked) > self._settings.routers:
            left = asked[worst(self._frontend_id, self._routers, asked)]
            self._leaving[left] = None
            self._tasks.create_task(self._leave(left), name=f"router-leave-{left.router_id}")
        self._listener.on_begun(stream)


def _renewed(event: asyncio.Event) -> asyncio.Event:
    """Wakes whoever waits for the event; the next one."""
    event.set()
    return asyncio.Event()
