"""Keeps one SyncPeers stream with every other router, and says when this one knows what they have in flight.

The router with the smaller id opens the stream; the registry says who is there, also who is not ready yet. A stream that breaks, is
silent for `silence_s`, misses a message or does not take what it is told is opened anew, and begins with a snapshot.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvmesh.clock import Clock
from kvmesh.core import PeerNews
from kvmesh.discovery.base import ROUTER, Instance, Registry, View
from kvmesh.errors import DeadlineError, LostError, MeshError, OverloadedError, UnavailableError
from services.router.replicas.peer_state import Replica, Session
from services.router.settings import SyncSettings

log = logging.getLogger(__name__)

GRAIN_S = 0.0005
"""Keeps a timer that fires a hair early from turning a wait into a spin."""


class PeerCall(Protocol):
    """A stream to a peer; `kvmesh.rpc.peers_client` implements it."""

    async def send(self, news: PeerNews) -> None:
        """Says something."""
        ...

    def messages(self) -> AsyncGenerator[PeerNews, None]:
        """What the peer says."""
        ...

    def cancel(self) -> None:
        """Ends the stream."""
        ...


class PeersClient(Protocol):
    """Opens streams to peers."""

    def open(self, address: str) -> PeerCall:
        """A stream to the router there."""
        ...


@dataclass(slots=True, eq=False)
class _Line:
    """One stream's outgoing half. `is_over`: nobody hears any more."""

    session: Session
    wakeup: asyncio.Event
    is_over: bool = False

    def end(self) -> None:
        """Nobody hears any more."""
        self.is_over = True
        self.wakeup.set()


@dataclass(slots=True, eq=False)
class _Followed:
    address: str
    task: asyncio.Task[None]


