"""Keeps one SyncPeers stream with every other router.

The router with the smaller id opens the stream. The registry lists the routers, also those that take no requests yet. A stream that
breaks, is silent for `SILENCE_S`, misses a message, or whose peer does not take its messages is opened again and starts with a snapshot.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from kvmesh.clock import Clock
from kvmesh.core import PeerUpdate
from kvmesh.discovery.base import ROUTER, Instance, Registry, View
from kvmesh.discovery.members import watch_members
from kvmesh.errors import DeadlineError, LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.lifecycle import run_together
from kvmesh.rpc.router.client import GrpcPeersClient, PeerCall
from services.router.core_settings import SyncSettings
from services.router.replicas.peer_reservations import PeerReservations, PeerSession

_log = event_logger(__name__)

WAIT_S_MIN = 0.0005
"""A timer may fire slightly early; without a minimum the wait would be repeated in a busy loop."""
SILENCE_S = 2.0
"""A peer that sends nothing for this time is lost: four heartbeats, and as long as a frontend waits for a router that hangs."""
RECONNECT_S_MIN, RECONNECT_S_MAX = 0.05, 1.0
"""Pause before a stream is opened again; doubles with each failure, up to the maximum."""


@dataclass(slots=True, eq=False)
class _PeerStream:
    """The outgoing half of one stream."""

    session: PeerSession
    wakeup: asyncio.Event
    is_over: bool = False

    def end(self) -> None:
        """The peer reads no more."""
        self.is_over = True
        self.wakeup.set()


@dataclass(slots=True, eq=False)
class _FollowedPeer:
    """A listed peer, and the task that keeps a stream to it."""

    address: str
    task: asyncio.Task[None]


class PeerStreams:
    """A running part."""

    def __init__(
        self,
        reservations: PeerReservations,
        registry: Registry,
        client: GrpcPeersClient,
        *,
        router_id: str,
        clock: Clock,
        generator: Random,
        settings: SyncSettings,
    ) -> None:
        self.reservations = reservations
        self._registry = registry
        self._client = client
        self._router_id = router_id
        self._clock = clock
        self._random = generator
        self._settings = settings
        self._followed: dict[str, _FollowedPeer] = {}
        self._unreachable: set[str] = set()
        self._serving_at_start: tuple[str, ...] = ()
        self._viewed = asyncio.Event()
        self._closing = asyncio.Event()
        self._streams: dict[_PeerStream, None] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None

    async def wait_viewed(self) -> None:
        await self._viewed.wait()

    @property
    def awaited(self) -> tuple[str, ...]:
        """Routers that took requests when this one started, can be reached, and have not sent their snapshot yet."""
        return tuple(
            name
            for name in self._serving_at_start
            if name not in self._unreachable and not self.reservations.has_snapshot_of(name)
        )

    def retry_pending(self) -> None:
        """Counts peers' reservations whose workers have become known. Otherwise that happens a few times a second."""
        self.reservations.retry_pending(now=self._clock.now())

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def run(self) -> None:
        """Follows the registry and opens streams until `aclose`."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._keep_retrying_pending(), name="peers-pending")
            async with aclosing(watch_members(self._registry, ROUTER, self._clock)) as views:
                async for view in views:
                    self._on_view(view)

    async def aclose(self) -> None:
        self.end_streams()
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait([running])

    def end_streams(self) -> None:
        """Sends the pending changes to every peer, then ends its stream. Opens no new stream."""
        self._closing.set()
        for stream in self._streams:
            stream.wakeup.set()

    async def serve(self, messages: AsyncIterator[PeerUpdate]) -> AsyncGenerator[PeerUpdate, None]:
        """The server's half of a stream that a peer opened."""
        if self._closing.is_set():
            raise UnavailableError("the router is stopping", reason="router_stopping")
        if sum(1 for _ in self.reservations) >= 2 * self._settings.peers_max:
            message = f"the router has streams with {2 * self._settings.peers_max} peers (2 * sync.peers_max)"
            raise OverloadedError(message, reason="peers_full", retry_after_s=1.0)
        stream = self._open()
        reading = asyncio.create_task(self._read(stream.session, messages), name="peer-read")
        # When the peer's half ends, `_outgoing` must end too.
        reading.add_done_callback(lambda _: stream.end())
        try:
            async with aclosing(self._outgoing(stream)) as outgoing:
                async for news in outgoing:
                    yield news
            if reading.done():
                reading.result()
        finally:
            # No await: gRPC may cancel a call that a failed write is ending already, and would skip what follows.
            reading.cancel()
            self._close(stream)

    def _on_view(self, view: View) -> None:
        if view.is_stale:
            return
        others = {each.instance_id: each for each in view.instances if each.instance_id != self._router_id}
        if not self._viewed.is_set():
            self._serving_at_start = tuple(name for name, each in others.items() if each.takes_requests)
            self._viewed.set()
        for name, followed in list(self._followed.items()):
            if name not in others or others[name].address != followed.address:
                followed.task.cancel()
                del self._followed[name]
        for name, each in others.items():
            # Only one of two routers opens the stream between them.
            is_ours = self._router_id < name and name not in self._followed
            if is_ours and self._tasks is not None and len(self._followed) < self._settings.peers_max:
                task = self._tasks.create_task(self._follow(each), name=f"peer-{name}")
                self._followed[name] = _FollowedPeer(each.address, task)

    async def _follow(self, peer: Instance) -> None:
        pause_s, logged_reason = RECONNECT_S_MIN, ""
        while not self._closing.is_set():
            was_open, problem = await self._exchange(peer)
            if was_open:
                pause_s = RECONNECT_S_MIN
            else:
                self._unreachable.add(peer.instance_id)
            if was_open or problem.reason != logged_reason:
                _log.warning(
                    "peer_stream_broken", router_id=peer.instance_id, reason=problem.reason, detail=problem.message
                )
                logged_reason = problem.reason
            await self._clock.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _exchange(self, peer: Instance) -> tuple[bool, MeshError]:
        """Opens a stream and uses it until it breaks. Returns whether the peer's snapshot arrived, and what broke the stream."""
        problem: MeshError = LostError("the stream has ended", reason="stream_ended", where=peer.instance_id)
        try:
            call = self._client.open(peer.address)
        except MeshError as error:
            return False, error
        stream = self._open()
        try:
            await run_together(self._read_to_end(stream.session, call.messages()), self._write(stream, call))
        except MeshError as error:
            # Its traceback has this frame: a reference cycle for each attempt to reach an unreachable peer.
            problem = error.with_traceback(None)
        finally:
            call.cancel()
            self._close(stream)
        return stream.session.has_snapshot, problem

    async def _write(self, stream: _PeerStream, call: PeerCall) -> None:
        async with aclosing(self._outgoing(stream)) as outgoing:
            async for news in outgoing:
                await call.send(news)
        raise LostError("this router is stopping", reason="router_stopping")

    async def _read_to_end(self, session: PeerSession, messages: AsyncIterator[PeerUpdate]) -> None:
        await self._read(session, messages)
        raise LostError("the peer ended the stream", reason="stream_ended")

    async def _read(self, session: PeerSession, messages: AsyncIterator[PeerUpdate]) -> None:
        """Applies the peer's messages. Raises DeadlineError when the peer is silent."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    news = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"no message for {SILENCE_S:g} s"
                raise DeadlineError(message, reason="silent", where=session.origin) from None
            is_first = not session.origin
            self.reservations.on_message(session, news, now=self._clock.now())
            if is_first:
                self._unreachable.discard(session.router_id)
                _log.info("peer_joined", router_id=session.router_id)

    async def _outgoing(self, stream: _PeerStream) -> AsyncGenerator[PeerUpdate, None]:
        """Yields messages when they are to be sent. Ends when this router stops or the peer reads no more."""
        settings, updates = self._settings, stream.session.updates
        sent_at = -settings.heartbeat_s
        while not stream.is_over:
            if updates.is_overrun:
                raise OverloadedError("the peer does not read this router's messages", reason="peer_behind")
            is_closing = self._closing.is_set()
            pause_s = settings.interval_s if updates else settings.heartbeat_s
            left_s = sent_at + pause_s - self._clock.now()
            if updates.is_due or left_s <= 0 or (is_closing and updates):
                sent_at = self._clock.now()
                yield self.reservations.next_message(stream.session, now=sent_at)
            elif is_closing:
                return
            else:
                # There was no await since the checks above, so no wakeup is lost.
                stream.wakeup.clear()
                await _wait(stream.wakeup, max(WAIT_S_MIN, left_s))

    async def _keep_retrying_pending(self) -> None:
        while True:
            # Without a peer no reservations arrive, and those of the last one end with a grace of seconds.
            await self._clock.sleep(self._settings.heartbeat_s / 4 if self._streams else self._settings.heartbeat_s * 2)
            self.retry_pending()

    def _open(self) -> _PeerStream:
        stream = _PeerStream(self.reservations.open_session(), asyncio.Event())
        stream.session.updates.on_change = stream.wakeup.set
        self._streams[stream] = None
        return stream

    def _close(self, stream: _PeerStream) -> None:
        del self._streams[stream]
        self.reservations.close_session(stream.session, now=self._clock.now())
        if stream.session.router_id:
            _log.info("peer_left", router_id=stream.session.router_id)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
