"""Traces, metrics and logs of every gRPC call, on both sides and for all four kinds.

The metadata key `traceparent` carries the trace context, the trailing key `kvmesh-reason` the reason of a failure.
"""

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from kvmesh.errors import MeshError
from kvmesh.event_log import event_logger
from kvmesh.telemetry.handlers import Behaviour, wrap_handler
from kvmesh.telemetry.telemetry import Telemetry
from kvmesh.telemetry.tracing import TRACEPARENT, current_traceparent, fail_span, traceparent_of

REASON_KEY = "kvmesh-reason"
_log = event_logger(__name__)
# Codes that indicate a defect rather than a bad request or load.
_DEFECTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"}


class TelemetryServerInterceptor(grpc.aio.ServerInterceptor):
    """Reports every call that has a handler. Must be outside of the error boundary, to see the final status."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = _method_name(handler_call_details.method)
        parent = _traceparent_in(handler_call_details.invocation_metadata)
        return wrap_handler(handler, lambda inner: self._observed(inner, method, parent=parent))

    def _observed(self, inner: Behaviour, method: str, parent: str) -> Behaviour:
        telemetry = self._telemetry

        async def behave(request: Any, context: Any) -> Any:
            began_s = time.perf_counter()
            telemetry.server_calls.started(method)
            span = telemetry.tracing.start_span(
                method, kind=SpanKind.SERVER, parent=parent, attributes=_attributes(method)
            )
            code, reason = "OK", ""
            try:
                # Without a trace context there is nothing to make current.
                if not span.get_span_context().is_valid:
                    response = await inner(request, context)
                else:
                    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                        response = await inner(request, context)
                code = _code_name(context.code())
                return response
            except asyncio.CancelledError:
                code, reason = "CANCELLED", "cancelled"
                raise
            except BaseException as error:
                code = _code_name(context.code(), default="UNKNOWN")
                reason = _reason_of(error) or code.lower()
                raise
            finally:
                duration_s = time.perf_counter() - began_s
                telemetry.server_calls.finished(method, code=code, reason=reason, duration_s=duration_s)
                _end(
                    span, method=method, code=code, reason=reason, duration_s=duration_s, is_own=telemetry.tracing.is_on
                )

        return behave


class ObservedChannel:
    """A channel with telemetry on its calls.

    It is a wrapper, since grpc.aio's client interceptors add a task and a generator to every message of a stream, and only grpc.aio's own
    channels run them.
    """

    def __init__(self, channel: Any, telemetry: Telemetry) -> None:
        self._channel = channel
        self._telemetry = telemetry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> "ObservedChannel":
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._observed(method, self._channel.stream_stream(method, *args, **kwargs))

    def _observed(self, path: str, begin: Any) -> Any:
        telemetry, method = self._telemetry, _method_name(path)

        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            telemetry.client_calls.started(method)
            span = telemetry.tracing.start_span(method, kind=SpanKind.CLIENT, attributes=_attributes(method))
            traceparent = traceparent_of(span) if telemetry.tracing.is_on else current_traceparent()
            if traceparent:
                metadata = (*(metadata or ()), (TRACEPARENT, traceparent))
            made = begin(*args, metadata=metadata, **kwargs)

            def done(_: Any) -> None:
                duration_s = time.perf_counter() - began_s
                status = _now(made.code())
                code = "UNKNOWN" if status is None else status.name
                trailing = None if code == "OK" else _now(made.trailing_metadata())
                reason = "" if code == "OK" else str((trailing and trailing.get(REASON_KEY)) or code.lower())
                telemetry.client_calls.finished(method, code=code, reason=reason, duration_s=duration_s)
                _end(
                    span, method=method, code=code, reason=reason, duration_s=duration_s, is_own=telemetry.tracing.is_on
                )

            made.add_done_callback(done)
            return made

        return call


def _end(span: Span, *, method: str, code: str, reason: str, duration_s: float, is_own: bool) -> None:
    if is_own:
        span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            span.set_attribute("error.type", reason or code.lower())
            fail_span(span, reason or code)
        span.end()
    log = _log.warning if code in _DEFECTS else _log.debug
    log("rpc_finished", method=method, code=code, reason=reason or "none", duration_s=round(duration_s, 6))


def _now(finished: Any) -> Any:
    # A finished call has its status already, so the coroutine ends without waiting. A callback cannot await it.
    try:
        finished.send(None)
    except StopIteration as result:
        return result.value
    finished.close()
    return None


def _code_name(code: Any, *, default: str = "OK") -> str:
    # The code in the servicer's context: grpc.aio gives a number, or OK or None if the servicer has set none.
    if isinstance(code, grpc.StatusCode):
        return default if code is grpc.StatusCode.OK else code.name
    return next((each.name for each in grpc.StatusCode if each.value[0] == code and code != 0), default)


def _reason_of(error: BaseException | None) -> str:
    # The error boundary raises gRPC's abort while it handles the MeshError.
    while error is not None:
        if isinstance(error, MeshError):
            return error.reason
        error = error.__context__
    return ""


def _method_name(path: Any) -> str:
    text: str = path.decode() if isinstance(path, bytes) else path
    return text.removeprefix("/")


def _traceparent_in(metadata: Any) -> str:
    return next((value for key, value in metadata or () if key == TRACEPARENT and isinstance(value, str)), "")


def _attributes(method: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": method}