class Peers:
    """A running part."""

    def __init__(
        self,
        replica: Replica,
        registry: Registry,
        client: PeersClient,
        *,
        router_id: str,
        clock: Clock,
        generator: Random,
        settings: SyncSettings,
    ) -> None:
        self.replica = replica
        self._registry = registry
        self._client = client
        self._router_id = router_id
        self._clock = clock
        self._random = generator
        self._settings = settings
        self._followed: dict[str, _Followed] = {}
        self._unreachable: set[str] = set()
        self._serving_first: tuple[str, ...] = ()
        self._viewed = asyncio.Event()
        self._closing = asyncio.Event()
        self._lines: dict[_Line, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None

    async def wait_viewed(self) -> None:
        """Until the registry has told of routers."""
        await self._viewed.wait()

    @property
    def has_elders(self) -> bool:
        """True when other routers took requests when this one looked first: they have work in flight."""
        return bool(self._serving_first)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Routers that took requests when this one came, and whose work it does not know yet though they can be reached."""
        return tuple(
            name for name in self._serving_first if name not in self._unreachable and not self.replica.has_heard(name)
        )

    def count_strangers(self) -> None:
        """Counts what peers told of workers that have become known since; otherwise that happens a few times a second."""
        self.replica.tick(now=self._clock.now())

    async def start(self) -> None:
        """Nothing: `run` does the work."""

    async def run(self) -> None:
        """Follows the registry and opens streams until `aclose`."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._keep_strangers(), name="peers-strangers")
            async with aclosing(self._registry.watch(ROUTER)) as views:
                async for view in views:
                    self._on_view(view)

    async def aclose(self) -> None:
        """Ends all streams."""
        self.end_streams()
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])

    def end_streams(self) -> None:
        """Every peer is told what it was not told yet; then its stream ends and no other begins."""
        self._closing.set()
        for line in self._lines:
            line.wakeup.set()

    async def serve(self, messages: AsyncIterator[PeerNews]) -> AsyncGenerator[PeerNews, None]:
        """The other end of a stream that a peer opened."""
        if self._closing.is_set():
            raise UnavailableError("the router is stopping", reason="router_stopping")
        if sum(1 for _ in self.replica) >= 2 * self._settings.peers_max:
            raise OverloadedError("too many peers", reason="peers_full", retry_after_s=1.0)
        line = self._begin()
        reading = asyncio.create_task(self._read(line.session, messages), name="peer-read")
        reading.add_done_callback(lambda _: line.end())
        try:
            async with aclosing(self._news(line)) as news:
                async for each in news:
                    yield each
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            self._end(line)

    def _on_view(self, view: View) -> None:
        if view.is_stale:
            return
        others = {each.instance_id: each for each in view.instances if each.instance_id != self._router_id}
        if not self._viewed.is_set():
            self._serving_first = tuple(name for name, each in others.items() if each.takes_requests)
            self._viewed.set()
        for name, followed in list(self._followed.items()):
            if name not in others or others[name].address != followed.address:
                followed.task.cancel()
                del self._followed[name]
        for name, each in others.items():
            is_ours = self._router_id < name and name not in self._followed
            if is_ours and self._tasks is not None and len(self._followed) < self._settings.peers_max:
                task = self._tasks.create_task(self._follow(each), name=f"peer-{name}")
                self._followed[name] = _Followed(each.address, task)

    async def _follow(self, peer: Instance) -> None:
        pause_s, told = self._settings.reconnect_min_s, ""
        while not self._closing.is_set():
            has_stood, problem = await self._talk(peer)
            if has_stood:
                pause_s = self._settings.reconnect_min_s
            else:
                self._unreachable.add(peer.instance_id)
            if has_stood or problem.reason != told:
                data = {"router": peer.instance_id, "reason": problem.reason, "message": problem.message}
                log.warning("peer_stream_broken", extra={"data": data})
                told = problem.reason
            await self._clock.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = min(2 * pause_s, self._settings.reconnect_max_s)

    async def _talk(self, peer: Instance) -> tuple[bool, MeshError]:
        """One stream, until it breaks. Gives whether the peer's snapshot came, and what broke."""
        problem: MeshError = LostError("the stream is over", reason="stream_ended", where=peer.instance_id)
        try:
            call = self._client.open(peer.address)
        except MeshError as error:
            return False, error
        line = self._begin()
        try:
            async with asyncio.TaskGroup() as halves:
                halves.create_task(self._read_to_end(line.session, call.messages()))
                halves.create_task(self._write(line, call))
        except* MeshError as group:
            problem = next(error for error in group.exceptions if isinstance(error, MeshError))
        finally:
            call.cancel()
            self._end(line)
        return line.session.is_snapshot_heard, problem

    async def _write(self, line: _Line, call: PeerCall) -> None:
        async with aclosing(self._news(line)) as news:
            async for each in news:
                await call.send(each)
        raise LostError("this router is stopping", reason="router_stopping")

    async def _read_to_end(self, session: Session, messages: AsyncIterator[PeerNews]) -> None:
        await self._read(session, messages)
        raise LostError("the peer ended the stream", reason="stream_ended")

    async def _read(self, session: Session, messages: AsyncIterator[PeerNews]) -> None:
        """Hears a peer out. Silence is a failure."""
        while True:
            try:
                async with asyncio.timeout(self._settings.silence_s):
                    news = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"no message for {self._settings.silence_s:g} s"
                raise DeadlineError(message, reason="silent", where=session.origin) from None
            was_known = bool(session.origin)
            self.replica.heard(session, news, now=self._clock.now())
            if not was_known:
                self._unreachable.discard(session.router_id)
                log.info("peer_joined", extra={"data": {"router": session.router_id}})

    async def _news(self, line: _Line) -> AsyncGenerator[PeerNews, None]:
        """What is to be said, when it is to be said; ends when this router stops or nobody hears."""
        settings, changes = self._settings, line.session.changes
        spoke_at = -settings.heartbeat_s
        while not line.is_over:
            if changes.is_overrun:
                raise OverloadedError("the peer does not take what it is told", reason="peer_behind")
            is_closing = self._closing.is_set()
            pause_s = settings.interval_s if changes else settings.heartbeat_s
            left_s = spoke_at + pause_s - self._clock.now()
            if changes.is_due or left_s <= 0 or (is_closing and changes):
                spoke_at = self._clock.now()
                yield self.replica.next_news(line.session, now=spoke_at)
            elif is_closing:
                return
            else:
                line.wakeup.clear()
                await _wait(line.wakeup, max(GRAIN_S, left_s))

    async def _keep_strangers(self) -> None:
        while True:
            # Without a peer nobody tells of strangers; what is left of the last one ends with a grace of seconds.
            await self._clock.sleep(self._settings.heartbeat_s / 4 if self._lines else self._settings.heartbeat_s * 2)
            self.count_strangers()

    def _begin(self) -> _Line:
        line = _Line(self.replica.began(), asyncio.Event())
        line.session.changes.on_change = line.wakeup.set
        self._lines[line] = None
        return line

    def _end(self, line: _Line) -> None:
        del self._lines[line]
        self.replica.ended(line.session, now=self._clock.now())
        if line.session.router_id:
            log.info("peer_left", extra={"data": {"router": line.session.router_id}})


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
