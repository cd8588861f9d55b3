"""KV transfers inside one process, for simulations on virtual time and for tests. Faults and delays can be set."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import Clock
from kvmesh.errors import KvLostError, UnavailableError
from kvmesh.kv.transport import Listener, Memory, Piece


@dataclass(slots=True, kw_only=True)
class MemoryKvNetwork:
    """Shared by all transports of one simulation. Bandwidth in bytes per second; 0: unlimited."""

    clock: Clock
    latency_s: float = 0.0
    bandwidth: float = 0.0
    fails_pulls: bool = False
    """True: every pull fails as if the peer were gone."""
    hangs_pulls: bool = False
    """True: pulls do not end until they time out."""
    peers: dict[bytes, "MemoryTransport"] = field(default_factory=dict)
    _names: int = 0

    def next_name(self) -> bytes:
        self._names += 1
        return b"memory-%d" % self._names


class MemoryTransport:
    """KvTransport by copying."""

    def __init__(self, network: MemoryKvNetwork) -> None:
        self._network = network
        self._metadata = network.next_name()
        self._memory: Memory | None = None
        self._listener: Listener | None = None

    async def start(self, memory: Memory, listener: Listener) -> None:
        self._memory, self._listener = memory, listener
        self._network.peers[self._metadata] = self

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Coroutine[Any, Any, None]:
        """See KvTransport. Never completes immediately."""
        return self._pull(peer, pieces, timeout_s)

    async def _pull(self, peer: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Waits for the latency plus the bytes divided by the bandwidth, then copies."""
        if self._memory is None:
            raise UnavailableError("the KV transport is not running")
        network = self._network
        transfer_s = network.latency_s + (_bytes(pieces) / network.bandwidth if network.bandwidth else 0.0)
        if network.hangs_pulls or transfer_s > timeout_s:
            await network.clock.sleep(timeout_s)
            raise KvLostError("the pull did not end in time", reason="kv_pull_timeout")
        await network.clock.sleep(transfer_s)
        source = network.peers.get(peer)
        if source is None or source._memory is None or network.fails_pulls:
            raise KvLostError("the peer that held the KV is gone", reason="kv_peer_lost")
        if any(
            remote + size > source._memory.size or local + size > self._memory.size for remote, local, size in pieces
        ):
            raise KvLostError("the handle points outside the peer's memory", reason="kv_payload")
        for remote, local, size in pieces:
            # Copied at the end of the transfer: blocks that the source has reused meanwhile arrive with other content, as over a network.
            self._memory[local : local + size] = source._memory[remote : remote + size]

    async def notify(self, peer: bytes, message: bytes) -> None:
        """Delivers after the network's latency. A closed transport sends nothing."""
        if self._network.peers.get(self._metadata) is not self:
            return
        if self._network.latency_s:
            await self._network.clock.sleep(self._network.latency_s)
        target = self._network.peers.get(peer)
        if target is not None and target._listener is not None:
            target._listener(message)

    def expect_messages(self, is_expecting: bool) -> None:
        """Messages are delivered immediately; there is nothing to poll."""

    async def aclose(self) -> None:
        self._network.peers.pop(self._metadata, None)
        self._memory = self._listener = None


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(size for _, _, size in pieces)
