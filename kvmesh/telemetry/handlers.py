"""Servicer methods of all four kinds as one kind of function."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

# Takes the request (or the iterator of requests) and the context; returns the response, or None after writing a stream.
Behaviour = Callable[[Any, Any], Awaitable[Any]]


def wrap_handler(handler: Any, wrap: Callable[[Behaviour], Behaviour]) -> Any:
    """The handler with `wrap` around its behaviour.

    A streaming behaviour written as an async generator is closed as soon as the call is cancelled. gRPC itself leaves
    that to the garbage collector, and with it the release of what the generator holds.
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
    # The mesh has no blocking servicers; what is left are the generated methods that say that they are not implemented.
    async def behave(request: Any, context: Any) -> Any:
        return function(request, context)

    return behave


def _written(generate: Callable[[Any, Any], Any]) -> Behaviour:
    async def behave(request: Any, context: Any) -> None:
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behave
