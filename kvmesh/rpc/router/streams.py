"""Keeps a frontend's streams to routers: replaces broken ones and moves streams to preferred routers."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from typing import Any, Protocol

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.clock import Clock
from kvmesh.discovery.base import ROUTER, Instance, Registry, View
from kvmesh.discovery.members import watch_members
from kvmesh.event_log import event_logger
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.ranking import find_better_router, preferred_routers, usable_routers, worst_router
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import RouterStream

_log = event_logger(__name__)
LEAVE_CHECK_INTERVAL_S = 0.05


class StreamListener(Protocol):
    """Uses the streams; implemented by `GrpcRouterLink`."""

    def on_stream_up(self, stream: RouterStream) -> None: ...

    def on_stream_lost(self, stream: RouterStream) -> None:
        """A stream that was up is over, and no longer among `streams`."""
        ...

    def on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None: ...

    def is_used(self, stream: RouterStream) -> bool:
        """Returns whether an ask on the stream is unanswered, or a request that it placed is in flight."""
        ...


class RouterStreams:
    """Streams to the `routers` routers that the frontend prefers (`ranking.py`).

    When this set changes, streams move one at a time. The new stream opens first. Then the old stream gets no more asks, and ends when
    the listener no longer uses it, or after `leave_s`.
    """

    def __init__(
        self,
        registry: Registry,
        channels: ChannelPool,
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
        self.has_listed_router = False
        """Whether the registry has listed a router since the start."""
        self._taken: set[str] = set()
        """Routers whose stream is open or connecting."""
        self.streams: dict[str, RouterStream] = {}
        """The streams that are up, by router, the oldest first."""
        self._shunned: dict[str, float] = {}
        """Routers to which no stream moves, and until when."""
        self._leaving: dict[RouterStream, None] = {}
        """Streams that are up and get no more asks."""
        self._keepers = 0
        self._tasks = asyncio.TaskGroup()
        self._view_changed = asyncio.Event()
        self._router_freed = asyncio.Event()
        self._messages_of_past_streams = 0

    @property
    def messages_sent(self) -> int:
        """Messages written to all routers since the start."""
        return self._messages_of_past_streams + sum(stream.messages_sent for stream in self.streams.values())

    def for_asks(self) -> Sequence[RouterStream]:
        """Returns the streams on which asks are sent: those that stay, or all when none stays."""
        staying = [stream for stream in self.streams.values() if stream not in self._leaving]
        return staying or list(self.streams.values())

    async def run(self) -> None:
        async with self._tasks:
            self._tasks.create_task(self._watch_routers(), name="router-link-watch")
            self._tasks.create_task(self._move_streams(), name="router-link-move")
            for _ in range(self._settings.routers):
                self._start_keeper()

    async def _watch_routers(self) -> None:
        async with aclosing(watch_members(self._registry, ROUTER, self._clock)) as views:
            async for view in views:
                self._on_view(view)

    def _on_view(self, view: View) -> None:
        # The registry is unreachable. The routers that it listed last stay.
        if view.is_stale:
            return
        self._routers = {instance.instance_id: instance for instance in view.instances}
        self.has_listed_router |= bool(self._routers)
        # Drops routers that the registry does not list, so that the dictionary stays small.
        self._shunned = {name: until_s for name, until_s in self._shunned.items() if name in self._routers}
        self._view_changed = _set_and_renew(self._view_changed)
        self._router_freed = _set_and_renew(self._router_freed)
        # `give_up` only cancels the call. `_use` removes the stream later, so the dictionary does not change during the loop.
        for router_id, stream in self.streams.items():
            router = self._routers.get(router_id)
            if router is not None and router.is_draining and any(r.takes_requests for r in self._routers.values()):
                stream.give_up()

    def _next_router(self, tried: set[str]) -> Instance | None:
        """Returns the preferred router without a stream that is not in `tried`."""
        routers = usable_routers(self._routers.values())
        fresh = [r for r in routers if r.instance_id not in tried and r.instance_id not in self._taken]
        return next(iter(preferred_routers(self._frontend_id, fresh, 1)), None)

    def _start_keeper(self, router: Instance | None = None) -> None:
        self._keepers += 1
        self._tasks.create_task(self._keep_stream(router), name=f"router-link-{self._keepers}")

    async def _keep_stream(self, first: Instance | None) -> None:
        """Keeps one of `routers` streams. While a stream moves there is one keeper more."""
        pause_s, tried = self._settings.reconnect_min_s, set[str]()
        if first is not None and first.instance_id not in self._taken:
            await self._use(first)
            tried.add(first.instance_id)
        # Ends if there is one keeper too many: its stream was left for a better one.
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
                await self._router_freed.wait()  # All routers have a stream.
            tried.clear()
        self._keepers -= 1

    async def _move_streams(self) -> None:
        """Moves streams to preferred routers, one at a time. Random pauses keep frontends from moving to a new router at the same time."""
        while True:
            await self._clock.sleep(self._settings.move_pause_s * (0.5 + self._random.random()))
            used = [stream.router_id for stream in self.for_asks()]
            # Only while all streams are up and no other one moves.
            if self._keepers == len(used) == self._settings.routers:
                now = self._clock.now()
                shunned = {each for each, until_s in self._shunned.items() if until_s > now and each not in used}
                routers = {name: router for name, router in self._routers.items() if name not in shunned}
                router = find_better_router(self._frontend_id, routers, used)
                if router is not None and router.instance_id not in self._taken:
                    self._start_keeper(router)

    async def _leave(self, stream: RouterStream) -> None:
        """Ends a stream when it is no longer used, or after `leave_s`; other routers adopt the rest."""
        until_s = self._clock.now() + self._settings.leave_s
        while stream.is_up and self._clock.now() < until_s and self._listener.is_used(stream):
            await self._clock.sleep(LEAVE_CHECK_INTERVAL_S)
        stream.give_up()

    async def _pause(self, pause_s: float) -> float:
        """Waits for a change in the registry, up to `pause_s`. Returns the next pause."""
        try:
            async with asyncio.timeout(pause_s * (0.5 + self._random.random() / 2)):
                await self._view_changed.wait()
        except TimeoutError:
            return min(2 * pause_s, self._settings.reconnect_max_s)
        return pause_s

    async def _use(self, router: Instance) -> bool:
        """Opens a stream and runs it until it breaks. Returns whether it was up."""
        stub: Any = RouterServiceStub(self._channels.channel(router.address, MeshRole.ROUTER))
        stream = RouterStream(
            stub.Route(), router_id=router.instance_id, frontend_id=self._frontend_id, settings=self._settings
        )
        self._taken.add(router.instance_id)
        try:
            problem = await stream.run(self._on_up, self._listener.on_message)
        finally:
            self._taken.discard(router.instance_id)
            self._messages_of_past_streams += stream.messages_sent
            # The listener does not know a stream that was never up.
            if self.streams.pop(router.instance_id, None) is not None:
                self._listener.on_stream_lost(stream)
                self._router_freed = _set_and_renew(self._router_freed)
            was_left = stream in self._leaving
            self._leaving.pop(stream, None)
        if was_left:
            _log.info("router_left", router_id=router.instance_id)
            return True
        self._shunned[router.instance_id] = self._clock.now() + self._settings.shun_s
        _log.warning(
            "router_stream_broken", router_id=router.instance_id, reason=problem.reason, detail=problem.message
        )
        return stream.was_up

    def _on_up(self, stream: RouterStream) -> None:
        """If there are too many streams now, starts to leave the worst one."""
        self.streams[stream.router_id] = stream
        used = {each.router_id: each for each in self.for_asks()}
        if len(used) > self._settings.routers:
            left = used[worst_router(self._frontend_id, self._routers, used)]
            # Before the listener sends waiting asks, so that none goes to the stream that ends.
            self._leaving[left] = None
            self._tasks.create_task(self._leave(left), name=f"router-leave-{left.router_id}")
        self._listener.on_stream_up(stream)


def _set_and_renew(event: asyncio.Event) -> asyncio.Event:
    """Wakes the tasks that wait for the event. Returns a new event."""
    event.set()
    return asyncio.Event()
