"""The server's end."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvmesh.event_log import event_logger
from kvmesh.simulation.rpc.context import MemoryContext
from kvmesh.simulation.rpc.exchange import CallStatus, MemoryExchange, Metadata
from kvmesh.simulation.virtual_loop import current_process, process_context

_log = event_logger(__name__)
STOPPED = CallStatus(code=grpc.StatusCode.UNAVAILABLE, details="Cancelling all calls")


@dataclass(frozen=True, slots=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Metadata


class MemoryServer:
    """Has the methods that generated `add_X_to_server` functions call. Reachable from `start` to `stop`."""

    def __init__(self, interceptors: Sequence[Any], on_start: Callable[["MemoryServer"], None]) -> None:
        self._interceptors = tuple(interceptors)
        self._on_start = on_start
        self._process = current_process()
        self._generic: list[Any] = []
        self._exchanges: dict[MemoryExchange, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._terminated = asyncio.Event()
        self.is_running = False

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Adds nothing: the generic handlers of the same call hold the same methods."""

    async def start(self) -> None:
        self.is_running = True
        self._on_start(self)

    async def stop(self, grace: float | None) -> None:
        self.is_running = False
        if self._tasks and grace:
            await asyncio.wait(tuple(self._tasks), timeout=grace)
        self.end_calls(STOPPED)
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        self._terminated.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Waits for the end of `stop`; False when `timeout` seconds came first."""
        try:
            async with asyncio.timeout(timeout):
                await self._terminated.wait()
        except TimeoutError:
            return False
        return True

    def die(self, status: CallStatus) -> None:
        self.is_running = False
        self.end_calls(status)

    def end_calls(self, status: CallStatus) -> None:
        for exchange in tuple(self._exchanges):
            exchange.break_both(status)

    def accept(self, exchange: MemoryExchange) -> None:
        # The client may have ended the call while it was on its way.
        if exchange.is_cancelled or exchange.status is not None:
            return
        # An otherwise empty context: nothing may reach a servicer but what crosses the wire.
        context = process_context(self._process)
        task = asyncio.get_running_loop().create_task(self._serve(exchange), context=context)
        exchange.task = task
        self._exchanges[exchange] = None
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, exchange))

    def _forget(self, exchange: MemoryExchange, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._exchanges.pop(exchange, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("memory_server_failed", exc_info=error)

    async def _serve(self, exchange: MemoryExchange) -> None:
        timer = None
        # As in gRPC, the server enforces the deadline itself: the client's cancel does not cross a partition.
        if exchange.deadline_s is not None:
            timer = asyncio.get_running_loop().call_at(exchange.deadline_s, exchange.cancel_task)
        try:
            exchange.responses.end(await self._answer(exchange))
        except asyncio.CancelledError:
            exchange.responses.end(CallStatus(code=grpc.StatusCode.CANCELLED, details="the servicer was cancelled"))
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _answer(self, exchange: MemoryExchange) -> CallStatus:
        handler = await self._handler(exchange)
        if handler is None:
            return CallStatus(code=grpc.StatusCode.UNIMPLEMENTED, details="Method not found!")
        context = _context(exchange, handler)
        try:
            await _run(handler, context)
        except grpc.aio.AbortError:
            pass
        except Exception as error:  # noqa: BLE001  # As grpc.aio: a servicer's exception becomes a status.
            _log.debug("memory_servicer_raised", exc_info=error)
            if context.code() in (grpc.StatusCode.OK, 0):
                context.set_code(grpc.StatusCode.UNKNOWN)
            context.set_details(f"Unexpected {type(error)}: {error}")
        finally:
            context.finish()
        return context.final_status

    async def _handler(self, exchange: MemoryExchange) -> Any:
        find: Any = self._find
        for interceptor in reversed(self._interceptors):
            find = partial(interceptor.intercept_service, find)
        return await find(_Details(exchange.path, exchange.metadata))

    async def _find(self, details: Any) -> Any:
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


def _context(exchange: MemoryExchange, handler: Any) -> MemoryContext:
    if exchange.limits.is_serialising:
        return MemoryContext(exchange, handler.request_deserializer, handler.response_serializer)
    return MemoryContext(exchange, lambda message: message, lambda message: message)


async def _run(handler: Any, context: MemoryContext) -> None:
    request: Any = _Requests(context)
    if not handler.request_streaming:
        request = await context.read()
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INTERNAL, "the request is missing")
    if not handler.response_streaming:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        response = behaviour(request, context)
        response = await response if inspect.isawaitable(response) else response
        # As in grpc.aio, a response may go with a status that is not OK; the client sees the status only.
        await context.write(response)
        return
    behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
    responses = behaviour(request, context)
    if inspect.isawaitable(responses):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


class _Requests:
    def __init__(self, context: MemoryContext) -> None:
        self._context = context

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return request
