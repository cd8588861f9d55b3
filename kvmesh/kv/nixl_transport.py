"""A KV transport over NIXL's UCX backend (nixl 1.5). The only file that imports nixl, in `start`.

Most calls into NIXL run on a thread: the import takes a second, and between processes of one machine the call that posts a transfer
copies the data. The event loop itself posts small pulls. An agent is not thread-safe, so each call takes a lock.
"""

import asyncio
import importlib.util
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from kvmesh.errors import KvLostError, MeshError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.kv.nixl_api import api_module, set_progress_delay
from kvmesh.kv.tcp_limits import TCP_LIMITS
from kvmesh.kv.transport import Listener, Memory, Piece

_log = event_logger(__name__)
T = TypeVar("T")

_HEAD = Struct("<4sQQ")
_MAGIC = b"NXL1"
_leaked: list[Memory | None] = []
"""Memory of closed transports to which transfers may still write. It is never freed."""
POLLS = 4
"""Polls of a new transfer on the NIXL thread before the pull becomes asynchronous."""
PAUSE_S = 0.0002
"""Pause before the second poll of a transfer."""
_DEFAULT_ENVIRON = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    # UCX allocates 2 MiB for each of its two kinds of shared memory. It needs one, and reads KV by neither.
    "UCX_TLS": "^sysv",
    **TCP_LIMITS,
}
PROGRESS_DELAY_US = 100_000
"""Longest sleep of the progress thread. UCX's events wake it; this bounds the delay of missed events, of which there were none in tests
with a whole second. At NIXL's default of 0 the thread uses a core, at 4000 it wakes 240 times a second for nothing."""
MESSAGE_POLL_S = 0.02
"""Poll interval for messages while any may arrive. They only report that KV may be freed."""
POLL_S_MAX = 0.005
"""Longest pause between two polls of a transfer; the first ones are shorter."""
CLOSE_S = 5.0
"""Longest wait for running transfers when the transport closes."""
INLINE_BYTES_MAX = 1 << 20
"""The event loop posts pulls up to this size: copying them takes 0.1 ms, a hop to the thread takes longer."""
PEERS_MAX = 1024
"""Known peers; the least recently used one is removed."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    """A peer's agent name, and address and size of its memory.

    `is_proven`: a transfer from it has succeeded. `is_lost`: a transfer has failed, and the peer is removed after its last transfer.
    """

    name: str
    base: int
    size: int
    is_proven: bool = False
    is_lost: bool = False


class NixlTransport:
    """KvTransport over NIXL. Agent names are random, since a peer refuses a new agent under a known name."""

    def __init__(
        self, *, inline_bytes_max: int = INLINE_BYTES_MAX, peers_max: int = PEERS_MAX, close_s: float = CLOSE_S
    ) -> None:
        if importlib.util.find_spec("nixl") is None:
            raise UnavailableError("the package nixl is not installed", reason="nixl_missing")
        _check_tls(os.environ.get("UCX_TLS", ""))
        self._inline_bytes_max = inline_bytes_max
        self._peers_max = peers_max
        self._close_s = close_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._agent: Any = None
        self._agent_lock = Lock()
        self._base = 0
        self._nixl_errors: tuple[type[Exception], ...] = ()
        self._registrations: list[Any] = []
        self._memory: Memory | None = None
        self._spare = np.zeros(1, np.uint8)
        self._spare_base = self._spare.ctypes.data
        """Destination of the byte that is read after a message."""
        self.metadata = b""
        """Base address, size, then NIXL's own metadata; about 500 bytes."""
        self._ready: asyncio.Event = asyncio.Event()
        self._expecting: asyncio.Event = asyncio.Event()
        self._peers: dict[bytes, _Peer] = {}
        self._running: dict[Any, bytes] = {}
        """Handles of transfers that may still write to the memory, with their peers. NIXL reports a transfer as failed once its peer is
        removed, although its bytes still arrive. So a peer with running transfers is not removed."""
        self._pulls: set[asyncio.Future[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self, memory: Memory, listener: Listener) -> None:
        """See KvTransport. Takes one to two seconds, on the thread."""
        self._memory, self._base = memory, memory.ctypes.data
        await self._submit(self._create, memory)
        self._listening = asyncio.create_task(self._listen(listener), name="nixl-messages")
        self._ready.set()

    def _create(self, memory: Memory) -> None:
        for name, value in _DEFAULT_ENVIRON.items():
            os.environ.setdefault(name, value)
        api = importlib.import_module(api_module())
        self._nixl_errors = tuple(
            value for name, value in vars(api.nixlBind).items() if name.endswith("Error") and isinstance(value, type)
        )
        set_progress_delay(api, PROGRESS_DELAY_US)
        try:
            self._agent = api.nixl_agent(f"kvmesh-{secrets.token_hex(8)}", api.nixl_agent_config())
        except self._nixl_errors as error:
            devices, ports = (os.environ.get(name, "") for name in ("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE"))
            raise UnavailableError(
                f"NIXL cannot start UCX ({error}) with UCX_NET_DEVICES={devices} and UCX_TCP_PORT_RANGE={ports};"
                " is the interface up, and is a port of the range free?",
                reason="nixl_backend",
                field="UCX_NET_DEVICES",
            ) from error
        self._register(memory)
        head = _HEAD.pack(_MAGIC, memory.ctypes.data, memory.size)
        self.metadata = head + self._agent.get_agent_metadata()
        self._register(self._spare)  # After the metadata was read: peers need not know this memory.

    def _register(self, memory: Memory) -> None:
        self._registrations.append(self._agent.register_memory([(memory.ctypes.data, memory.size, 0, "")], "DRAM"))

    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Awaitable[None] | None:
        """See KvTransport. After a timeout or a cancel, the awaitable ends when the transfer no longer writes to the memory.

        Posts a small pull directly if that cannot block: the NIXL thread is idle and a transfer from the peer has succeeded before. Between
        processes of one machine the copy is then complete, sooner than a thread could be woken.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        if not self._is_quick(peer, pieces) or not self._agent_lock.acquire(blocking=False):
            return self._pull(peer, pieces, deadline_s)
        try:
            # One poll: further ones would sleep, and this is the event loop's thread.
            handle = self._post(peer, pieces, polls=1)
        finally:
            self._agent_lock.release()
        return None if handle is None else self._follow(handle, peer, deadline_s=deadline_s)

    def _is_quick(self, peer: bytes, pieces: Sequence[Piece]) -> bool:
        if not self._is_proven(peer):
            return False
        return sum(size for _, _, size in pieces) <= self._inline_bytes_max

    def _is_proven(self, peer: bytes) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.is_proven and not self._is_closed

    async def _pull(self, peer: bytes, pieces: Sequence[Piece], deadline_s: float) -> None:
        if not self._ready.is_set():
            await self._wait_ready(deadline_s)
        # Closing waits for this future: the transfer has no handle in `_running` until the thread has posted it.
        is_over = asyncio.get_running_loop().create_future()
        self._pulls.add(is_over)
        try:
            await self._pull_by_thread(peer, pieces, deadline_s)
        finally:
            self._pulls.discard(is_over)
            is_over.set_result(None)

    async def _pull_by_thread(self, peer: bytes, pieces: Sequence[Piece], deadline_s: float) -> None:
        posting = self._submit(self._post, peer, pieces)
        try:
            # The thread posts the transfer even after a cancel, and `_abandon` needs its handle.
            handle = await asyncio.shield(posting)
        except asyncio.CancelledError:
            await _wait_uninterrupted(asyncio.create_task(self._abandon(posting, peer), name="nixl-abandon"))
            raise
        if handle is not None:
            await self._follow(handle, peer, deadline_s=deadline_s)

    def _follow(self, handle: Any, peer: bytes, *, deadline_s: float, pause_s: float = PAUSE_S) -> "_Following":
        """Returns a future that ends with a running transfer. The first poll is after `pause_s`."""
        stop = asyncio.Event()
        following = _Following(
            asyncio.create_task(self._transfer(handle, peer, deadline_s=deadline_s, pause_s=pause_s, stop=stop)), stop
        )
        self._pulls.add(following)
        following.add_done_callback(self._pulls.discard)
        return following

    async def _wait_ready(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise KvLostError("the KV transport did not start in time", reason="kv_transport_starting") from error

    async def _abandon(self, posting: asyncio.Future[Any], peer: bytes) -> None:
        """Ends a transfer whose caller was cancelled, possibly before the transfer was posted."""
        try:
            handle = await posting
        except MeshError:
            return
        if handle is not None:
            await self._abort(handle)

    async def _transfer(
        self, handle: Any, peer: bytes, *, deadline_s: float, pause_s: float, stop: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(pause_s)
        while not await self._call(self._is_done, handle, peer, 1, is_quick=True):
            if stop.is_set() or loop.time() >= deadline_s:
                await self._abort(handle)
                raise KvLostError("the pull did not end in time", reason="kv_pull_timeout")
            pause_s = min(2 * pause_s, POLL_S_MAX)
            await asyncio.sleep(pause_s)

    def _post(self, peer: bytes, pieces: Sequence[Piece], polls: int = POLLS) -> Any:
        """Starts a transfer and polls it. Returns None when it is complete, else its handle."""
        assert self._memory is not None
        known = self._get_peer(peer)
        local_base, local_size = self._base, self._memory.size
        if any(remote + size > known.size or local + size > local_size for remote, local, size in pieces):
            raise KvLostError("the handle points outside the peer's memory", reason="kv_payload")
        runs = [(known.base + remote, local_base + local, size) for remote, local, size in pieces]
        return self._start_transfer(peer, known, runs, polls=polls)

    def _start_transfer(self, peer: bytes, known: _Peer, runs: list[Piece], *, polls: int) -> Any:
        """`_post` with addresses instead of offsets."""
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(local, size, 0) for _, local, size in runs], "DRAM"),
                agent.get_xfer_descs([(remote, size, 0) for remote, _, size in runs], "DRAM"),
                known.name,
            )
            state = agent.transfer(handle)
            if state == "DONE":
                self._release(handle, peer)
                return None
        except self._nixl_errors as error:
            raise self._lost(peer, f"{type(error).__name__} while posting") from error
        if state == "ERR":
            raise self._lost(peer, "the transfer could not be posted")
        # Before the first poll, which may end the transfer.
        self._running[handle] = peer
        return None if self._is_done(handle, peer, polls) else handle

    def _get_peer(self, peer: bytes) -> _Peer:
        """Returns the peer. The first call for it loads its metadata."""
        if self._agent is None:
            raise UnavailableError("the KV transport is not running", reason="kv_transport_closed")
        # Added again below: the order of `_peers` is that of their use.
        known = self._peers.pop(peer, None)
        if known is None:
            known = self._add_peer(peer)
        self._peers[peer] = known
        if len(self._peers) > self._peers_max:
            running = {peer, *self._running.values()}
            if (oldest := next((each for each in self._peers if each not in running), None)) is not None:
                self._remove_peer(oldest)
        return known

    def _add_peer(self, peer: bytes) -> _Peer:
        if len(peer) <= _HEAD.size or not peer.startswith(_MAGIC):
            raise KvLostError("the handle does not name a NIXL peer", reason="kv_payload")
        _, base, size = _HEAD.unpack_from(peer)
        try:
            name = self._agent.add_remote_agent(peer[_HEAD.size :])
        except self._nixl_errors as error:
            raise KvLostError(f"{type(error).__name__} while connecting to the peer", reason="kv_peer_lost") from error
        return _Peer(name=name.decode() if isinstance(name, bytes) else str(name), base=base, size=size)

    def _remove_peer(self, peer: bytes) -> None:
        """Removes a peer, or marks it as lost while one of its transfers runs."""
        known = self._peers.get(peer)
        if known is None or self._agent is None:
            return
        if peer in self._running.values():
            known.is_lost, known.is_proven = True, False
            return
        del self._peers[peer]
        try:
            self._agent.remove_remote_agent(known.name)
        except self._nixl_errors as error:
            _log.warning("nixl_peer_not_forgotten", error=type(error).__name__)

    def _lost(self, peer: bytes, what: str) -> KvLostError:
        self._remove_peer(peer)
        return KvLostError(f"the peer that held the KV is gone ({what})", reason="kv_peer_lost")

    def _release(self, handle: Any, peer: bytes) -> None:
        self._agent.release_xfer_handle(handle)
        if (known := self._peers.get(peer)) is not None:
            known.is_proven = not known.is_lost
        self._ended(handle)

    def _ended(self, handle: Any) -> None:
        """Call this when a transfer no longer writes. Removes a lost peer after its last transfer."""
        peer = self._running.pop(handle, None)
        if peer is not None and (known := self._peers.get(peer)) is not None and known.is_lost:
            self._remove_peer(peer)

    def _is_done(self, handle: Any, peer: bytes, polls: int = POLLS) -> bool:
        """Polls a few times within a millisecond, since most transfers are complete by then."""
        try:
            state = self._agent.check_xfer_state(handle)
            for _ in range(polls - 1):
                if state != "PROC":
                    break
                time.sleep(0.0002)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._release(handle, peer)
                return True
        except self._nixl_errors as error:
            self._ended(handle)
            raise self._lost(peer, f"{type(error).__name__} in transfer") from error
        if state == "ERR":
            self._ended(handle)
            raise self._lost(peer, "transfer failed")
        return False

    async def _abort(self, handle: Any) -> None:
        """Waits until an abandoned transfer no longer writes to the memory.

        NIXL cannot stop a transfer: over TCP its bytes still arrive after the transfer was released, its peer removed or the memory
        deregistered (nixl 1.5.1). So this waits until the peer sends or dies. While a peer's process is suspended, the memory stays in
        use. The request's own deadline bounds the wait of its caller.
        """
        pause_s = PAUSE_S
        while not await self._submit(self._try_end, handle):
            pause_s = min(2 * pause_s, POLL_S_MAX)
            await asyncio.sleep(pause_s)

    def _try_end(self, handle: Any) -> bool:
        """Releases the transfer if it has ended. True: it has."""
        try:
            if self._agent.check_xfer_state(handle) == "PROC":
                return False
        except self._nixl_errors as error:
            _log.info("nixl_transfer_abandoned", error=type(error).__name__)
        try:
            self._agent.release_xfer_handle(handle)
        except self._nixl_errors as error:
            _log.warning("nixl_transfer_not_released", error=type(error).__name__)
        self._ended(handle)
        return True

    async def notify(self, peer: bytes, message: bytes) -> None:
        await self._ready.wait()
        handle = await self._call(self._send, peer, message, is_quick=self._is_proven(peer))
        if handle is not None:
            deadline_s = asyncio.get_running_loop().time() + self._close_s
            with suppress(MeshError):
                await self._follow(handle, peer, deadline_s=deadline_s, pause_s=POLL_S_MAX)

    def _send(self, peer: bytes, message: bytes) -> Any:
        """Sends a message, then reads a byte from the peer. Returns what `_post` returns.

        The first transfer after a message waits until UCX has sent the message, mostly for 0.2 ms, sometimes for several. The byte takes
        that wait, so that no pull has to.
        """
        try:
            known = self._get_peer(peer)
            self._agent.send_notif(known.name, message)
            return self._start_transfer(peer, known, [(known.base, self._spare_base, 1)], polls=1)
        except (KvLostError, UnavailableError):
            return None
        except self._nixl_errors:
            self._remove_peer(peer)
            return None

    def expect_messages(self, is_expecting: bool) -> None:
        if is_expecting:
            self._expecting.set()
        else:
            self._expecting.clear()

    async def _listen(self, listener: Listener) -> None:
        while True:
            await self._expecting.wait()
            for messages in (await self._call(self._receive, is_quick=True)).values():
                for message in messages:
                    listener(message)
            await asyncio.sleep(MESSAGE_POLL_S)

    def _receive(self) -> dict[str, list[bytes]]:
        if self._agent is None:
            return {}
        messages: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return messages

    async def _call(self, function: Callable[..., T], *arguments: Any, is_quick: bool) -> T:
        """Calls a function directly if `is_quick` (it cannot block) and the agent is not in use, otherwise on the NIXL thread."""
        if is_quick and self._agent_lock.acquire(blocking=False):
            try:
                return function(*arguments)
            finally:
                self._agent_lock.release()
        return await self._submit(function, *arguments)

    def _submit(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Runs a function on the NIXL thread. Cancelling does not stop the function."""
        if self._is_closed:
            raise UnavailableError("the KV transport is closed", reason="kv_transport_closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, self._locked, function, *arguments)

    def _locked(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._agent_lock:
            return function(*arguments)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        if self._listening is not None:
            self._listening.cancel()
        if self._pulls:
            await _wait_uninterrupted(asyncio.create_task(self._wait_pulls(), name="nixl-close"))
        # Not earlier, since the polls of running pulls need `_submit`.
        self._is_closed = True
        if self._running:
            _leaked.append(self._memory)
        # After whatever the thread still does. The event loop does not wait for it.
        self._thread.submit(self._locked, self._destroy)
        self._thread.shutdown(wait=False)

    async def _wait_pulls(self) -> None:
        """Waits until no pull runs, at most `close_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._close_s
        while self._pulls and (left_s := deadline_s - loop.time()) > 0:
            await asyncio.wait(self._pulls, timeout=left_s)

    def _destroy(self) -> None:
        """Deregisters the memory. A peer on the same machine can still read it until it notices the disconnect."""
        agent, self._agent, self._memory = self._agent, None, None
        if agent is None:
            return
        try:
            for known in self._peers.values():
                agent.remove_remote_agent(known.name)
            for registration in self._registrations:
                agent.deregister_memory(registration)
        except self._nixl_errors as error:
            _log.warning("nixl_agent_not_closed", error=type(error).__name__)


class _Following(asyncio.Future[None]):
    """The end of a task. `cancel` asks the task to stop and takes effect when it has, so callers need not shield this future."""

    def __init__(self, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        super().__init__()
        self._stop = stop
        task.add_done_callback(self._on_done)

    def cancel(self, msg: Any = None) -> bool:
        """Takes effect when the task has ended."""
        if self.done():
            return False
        self._stop.set()
        return True

    def _on_done(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        # A cancel counts even if the transfer has completed since: its caller expects no result.
        if self._stop.is_set() or task.cancelled():
            super().cancel()
        elif failure is not None:
            self.set_exception(failure)
        else:
            self.set_result(None)


async def _wait_uninterrupted(task: asyncio.Future[None]) -> None:
    """Waits until a bounded task has ended, then raises a cancel that arrived during the wait. Ignores the task's error."""
    was_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            was_cancelled = True
    if not task.cancelled():
        task.exception()
    if was_cancelled:
        raise asyncio.CancelledError


def _check_tls(value: str) -> None:
    """UCX without tcp hangs when peers connect."""
    if value and not value.startswith("^") and not {"all", "tcp"} & set(value.split(",")):
        raise UnavailableError("UCX_TLS must contain tcp", reason="nixl_settings", field="UCX_TLS")
