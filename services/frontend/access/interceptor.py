"""Authenticates gRPC calls, and charges those that are refused."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from kvmesh.telemetry.handlers import Behaviour, wrap_handler
from services.frontend.access.access import Access
from services.frontend.access.caller import ANYBODY, Caller

_OPEN = ("/grpc.health.v1.", "/grpc.reflection.", "/inference.GRPCInferenceService/Server")
"""Methods without a key: health, reflection, and KServe's methods about the server itself."""

rpc_caller: ContextVar[Caller] = ContextVar("kvmesh_rpc_caller", default=ANYBODY)
"""The caller of the current call. A gRPC interceptor can pass a value to a servicer only through a context variable."""
rpc_authenticate: ContextVar[Callable[[], Caller]] = ContextVar("kvmesh_rpc_authenticate", default=lambda: ANYBODY)
"""Authenticates the current call again. A call can carry requests for hours, and its key may expire or be removed in the meantime."""


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates each call by its metadata, before a message of the call is received.

    Must come after the interceptor that converts errors to status codes.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See the base class."""
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or not self._access.needs_key or str(method).startswith(_OPEN):
            return handler
        headers = {
            name: value for name, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }

        def authenticate() -> Caller:
            caller = self._access.authenticate(headers)
            self._access.check_level(caller)
            return caller

        try:
            caller = authenticate()
        except MeshError as error:
            return _refusing(handler, error)
        return wrap_handler(handler, lambda inner: self._as_caller(inner, caller, authenticate))

    def _as_caller(self, inner: Behaviour, caller: Caller, authenticate: Callable[[], Caller]) -> Behaviour:
        async def behave(request: Any, context: Any) -> Any:
            rpc_caller.set(caller)
            rpc_authenticate.set(authenticate)
            try:
                return await inner(request, context)
            except MeshError as error:
                size = request.ByteSize() if isinstance(request, Message) else 0
                self._access.charge_refusal(caller, http_status(error)[0], body_bytes=size)
                raise

        return behave


def _refusing(handler: Any, error: MeshError) -> Any:
    """Returns a handler that fails. It takes a stream of requests, since gRPC receives and decodes the message of any other kind first."""

    async def refuse(_requests: Any, _context: Any) -> Any:
        raise error

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(
        refuse, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
