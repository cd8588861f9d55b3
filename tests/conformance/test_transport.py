"""What every KV transport guarantees (`kvmesh.kv.transport`), in memory and over real NIXL."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import KvLostError, MeshError
from kvmesh.kv.transport import KvTransport, Memory, Piece
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from tests.integration.mesh import stop_process
from tests.parts import require_part
from tests.patience import PATIENCE_S

SIZE = 1 << 16


async def pull(reader: KvTransport, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> None:
    """Runs a pull to its end, immediate or not."""
    rest = reader.pull_nowait(peer, pieces, timeout_s=timeout_s)
    if rest is not None:
        await rest


class Ends:
    """Two transports with memory: `source` has numbered bytes, `reader` zeros. `make` creates more."""

    def __init__(self, make: Callable[[], KvTransport], stack: AsyncExitStack) -> None:
        self._make, self._stack = make, stack
        self.messages: list[bytes] = []

    async def open(self) -> "Ends":
        self.source, self.source_memory = await self.start(np.arange(SIZE, dtype=np.uint32).astype(np.uint8))
        self.reader, self.reader_memory = await self.start(np.zeros(SIZE, np.uint8))
        return self

    async def start(self, memory: Memory) -> tuple[KvTransport, Memory]:
        transport = self._make()
        self._stack.push_async_callback(transport.aclose)
        await transport.start(memory, self.messages.append)
        return transport, memory


@dataclass
class TransportProcess:
    """A NIXL transport in a separate process that uses only TCP: a stopped process does not send."""

    process: asyncio.subprocess.Process

    @classmethod
    @asynccontextmanager
    async def start(cls, role: str, before: Sequence[str] = ()) -> AsyncIterator["TransportProcess"]:
        """`before`: the words before the command, such as those that choose a network namespace."""
        process = await asyncio.create_subprocess_exec(
            *before, sys.executable, "-m", "tests.conformance.transport_process", role,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal"},
        )  # fmt: skip
        try:
            yield cls(process)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def say(self, order: str) -> str:
        """Sends an order and returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()


