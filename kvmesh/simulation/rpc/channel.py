"""What generated stubs take."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvmesh.simulation.rpc.calls import (
    MemoryCall,
    Method,
    StreamStreamCall,
    StreamUnaryCall,
    UnaryStreamCall,
    UnaryUnaryCall,
)
from kvmesh.simulation.rpc.exchange import MemoryExchange


def _multi_callable(kind: type[MemoryCall], *, sends_stream: bool = False) -> Any:
    """Returns the method of a channel that stubs call once per RPC method. The result starts calls of that kind."""

    def make(  # noqa: PLR0917  # The signature of grpc.aio.Channel.unary_unary.
        channel: "MemoryChannel",
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        named = Method(path=method, serialize=request_serializer or _same, deserialize=response_deserializer or _same)

        def call(request: Any = None, **options: Any) -> Any:
            return channel.begin_call(kind, named, request if sends_stream else [request], **options)

        return call

    return make


class MemoryChannel(grpc.aio.Channel):
    """A channel to one address of a network. Closing it cancels its calls."""

    unary_unary = _multi_callable(UnaryUnaryCall)
    unary_stream = _multi_callable(UnaryStreamCall)
    stream_unary = _multi_callable(StreamUnaryCall, sends_stream=True)
    stream_stream = _multi_callable(StreamStreamCall, sends_stream=True)

    def __init__(
        self,
        open_exchange: Callable[..., MemoryExchange],
        is_reachable: Callable[[], bool],
        wait_reachable: Callable[[], Any],
    ) -> None:
        self._open_exchange = open_exchange
        self._is_reachable = is_reachable
        self._wait_reachable = wait_reachable
        self._calls: dict[MemoryCall, None] = {}
        self._is_closed = False

    async def __aenter__(self) -> "MemoryChannel":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        if grace and self._calls:
            await asyncio.wait([asyncio.ensure_future(call.code()) for call in self._calls], timeout=grace)
        for call in tuple(self._calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY while the server can be reached."""
        if self._is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        return grpc.ChannelConnectivity.READY if self._is_reachable() else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for a server to start, the only change that is announced."""
        if self.get_state() is last_observed_state:
            await self._wait_reachable()

    async def channel_ready(self) -> None:
        if not self._is_reachable():
            await self._wait_reachable()

    def begin_call(
        self,
        kind: type[Any],
        method: Method,
        requests: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        open_exchange = partial(self._open_exchange, wait_for_ready=bool(wait_for_ready))
        call = kind(method, open_exchange, timeout_s=timeout, metadata=tuple(metadata or ()))
        self._calls[call] = None
        call.add_done_callback(lambda call: self._calls.pop(call, None))
        if hasattr(call, "begin_receiving"):
            call.begin_receiving()
        if requests is not None:
            call.begin_sending(requests)
        return call


def _same(message: Any) -> Any:
    return message
