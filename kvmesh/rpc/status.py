"""Translates the errors of kvmesh.errors to gRPC status codes and details, and back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from kvmesh.api.errors.v1 import errors_pb2
from kvmesh.api.errors.v1.errors_pb2 import ErrorDetail, ErrorKind
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    KvLostError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.event_log import event_logger
from kvmesh.telemetry.interceptors import REASON_KEY

_log = event_logger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "kvmesh"
MESSAGE_CHARACTERS_MAX = 2_000
# A status travels as HTTP/2 trailers, base64 and percent-encoded, and clients take 8 KiB of them by default.
_STATUS_MESSAGE_BYTES_MAX = 2_000
_STATUS_WORDS_BYTES_MAX = 400
_FIELD_CHARACTERS_MAX = 256
_RETRY_AFTER_S_MAX = 86_400.0
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
# From gRPC's own error for a message over a limit. A retry with the same message would fail again.
_TOO_LARGE = "message larger than max"

KINDS: Mapping[type[MeshError], tuple[ErrorKind, grpc.StatusCode]] = {
    InvalidRequestError: (errors_pb2.ERROR_KIND_INVALID, grpc.StatusCode.INVALID_ARGUMENT),
    NotFoundError: (errors_pb2.ERROR_KIND_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    UnauthenticatedError: (errors_pb2.ERROR_KIND_UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
    PermissionDeniedError: (errors_pb2.ERROR_KIND_PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
    UnsupportedError: (errors_pb2.ERROR_KIND_UNSUPPORTED, grpc.StatusCode.FAILED_PRECONDITION),
    OverloadedError: (errors_pb2.ERROR_KIND_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    UnavailableError: (errors_pb2.ERROR_KIND_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    LostError: (errors_pb2.ERROR_KIND_LOST, grpc.StatusCode.ABORTED),
    KvLostError: (errors_pb2.ERROR_KIND_KV_LOST, grpc.StatusCode.DATA_LOSS),
    DeadlineError: (errors_pb2.ERROR_KIND_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
    CancelledByCallerError: (errors_pb2.ERROR_KIND_CANCELLED, grpc.StatusCode.CANCELLED),
    InternalError: (errors_pb2.ERROR_KIND_INTERNAL, grpc.StatusCode.INTERNAL),
}
_CLASS_BY_KIND = {kind: cls for cls, (kind, _) in KINDS.items()}
_CLASS_BY_CODE = {code: cls for cls, (_, code) in KINDS.items()} | {
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
_GRPC_MESSAGES = {
    grpc.StatusCode.UNAVAILABLE: "{peer} cannot be reached",
    grpc.StatusCode.DEADLINE_EXCEEDED: "{peer} did not answer in time",
    grpc.StatusCode.UNIMPLEMENTED: "{peer} does not have this method",
}
"""Instead of gRPC's own words ("Stream removed (Socket closed)"), which mean nothing to a client. They go to the log."""
# Codes by which gRPC reports a broken connection, without details from the server.
_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class RichStatus(grpc.Status):
    """A status with its details, for `context.abort_with_status`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def kind_and_code(error: MeshError) -> tuple[ErrorKind, grpc.StatusCode]:
    """Returns the kind and status code of an error; a subclass counts as its nearest listed base, the bare root as internal."""
    return next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), KINDS[InternalError])


def to_detail(error: MeshError) -> ErrorDetail:
    """Cuts texts to the contract's limits."""
    detail = ErrorDetail(
        kind=kind_and_code(error)[0],
        reason=_reason(error),
        message=_text(error.message[:MESSAGE_CHARACTERS_MAX]),
        field=_text(error.field[:_FIELD_CHARACTERS_MAX]),
        request_id=_text(error.request_id[:_FIELD_CHARACTERS_MAX]),
        where=_text(error.where[:_FIELD_CHARACTERS_MAX]),
    )
    if error.retry_after_s is not None and error.retry_after_s > 0:
        detail.retry_after.CopyFrom(_duration(error.retry_after_s))
    return detail


