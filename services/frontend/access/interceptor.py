"""API keys of gRPC calls."""

from typing import Any

import grpc
import grpc.aio

from kvmesh.telemetry.handlers import wrap_handler
from services.frontend.access.access import Access
from services.frontend.access.caller import current_caller

_OPEN = ("/grpc.health.v1.", "/grpc.reflection.", "/grpc.channelz.", "/inference.GRPCInferenceService/Server")
"""What asks for no key: health, reflection, and KServe's questions about the server itself."""


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Finds the caller of each call from its metadata; must stand inside the error boundary."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wraps the method's handler where a key is needed."""
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or not self._access.needs_key or str(method).startswith(_OPEN):
            return handler
        headers = {
            name: value for name, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }

        def checking(inner: Any) -> Any:
            async def behave(request: Any, context: Any) -> Any:
                current_caller.set(self._access.authenticate(headers))
                return await inner(request, context)

            return behave

        return wrap_handler(handler, checking)