@pytest.fixture(params=["memory", "nixl"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    network = MemoryKvNetwork(clock=SystemClock())

    def make() -> KvTransport:
        if request.param == "memory":
            return MemoryTransport(network)
        require_part("nixl")
        from kvmesh.kv.nixl_transport import NixlTransport

        return NixlTransport()

    async with AsyncExitStack() as stack:
        yield await Ends(make, stack).open()


async def test_pull_copies_exactly_the_runs(ends: Ends) -> None:
    """Scattered runs arrive at their places, and no other byte changes."""
    remote, local = [0, 4096, 300, 60000], [512, 1024, 40000, 5000]
    pieces = [(theirs, mine, 500) for theirs, mine in zip(remote, local, strict=True)]
    await pull(ends.reader, ends.source.metadata, pieces, timeout_s=PATIENCE_S)
    expected = np.zeros(SIZE, np.uint8)
    for theirs, mine in zip(remote, local, strict=True):
        expected[mine : mine + 500] = ends.source_memory[theirs : theirs + 500]
    assert np.array_equal(ends.reader_memory, expected)


async def test_many_pulls_at_once(ends: Ends) -> None:
    """Concurrent pulls do not disturb each other."""
    pulls = [
        pull(ends.reader, ends.source.metadata, [(i * 1024, i * 1024, 1024)], timeout_s=PATIENCE_S)
        for i in range(SIZE // 1024)
    ]
    await asyncio.gather(*pulls)
    assert np.array_equal(ends.reader_memory, ends.source_memory)


async def test_message_reaches_the_listener(ends: Ends) -> None:
    """A transport that expects messages delivers them to its listener."""
    ends.source.expect_messages(True)
    await ends.reader.notify(ends.source.metadata, b"release:1")
    async with asyncio.timeout(PATIENCE_S):
        while ends.messages != [b"release:1"]:
            await asyncio.sleep(0.005)


async def test_closed_peer(ends: Ends) -> None:
    """A pull from a closed peer raises KvLostError as soon as the reader notices that. A message to the peer is dropped, and pulls from other
    peers still work."""
    await pull(ends.reader, ends.source.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)
    gone = ends.source.metadata
    await ends.source.aclose()
    with pytest.raises(KvLostError):  # noqa: PT012 (the loop ends by the error)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await pull(ends.reader, gone, [(0, 0, 64)], timeout_s=PATIENCE_S)
                await asyncio.sleep(0.005)
    await ends.reader.notify(gone, b"hello")
    other, _ = await ends.start(np.full(SIZE, 7, np.uint8))
    await pull(ends.reader, other.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)
    assert ends.reader_memory[:64].tolist() == [7] * 64


@pytest.mark.parametrize("peer", [b"", b"nobody", b"NXL1" + b"\0" * 300])
async def test_unknown_peer(ends: Ends, peer: bytes) -> None:
    """A pull with metadata of an unknown peer raises KvLostError."""
    with pytest.raises(KvLostError):
        await pull(ends.reader, peer, [(0, 0, 64)], timeout_s=PATIENCE_S)


async def test_outside_the_memory(ends: Ends) -> None:
    """Offsets past either end are rejected, and nothing is copied."""
    for is_met in (False, True):
        for remote, local in ((SIZE - 10, 0), (0, SIZE - 10), (SIZE - 63, 0), (0, SIZE - 63)):
            with pytest.raises(KvLostError) as caught:
                await pull(ends.reader, ends.source.metadata, [(0, 0, 64), (remote, local, 64)], timeout_s=PATIENCE_S)
            # The transport checks this itself, because the network would report such a pull as the peer's death.
            assert caught.value.reason == "kv_payload"
        assert not ends.reader_memory.any()
        if not is_met:
            await pull(ends.reader, ends.source.metadata, [(SIZE - 64, SIZE - 64, 64)], timeout_s=PATIENCE_S)
            assert np.array_equal(ends.reader_memory[-64:], ends.source_memory[-64:])
            ends.reader_memory[:] = 0


async def test_cancel(ends: Ends) -> None:
    """A cancelled pull ends soon and writes nothing afterwards. The transport stays usable."""
    for turns in range(6):
        pulling = asyncio.create_task(pull(ends.reader, ends.source.metadata, [(64, 0, 4096)], timeout_s=PATIENCE_S))
        for _ in range(turns):
            await asyncio.sleep(0)
        pulling.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(pulling, return_exceptions=True)
        ends.reader_memory[:4096] = 0
        await asyncio.sleep(0.01)
        assert not ends.reader_memory[:4096].any()
    await pull(ends.reader, ends.source.metadata, [(64, 0, 4096)], timeout_s=PATIENCE_S)
    assert ends.reader_memory[:4096].any()


async def test_a_pull_in_progress_is_cancelled_at_any_moment(ends: Ends) -> None:
    """A pull can be cancelled even before its first step. It writes nothing after its end, and the transport stays usable."""
    await pull(ends.reader, ends.source.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)
    for turns in range(4):
        ends.reader_memory[:] = 0
        rest = ends.reader.pull_nowait(ends.source.metadata, [(64, 0, 4096)], timeout_s=PATIENCE_S)
        if rest is None:
            assert np.array_equal(ends.reader_memory[:4096], ends.source_memory[64:4160])
            continue
        pulling = asyncio.ensure_future(rest)
        for _ in range(turns):
            await asyncio.sleep(0)
        pulling.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(pulling, return_exceptions=True)
        ends.reader_memory[:] = 0
        await asyncio.sleep(0.01)
        assert not ends.reader_memory.any()
    await pull(ends.reader, ends.source.metadata, [(64, 0, 4096)], timeout_s=PATIENCE_S)
    assert ends.reader_memory[:4096].any()


@pytest.mark.parametrize("how", ["pull", "cancel"])
async def test_an_abandoned_pull_writes_nothing_later(how: str) -> None:
    """The source is stopped during a read over TCP, and continues after the reader's timeout or cancel.

    By then the reader has given the memory to another request, and late bytes would make its tokens wrong.
    """
    require_part("nixl")
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(TransportProcess.start("source"))
        reader = await stack.enter_async_context(TransportProcess.start("reader"))
        peer = await source.say("metadata")
        assert await reader.say(f"pull {peer} {PATIENCE_S}") == "pulled"
        await stop_process(source.process.pid)
        # The reader gives up before the source continues. Otherwise a reader that is slow to run would get all bytes first.
        assert await reader.say(f"announced {how} {peer} 0.2") == "abandoned"
        pulling = asyncio.create_task(reader.answer())
        await asyncio.sleep(1.0)
        assert not pulling.done(), "the source has not sent the requested bytes"
        source.process.send_signal(signal.SIGCONT)
        # From here on the memory belongs to the reader.
        assert await pulling in ("kv_pull_timeout", "cancelled")
        assert await reader.say("clear") == "clear"
        assert await source.say("metadata") == peer
        assert await reader.say("look") == "clear"
        assert await reader.say(f"pull {peer} {PATIENCE_S}") == "pulled"


async def test_a_stopped_source_does_not_block_close_or_cancel_forever() -> None:
    """If the source is killed, an abandoned pull ends. A transport closes although one of its pulls cannot end."""
    require_part("nixl")
    async with AsyncExitStack() as stack:
        source, other = [await stack.enter_async_context(TransportProcess.start("source")) for _ in range(2)]
        reader = await stack.enter_async_context(TransportProcess.start("reader"))
        peers = [await each.say("metadata") for each in (source, other)]
        for peer in peers:
            assert await reader.say(f"pull {peer} {PATIENCE_S}") == "pulled"
        await stop_process(source.process.pid)
        await stop_process(other.process.pid)
        pulling = asyncio.create_task(reader.say(f"pull {peers[0]} 0.2"))
        await asyncio.sleep(0.5)
        source.process.kill()
        assert await pulling in ("kv_pull_timeout", "kv_peer_lost")
        assert await reader.say(f"close-in-pull {peers[1]}") == "closed"
        assert reader.process.stdin is not None
        reader.process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.process.wait() == 0


@pytest.mark.parametrize("peers_max", [1, 2])
async def test_peers_beyond_the_limit_are_dropped(peers_max: int) -> None:
    """The least recently used peer is dropped, and connected again when needed."""
    require_part("nixl")
    from kvmesh.kv.nixl_transport import NixlTransport

    async with AsyncExitStack() as stack:
        # Only a peer from which the reader has read before is read within the call itself.
        ends = Ends(lambda: NixlTransport(peers_max=peers_max), stack)
        reader, mine = await ends.start(np.zeros(SIZE, np.uint8))
        sources = [(await ends.start(np.full(SIZE, 1 + i, np.uint8)))[0] for i in range(peers_max + 1)]
        for _ in range(3):
            for i, source in enumerate(sources):
                rest = reader.pull_nowait(source.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)
                assert rest is not None, "the peer was not dropped"
                await rest
                assert mine[:64].tolist() == [1 + i] * 64
                assert len(reader._peers) <= peers_max


async def test_small_pulls_from_a_known_peer_complete_immediately() -> None:
    """Small pulls from a known peer on the same machine complete within the call, without a thread. Larger ones, and all pulls with
    `inline_bytes_max=0`, do not."""
    require_part("nixl")
    from kvmesh.kv.nixl_transport import NixlTransport

    source, reader, careful = NixlTransport(), NixlTransport(inline_bytes_max=4096), None
    try:
        careful = NixlTransport(inline_bytes_max=0)
        memory = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
        mine = np.zeros(SIZE, np.uint8)
        await source.start(memory, lambda _: None)
        for each in (reader, careful):
            await each.start(mine, lambda _: None)
            await pull(each, source.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)
        quick = []
        for _ in range(20):
            quick.append(rest := reader.pull_nowait(source.metadata, [(100, 0, 4096)], timeout_s=PATIENCE_S))
            if rest is not None:
                await rest
        assert quick.count(None) >= 10, "most pulls must complete within the call"
        assert np.array_equal(mine[:4096], memory[100:4196])
        for each, size in ((reader, 4097), (careful, 64)):
            rest = each.pull_nowait(source.metadata, [(0, 0, size)], timeout_s=PATIENCE_S)
            assert rest is not None
            await rest
    finally:
        for each in filter(None, (source, reader, careful)):
            await each.aclose()


async def test_close_is_idempotent_and_refuses_afterwards(ends: Ends) -> None:
    """Closing twice is no error, and a pull on a closed transport raises MeshError."""
    await ends.reader.aclose()
    await ends.reader.aclose()
    with pytest.raises(MeshError):
        await pull(ends.reader, ends.source.metadata, [(0, 0, 64)], timeout_s=PATIENCE_S)


async def test_pull_times_out_on_a_hanging_network() -> None:
    """The timeout ends a pull if the network does not respond."""
    network = MemoryKvNetwork(clock=SystemClock(), hangs_pulls=True)
    source, reader = MemoryTransport(network), MemoryTransport(network)
    for transport in (source, reader):
        await transport.start(np.zeros(64, np.uint8), lambda _: None)
    with pytest.raises(KvLostError) as caught:
        await pull(reader, source.metadata, [(0, 0, 64)], timeout_s=0.02)
    assert caught.value.reason == "kv_pull_timeout"


async def test_the_pull_after_a_message_does_not_wait_for_it() -> None:
    """NIXL's first transfer after a message is slow; `notify` makes that transfer itself."""
    require_part("nixl")
    from kvmesh.kv.nixl_transport import NixlTransport

    async with AsyncExitStack() as stack:
        ends = await Ends(NixlTransport, stack).open()
        await pull(ends.reader, ends.source.metadata, [(0, 0, 1024)], timeout_s=PATIENCE_S)
        at_once = 0
        for _ in range(20):
            await ends.reader.notify(ends.source.metadata, b"release:1")
            rest = ends.reader.pull_nowait(ends.source.metadata, [(0, 0, 1024)], timeout_s=PATIENCE_S)
            at_once += rest is None
            if rest is not None:
                await rest
        assert at_once > 10
