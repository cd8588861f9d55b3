"""The client's end, with the methods and behaviour of grpc.aio's calls."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvmesh.simulation.rpc.exchange import CallStatus, MemoryExchange, Metadata
from kvmesh.simulation.rpc.pipe import PipeEndedError

_CANCELLED = CallStatus(code=grpc.StatusCode.CANCELLED, details="Locally cancelled by application!")
_DEADLINE = CallStatus(code=grpc.StatusCode.DEADLINE_EXCEEDED, details="Deadline Exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method as a stub names it."""

    path: str
    serialize: Callable[[Any], Any]
    deserialize: Callable[[Any], Any]


class MemoryCall:
    """A call of any kind. It starts when created and ends exactly once: by status, cancel, deadline or a broken link."""

    def __init__(
        self,
        method: Method,
        open_exchange: Callable[..., MemoryExchange],
        *,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._method = method
        self._deadline_s = None if timeout_s is None else loop.time() + timeout_s
        self._initial: asyncio.Future[Metadata] = loop.create_future()
        self._ended: asyncio.Future[CallStatus] = loop.create_future()
        self._callbacks: list[Callable[[Any], None]] = []
        self._sender: asyncio.Task[None] | None = None
        self._is_half_closed = False
        self._timer = None if self._deadline_s is None else loop.call_at(self._deadline_s, self._stop, _DEADLINE)
        self._exchange = open_exchange(
            path=method.path,
            metadata=metadata,
            deadline_s=self._deadline_s,
            on_initial=self._initial.set_result,
            on_status=self._end,
        )

    def cancel(self) -> bool:
        """Ends the call and the servicer's work; False when it is over already."""
        return self._stop(_CANCELLED)

    def cancelled(self) -> bool:
        return self.done() and self._ended.result().code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._ended.done()

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata(*await asyncio.shield(self._initial))

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata(*(await self._status()).trailing)

    async def code(self) -> grpc.StatusCode:
        return (await self._status()).code

    async def details(self) -> str:
        return (await self._status()).details

    async def _status(self) -> CallStatus:
        # A finished call returns without waiting, as grpc.aio's does.
        return self._ended.result() if self._ended.done() else await asyncio.shield(self._ended)

    def _stop(self, status: CallStatus) -> bool:
        if self.done():
            return False
        self._exchange.end_client(status)
        self._exchange.cancel_server()
        return True

    def _end(self, status: CallStatus) -> None:
        self._ended.set_result(status)
        if self._timer is not None:
            self._timer.cancel()
        if self._sender is not None:
            self._sender.cancel()
        for callback in self._callbacks:
            callback(self)

    async def _raise_unless_ok(self) -> None:
        status = await self._status()
        if status is _CANCELLED:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            initial = grpc.aio.Metadata(*self._initial.result())
            trailing = grpc.aio.Metadata(*status.trailing)
            raise grpc.aio.AioRpcError(status.code, initial, trailing, details=status.details)

    async def _send(self, request: Any) -> None:
        limits = self._exchange.limits
        packed = self._method.serialize(request) if limits.is_serialising else request
        too_large = self._exchange.too_large(packed, "CLIENT")
        if too_large is not None:
            self._stop(too_large)
        await self._exchange.requests.send(packed)

    async def _send_all(self, requests: Any) -> None:
        try:
            if inspect.isasyncgen(requests) or hasattr(requests, "__aiter__"):
                async for request in requests:
                    await self._send(request)
            else:
                for request in requests:
                    await self._send(request)
            self._exchange.requests.end(None)
        except PipeEndedError:
            # The call is over, and its status has the reason.
            return
        except Exception:
            # As grpc.aio: an iterator that fails takes its call with it.
            self.cancel()
            raise

    def begin_sending(self, requests: Any) -> None:
        self._is_half_closed = True
        self._sender = asyncio.get_running_loop().create_task(self._send_all(requests))


class RequestStreamMixin:
    """`write` and `done_writing`."""

    async def write(self: Any, request: Any) -> None:
        """Sends a request; waits while the server's buffer is full."""
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._is_half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        try:
            await self._send(request)
        except PipeEndedError:
            await self._raise_unless_ok()
            raise asyncio.InvalidStateError("RPC already finished.") from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done_writing(self: Any) -> None:
        self._is_half_closed = True
        self._exchange.requests.end(None)


class ResponseStreamMixin:
    """`read` and async iteration."""

    async def read(self: Any) -> Any:
        """Returns the next response, or grpc.aio.EOF after OK; raises the call's failure."""
        try:
            packed = await self._exchange.responses.receive()
        except PipeEndedError:
            await self._raise_unless_ok()
            return grpc.aio.EOF
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._method.deserialize(packed) if self._exchange.limits.is_serialising else packed

    async def __aiter__(self: Any) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response


class ResponseMixin:
    """Awaiting the one response."""

    def begin_receiving(self: Any) -> None:
        """Receives the response whether or not anyone awaits it."""
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    def __await__(self: Any) -> Generator[Any, None, Any]:
        return self._response().__await__()  # type: ignore[no-any-return]

    async def _receive(self: Any) -> Any:
        packed = None
        # The second call waits for the end of the pipe: the status comes after the response.
        try:
            packed = await self._exchange.responses.receive()
            await self._exchange.responses.receive()
        except PipeEndedError:
            pass
        await self._status()
        return packed

    async def _response(self: Any) -> Any:
        try:
            packed = await asyncio.shield(self._receiver)
        except asyncio.CancelledError:
            self.cancel()
            raise
        await self._raise_unless_ok()
        return self._method.deserialize(packed) if self._exchange.limits.is_serialising else packed


class UnaryUnaryCall(ResponseMixin, MemoryCall):
    """One request, one response."""


class UnaryStreamCall(ResponseStreamMixin, MemoryCall):
    """One request, many responses."""


class StreamUnaryCall(RequestStreamMixin, ResponseMixin, MemoryCall):
    """Many requests, one response."""


class StreamStreamCall(RequestStreamMixin, ResponseStreamMixin, MemoryCall):
    """Many of both."""