def from_detail(detail: ErrorDetail) -> MeshError:
    """Converts an ErrorDetail. An unknown kind becomes InternalError, as the contract says."""
    cls = _CLASS_BY_KIND.get(detail.kind, InternalError)
    retry_after_s = detail.retry_after.ToTimedelta().total_seconds() if detail.HasField("retry_after") else None
    return cls(
        detail.message[:MESSAGE_CHARACTERS_MAX],
        reason=detail.reason if _REASON.match(detail.reason) else "",
        field=detail.field,
        retry_after_s=retry_after_s if retry_after_s is not None and retry_after_s > 0 else None,
        request_id=detail.request_id,
        where=detail.where,
    )


def to_status(error: MeshError) -> RichStatus:
    """Converts an error. The details are an ErrorDetail, and google.rpc's messages for clients that know only those."""
    code = kind_and_code(error)[1]
    words = _text(error.message, _STATUS_WORDS_BYTES_MAX)
    rich = status_pb2.Status(code=code.value[0], message=words)
    for detail in _details(to_detail(error), words):
        rich.details.add().Pack(detail)
    trailing = ((DETAILS_KEY, rich.SerializeToString()), (REASON_KEY, _reason(error)))
    return RichStatus(code=code, details=words, trailing_metadata=trailing)


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: MeshError) -> NoReturn:
    """Ends the call with the error. Raises grpc.aio.AbortError, which the servicer must not catch."""
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort_with_status returned")


def from_rpc_error(error: grpc.RpcError, *, where: str = "", has_begun: bool = False) -> MeshError:
    """Returns the error of a failed call: from the server's details, else from the status code. `where` is the peer's id.

    Without details, the message is this function's. A broken connection is LostError if `has_begun`: the peer may have done some
    work. Otherwise it is UnavailableError.
    """
    # The errors of grpc and of grpc.aio have the methods of a call; their base class has none.
    call: Any = error
    detail = _sent_detail(call)
    if detail is not None:
        sent = from_detail(detail)
        sent.where = sent.where or where
        return sent
    code, words = call.code(), (call.details() or "")[:MESSAGE_CHARACTERS_MAX]
    if _TOO_LARGE in words.lower():
        return InvalidRequestError(words, reason="message_too_large", where=where)
    peer = where or "the server"
    if code in _BROKEN or code in _GRPC_MESSAGES:
        _log.debug("rpc_failed", code=code.name, detail=words, where=where)
        words = ""
    if code in _BROKEN and has_begun:
        return LostError(f"the connection to {peer} broke", where=where)
    message = words or _GRPC_MESSAGES.get(code, "the call to {peer} ended with {code}").format(
        peer=peer, code=code.name
    )
    return _CLASS_BY_CODE.get(code, InternalError)(message, where=where)


def _details(detail: ErrorDetail, words: str) -> list[Message]:
    detail.message = _text(detail.message, _STATUS_MESSAGE_BYTES_MAX)
    details: list[Message] = [
        detail,
        error_details_pb2.ErrorInfo(reason=detail.reason.upper(), domain=ERROR_DOMAIN),
    ]
    if detail.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=detail.field, description=words)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if detail.HasField("retry_after"):
        details.append(error_details_pb2.RetryInfo(retry_delay=detail.retry_after))
    return details


def _reason(error: MeshError) -> str:
    # It becomes a metadata value and a metric label; an invalid one would make the error response itself fail.
    return error.reason if _REASON.match(error.reason) else error.default_reason


def _text(text: str, bytes_max: int | None = None) -> str:
    # Text from broken input may not be valid Unicode, and the cut may be inside a character.
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")


def _sent_detail(call: Any) -> ErrorDetail | None:
    trailing = call.trailing_metadata()
    packed = next((value for key, value in trailing or () if key == DETAILS_KEY), None)
    if not isinstance(packed, bytes):
        return None
    detail = ErrorDetail()
    try:
        rich = status_pb2.Status.FromString(packed)
        found = next((each for each in rich.details if each.Is(ErrorDetail.DESCRIPTOR)), None)
        return detail if found is not None and found.Unpack(detail) else None
    except DecodeError:
        # A proxy or another server wrote it; the status code is used instead.
        return None


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(min(seconds, _RETRY_AFTER_S_MAX) * 1e9))
    return duration
