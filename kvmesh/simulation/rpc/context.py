"""A servicer's context."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvmesh.simulation.rpc.exchange import CallStatus, MemoryExchange, Metadata
from kvmesh.simulation.rpc.pipe import PipeEndedError


class MemoryContext(grpc.aio.ServicerContext):  # type: ignore[type-arg]  # generic in the stubs only
    """grpc.aio's servicer context over an exchange."""

    def __init__(
        self, exchange: MemoryExchange, deserialize: Callable[[Any], Any], serialize: Callable[[Any], Any]
    ) -> None:
        self._exchange = exchange
        self._deserialize = deserialize
        self._serialize = serialize
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Metadata = ()
        self._is_initial_sent = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._is_done = False

    @property
    def final_status(self) -> CallStatus:
        """The status that the servicer has set so far."""
        return CallStatus(code=self._code, details=self._details, trailing=self._trailing)

    async def read(self) -> Any:
        try:
            return self._deserialize(await self._exchange.requests.receive())
        except PipeEndedError:
            return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        packed = self._serialize(message)
        too_large = self._exchange.too_large(packed, "SERVER")
        if too_large is not None:
            await self.abort(too_large.code, too_large.details)
        self._ensure_initial()
        try:
            await self._exchange.responses.send(packed)
        except PipeEndedError:
            # The client ended the call; its cancellation is on its way to this task.
            await asyncio.get_running_loop().create_future()

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._ensure_initial(tuple(initial_metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        if code is grpc.StatusCode.OK:
            raise grpc.aio.UsageError("a call cannot be aborted with OK")
        self._code, self._details = code, details
        self._trailing = tuple(trailing_metadata) or self._trailing
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: Any) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._trailing

    def invocation_metadata(self) -> Any:
        return self._exchange.metadata

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing is compressed in memory."""

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed in memory."""

    def peer(self) -> str:
        return "memory"

    def peer_identities(self) -> Any:
        return None

    def peer_identity_key(self) -> Any:
        return None

    def auth_context(self) -> Any:
        return {}

    def time_remaining(self) -> Any:
        deadline_s = self._exchange.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - asyncio.get_running_loop().time())

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def cancelled(self) -> bool:
        return self._exchange.is_cancelled

    def done(self) -> bool:
        return self._is_done

    def finish(self) -> None:
        self._is_done = True
        for callback in self._callbacks:
            callback(self)

    def _ensure_initial(self, metadata: Metadata = ()) -> None:
        if not self._is_initial_sent:
            self._is_initial_sent = True
            self._exchange.send_initial(metadata)
