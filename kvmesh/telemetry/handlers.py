"""Wraps servicer methods of all four kinds alike."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

# Takes the request (or an iterator of requests) and the context. Returns the response, or None after it has written a stream.
Behaviour = Callable[[Any, Any], Awaitable[Any]]


def wrap_handler(handler: Any, wrap: Callable[[Behaviour], Behaviour]) -> Any:
    """Returns the handler with `wrap` around its behaviour.

    If a streaming behaviour is an async generator, it is closed when the call is cancelled, so that it releases its resources
    immediately. gRPC itself leaves that to the garbage collector.
    """
    kind = _kind(handler)
    behaviour = getattr(handler, kind)
    if inspect.isasyncgenfunction(behaviour):
        behaviour = _written(behaviour)
    elif not inspect.iscoroutinefunction(behaviour):
        behaviour = _called(behaviour)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        wrap(behaviour),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _kind(handler: Any) -> str:
    return f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"


def _called(function: Callable[[Any, Any], Any]) -> Behaviour:
    # The mesh has no blocking servicers. This is for the generated methods that answer UNIMPLEMENTED.
    async def behave(request: Any, context: Any) -> Any:
        return function(request, context)

    return behave


def _written(generate: Callable[[Any, Any], Any]) -> Behaviour:
    async def behave(request: Any, context: Any) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behave
