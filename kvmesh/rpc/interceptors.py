"""The error boundary of every servicer, and the list of interceptors that servers and channels get."""

import asyncio
import uuid
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvmesh.errors import InternalError, InvalidRequestError, MeshError
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import CertificateSource
from kvmesh.identity.permissions import Intentions
from kvmesh.rpc.authorisation import AuthorisationInterceptor
from kvmesh.rpc.channels import ChannelInterceptor
from kvmesh.rpc.status import abort_with
from kvmesh.telemetry import Telemetry
from kvmesh.telemetry.handlers import wrap_handler
from kvmesh.telemetry.interceptors import ObservedChannel, TelemetryServerInterceptor

_log = event_logger(__name__)
# What the generated base class sets before it raises, as gRPC gives it back.
_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])

_WRITE_FAILED = "ExecuteBatchError"
"""gRPC's error, which it does not export, of a message that was being written when the client left. It comes before the cancel."""


def server_interceptors(
    telemetry: Telemetry, mesh: CertificateSource | None = None, intentions: Intentions | None = None
) -> "list[grpc.aio.ServerInterceptor]":
    """Returns the interceptors of every server. Telemetry is the outer one, so that it sees the status that the error boundary sets.

    With mesh TLS each method is for its roles only, and with `intentions` while they allow it.
    """
    common: list[grpc.aio.ServerInterceptor] = [TelemetryServerInterceptor(telemetry), ErrorInterceptor()]
    return common if mesh is None else [*common, AuthorisationInterceptor(mesh, intentions)]


def channel_interceptors(telemetry: Telemetry) -> list[ChannelInterceptor]:
    def observe(channel: grpc.aio.Channel) -> grpc.aio.Channel:
        # It has the methods of a Channel without being one: the base class is abstract in what this one forwards.
        return cast(grpc.aio.Channel, ObservedChannel(channel, telemetry))

    return [observe]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status.

    A MeshError goes to the caller with its details. Any other exception is a defect: it is logged with its traceback
    under a new id, and the caller learns that id and nothing else. CancelledError and gRPC's own abort pass.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if not handler.request_streaming and handler.request_deserializer is not None:
            handler = handler._replace(request_deserializer=_lenient(handler.request_deserializer))
        return wrap_handler(handler, lambda inner: _translating(inner, method))


class _Undecodable:
    """A request that cannot be decoded. gRPC itself would report a server error."""


def _lenient(deserialize: Any) -> Any:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable()

    return decode


def _translating(inner: Any, method: Any) -> Any:
    async def behave(request: Any, context: Any) -> Any:
        try:
            if type(request) is _Undecodable:
                raise DecodeError
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except MeshError as error:
            await abort_with(context, error)
        except DecodeError:
            # Of a stream's message it is raised where the servicer reads it.
            await abort_with(context, InvalidRequestError("the message cannot be decoded", reason="invalid_message"))
        except Exception as error:
            if type(error).__name__ == _WRITE_FAILED:
                raise asyncio.CancelledError("the client has disconnected") from error
            if isinstance(error, NotImplementedError) and context.code() in _UNIMPLEMENTED:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "method not implemented")
            incident = uuid.uuid4().hex
            _log.error("rpc_defect", exc_info=error, method=method, request_id=incident)
            await abort_with(context, InternalError(f"internal error {incident}", request_id=incident))

    return behave


__all__ = ["ErrorInterceptor", "channel_interceptors", "server_interceptors"]
