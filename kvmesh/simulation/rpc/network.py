"""All addresses of a mesh in one event loop, and faults between them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.channels import ChannelInterceptor, ChannelPool
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.rpc.channel import MemoryChannel
from kvmesh.simulation.rpc.exchange import CallStatus, Limits, MemoryExchange
from kvmesh.simulation.rpc.pipe import MemoryLink
from kvmesh.simulation.rpc.server import MemoryServer

_REFUSED = CallStatus(code=grpc.StatusCode.UNAVAILABLE, details="failed to connect to all addresses")
_KILLED = CallStatus(code=grpc.StatusCode.UNAVAILABLE, details="Socket closed")
_RESET = CallStatus(code=grpc.StatusCode.UNAVAILABLE, details="Connection reset by peer")
_SILENT = CallStatus(code=grpc.StatusCode.UNAVAILABLE, details="keepalive watchdog timeout")

_Ends = tuple[str, str]
"""A client and an address."""


class MemoryNetwork:
    """Servers and channels by address.

    `latency_s` is called once per crossing, so that a run with a seeded function repeats exactly. A link that is down for
    `keepalive_s` breaks its calls, as gRPC's keepalive does; None: never. `is_serialising` False: messages are passed as objects.
    """

    def __init__(
        self,
        *,
        latency_s: Callable[[], float] | None = None,
        keepalive_s: float | None = 30.0,
        buffer_messages: int = 16,
        message_bytes_max: int = 64 << 20,
        is_serialising: bool = True,
    ) -> None:
        self._latency_s = latency_s
        self._keepalive_s = keepalive_s
        self._limits = Limits(
            buffer_messages=buffer_messages, message_bytes_max=message_bytes_max, is_serialising=is_serialising
        )
        self._links: dict[_Ends, MemoryLink] = {}
        self._servers: dict[str, MemoryServer] = {}
        self._calls: dict[_Ends, dict[MemoryExchange, None]] = {}
        self._cut: set[tuple[str | None, str]] = set()
        """Partitions: the client, None for all, and the address."""
        self._starts: dict[str, asyncio.Event] = {}
        self._dead_clients: set[str] = set()
        self._slow: dict[tuple[str | None, str], float] = {}
        """Extra seconds per crossing: the client, None for all, and the address."""

    def server(self, address: str, interceptors: Sequence[Any] = ()) -> MemoryServer:
        return MemoryServer(interceptors, lambda server: self._started(address, server))

    def channel(self, address: str, *, client: str = "") -> grpc.aio.Channel:
        """Returns a channel to `address`. The server may start later. `client` names the process that uses it, for partitions."""

        def open_exchange(**arguments: Any) -> MemoryExchange:
            return self._open((client, address), **arguments)

        return MemoryChannel(open_exchange, lambda: self._running(address) is not None, self._start_of(address).wait)

    def pool(self, interceptors: Sequence[ChannelInterceptor] = (), *, client: str = "") -> "MemoryPool":
        return MemoryPool(self, interceptors, client)

    def kill(self, address: str) -> None:
        """The process at `address` dies: its calls, including new ones, end with UNAVAILABLE immediately, until a server starts there."""
        server = self._servers.pop(address, None)
        # Calls with `wait_for_ready` wait for the next server.
        self._start_of(address).clear()
        if server is not None:
            server.die(_KILLED)

    def kill_client(self, client: str) -> None:
        """The process `client` dies: its calls end immediately on both sides, and nothing that it sends afterwards arrives."""
        self._dead_clients.add(client)
        for ends, calls in list(self._calls.items()):
            if ends[0] == client:
                self._break(calls, _KILLED)

    def revive_client(self, client: str) -> None:
        """A new process uses the name."""
        self._dead_clients.discard(client)

    def reset(self, address: str, *, client: str | None = None) -> None:
        """Connections to `address` break once, as by a reset: calls end on both sides, messages on the way are lost, new calls work."""
        for ends in self._all_ends(address, client=client):
            self._break(self._calls.get(ends, {}), _RESET)

    def slow(self, address: str, extra_s: float, *, client: str | None = None) -> None:
        """Each crossing takes so much longer from now on; 0 ends that."""
        self._slow[(client, address)] = extra_s
        for ends in self._all_ends(address, client=client):
            self._links[ends].extra_s = self._extra_s(ends)

    def _extra_s(self, ends: _Ends) -> float:
        return self._slow.get(ends, 0.0) + self._slow.get((None, ends[1]), 0.0)

    @staticmethod
    def _break(calls: dict[MemoryExchange, None], status: CallStatus) -> None:
        for exchange in tuple(calls):
            exchange.break_both(status)

    def partition(self, address: str, *, client: str | None = None) -> None:
        """Cuts `address` off from a client, or from all: nothing arrives, and nothing fails before a deadline or the keepalive."""
        self._cut.add((client, address))
        for ends in self._all_ends(address, client=client):
            self._links[ends].set_up(False)
            self._watch_silence(ends, tuple(self._calls.get(ends, ())))

    def heal(self, address: str, *, client: str | None = None) -> None:
        """Ends a partition: messages of calls that have not ended arrive."""
        self._cut.discard((client, address))
        for ends in self._all_ends(address, client=client):
            self._links[ends].set_up(not self._is_cut(ends))

    def _all_ends(self, address: str, client: str | None) -> list[_Ends]:
        return [ends for ends in self._links if ends[1] == address and client in (None, ends[0])]

    def _is_cut(self, ends: _Ends) -> bool:
        return ends in self._cut or (None, ends[1]) in self._cut

    def _open(self, ends: _Ends, *, wait_for_ready: bool, **arguments: Any) -> MemoryExchange:
        link, calls = self._link(ends), self._calls.setdefault(ends, {})
        on_status = arguments.pop("on_status")

        def ended(status: CallStatus) -> None:
            calls.pop(exchange, None)
            on_status(status)

        exchange = MemoryExchange(link, self._limits, on_status=ended, **arguments)
        calls[exchange] = None
        # In the next iteration at the earliest, so that the caller already has its call object.
        asyncio.get_running_loop().call_soon(link.deliver, lambda: self._arrive(ends, exchange, wait_for_ready))
        if not link.is_up:
            self._watch_silence(ends, (exchange,))
        return exchange

    def _arrive(self, ends: _Ends, exchange: MemoryExchange, wait_for_ready: bool) -> None:
        client, address = ends
        if client in self._dead_clients:
            exchange.end_client(_KILLED)
            return
        server = self._running(address)
        if server is not None:
            server.accept(exchange)
        elif not wait_for_ready:
            exchange.end_client(_REFUSED)
        elif exchange.status is None:
            # The client's deadline or cancel ends the waiting.
            waiting = asyncio.ensure_future(self._start_of(address).wait())
            waiting.add_done_callback(lambda _: self._arrive(ends, exchange, wait_for_ready))

    def _watch_silence(self, ends: _Ends, exchanges: Sequence[MemoryExchange]) -> None:
        link = self._link(ends)
        if self._keepalive_s is None or not exchanges:
            return
        partition = link.partitions

        def check() -> None:
            # The link may have been healed and cut again since. That partition has a check of its own.
            if not link.is_up and link.partitions == partition:
                for exchange in exchanges:
                    exchange.break_both(_SILENT)

        asyncio.get_running_loop().call_later(self._keepalive_s, check)

    def _started(self, address: str, server: MemoryServer) -> None:
        self._servers[address] = server
        self._start_of(address).set()

    def _running(self, address: str) -> MemoryServer | None:
        server = self._servers.get(address)
        return server if server is not None and server.is_running else None

    def _start_of(self, address: str) -> asyncio.Event:
        return self._starts.setdefault(address, asyncio.Event())

    def _link(self, ends: _Ends) -> MemoryLink:
        if ends not in self._links:
            self._links[ends] = MemoryLink(self._latency_s)
            self._links[ends].extra_s = self._extra_s(ends)
            self._links[ends].set_up(not self._is_cut(ends))
        return self._links[ends]


class MemoryPool(ChannelPool):
    """A pool of channels over a network."""

    def __init__(self, network: MemoryNetwork, interceptors: Sequence[ChannelInterceptor], client: str) -> None:
        super().__init__(settings=RpcSettings(), interceptors=interceptors)
        self._network = network
        self._client = client

    def _open(self, address: str, role: MeshRole) -> grpc.aio.Channel:
        return self._network.channel(address, client=self._client)
