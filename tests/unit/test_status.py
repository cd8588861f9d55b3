"""Errors keep their meaning through gRPC and HTTP."""

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvmesh import errors
from kvmesh.api.errors.v1 import errors_pb2
from kvmesh.errors import InternalError, InvalidRequestError, LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.http_status import HTTP_STATUS, http_status
from kvmesh.rpc.status import DETAILS_KEY, KINDS, from_detail, from_rpc_error, kind_and_code, to_detail, to_status

CLASSES = [
    each for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, MeshError) and each is not MeshError
]  # fmt: skip


def failure(cls: type[MeshError]) -> MeshError:
    return cls("words", reason="a_reason", field="a.b", retry_after_s=1.5, request_id="r1", where="w1")


def rpc_error(code: grpc.StatusCode, details: str, trailing: tuple = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


def as_dict(error: MeshError) -> dict[str, object]:
    return {"class": type(error), **vars(error)}


# Clients in other languages, proxies and OpenAI's client decide by these codes whether to retry elsewhere, later, or not at all.
CONTRACT = {
    errors.InvalidRequestError: ("INVALID", "INVALID_ARGUMENT", 400, "invalid_request_error"),
    errors.NotFoundError: ("NOT_FOUND", "NOT_FOUND", 404, "not_found_error"),
    errors.UnauthenticatedError: ("UNAUTHENTICATED", "UNAUTHENTICATED", 401, "authentication_error"),
    errors.PermissionDeniedError: ("PERMISSION_DENIED", "PERMISSION_DENIED", 403, "permission_error"),
    errors.UnsupportedError: ("UNSUPPORTED", "FAILED_PRECONDITION", 400, "invalid_request_error"),
    errors.OverloadedError: ("OVERLOADED", "RESOURCE_EXHAUSTED", 503, "overloaded_error"),
    errors.UnavailableError: ("UNAVAILABLE", "UNAVAILABLE", 503, "service_unavailable_error"),
    errors.LostError: ("LOST", "ABORTED", 502, "server_error"),
    errors.KvLostError: ("KV_LOST", "DATA_LOSS", 502, "server_error"),
    errors.DeadlineError: ("DEADLINE", "DEADLINE_EXCEEDED", 504, "timeout_error"),
    errors.CancelledByCallerError: ("CANCELLED", "CANCELLED", 499, "request_cancelled"),
    errors.InternalError: ("INTERNAL", "INTERNAL", 500, "server_error"),
}


def test_classes_kinds_and_codes_match_one_to_one() -> None:
    """Each error class has its own kind and gRPC code, and each kind has a class."""
    assert set(KINDS) == set(CLASSES) == set(HTTP_STATUS) == set(CONTRACT)
    assert {kind for kind, _ in KINDS.values()} == set(errors_pb2.ErrorKind.values()) - {0}
    assert len({code for _, code in KINDS.values()}) == len(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_class_has_the_codes_of_the_contract(cls: type[MeshError]) -> None:
    """Kind, gRPC code, HTTP status and type of each class never change. Two swapped codes would still pass a test that they differ."""
    kind, code, status, word = CONTRACT[cls]
    assert KINDS[cls] == (errors_pb2.ErrorKind.Value(f"ERROR_KIND_{kind}"), grpc.StatusCode[code])
    assert http_status(cls("words")) == (status, word)
    sent = to_status(cls("words"))
    assert sent.code is grpc.StatusCode[code]
    assert (
        status_pb2.Status.FromString(dict(sent.trailing_metadata)[DETAILS_KEY]).code == grpc.StatusCode[code].value[0]
    )
    assert type(from_rpc_error(rpc_error(grpc.StatusCode[code], "words"))) is cls


@pytest.mark.parametrize("reason", ["requests_quota", "tokens_quota", "concurrency_quota"])
def test_a_quota_is_429_and_an_overload_503(reason: str) -> None:
    """Clients back off after 429, and retry elsewhere after 503."""
    assert http_status(OverloadedError("words", reason=reason)) == (429, "rate_limit_error")
    assert http_status(OverloadedError("words", reason="queue_full"))[0] == 503


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("words", reason="body_too_large"), 413),
        (InvalidRequestError("words", reason="unsupported_media_type"), 415),
        (errors.NotFoundError("words", reason="method_not_allowed"), 405),
    ],
)
def test_some_reasons_have_another_http_status(error: MeshError, status: int) -> None:
    """HTTP clients act on these statuses. The error type is that of the class."""
    assert http_status(error) == (status, http_status(type(error)("words"))[1])


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trip_as_message_and_as_status(cls: type[MeshError]) -> None:
    """The class and all fields survive, in a message of a stream and as the status of a call."""
    error = failure(cls)
    assert as_dict(from_detail(to_detail(error))) == as_dict(error)
    status = to_status(error)
    received = from_rpc_error(rpc_error(status.code, status.details, status.trailing_metadata), has_begun=True)
    assert as_dict(received) == as_dict(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trip_with_nothing_set(cls: type[MeshError]) -> None:
    """Absent fields stay absent, and the default reason is kept."""
    assert as_dict(from_detail(to_detail(cls("words")))) == as_dict(cls("words"))
    assert cls("words").reason == cls.default_reason


def test_google_details_are_added_for_other_clients() -> None:
    """ErrorDetail is first. A client that knows only google.rpc finds reason, field and retry delay in the other details."""
    rich = status_pb2.Status.FromString(dict(to_status(failure(OverloadedError)).trailing_metadata)[DETAILS_KEY])
    assert [each.TypeName() for each in rich.details] == [
        "kvmesh.errors.v1.ErrorDetail", "google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"
    ]  # fmt: skip
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(info)
    assert rich.details[2].Unpack(bad)
    assert rich.details[3].Unpack(retry)
    assert (info.domain, info.reason) == ("kvmesh", "A_REASON")
    assert bad.field_violations[0].field == "a.b"
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000
    assert rich.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def test_subclasses_and_the_root_have_codes() -> None:
    """A subclass has the codes of its base, and a plain MeshError counts as internal."""

    class QueueFullError(OverloadedError):
        pass

    assert kind_and_code(QueueFullError("x")) == KINDS[OverloadedError]
    assert http_status(QueueFullError("x"))[0] == 503
    assert http_status(OverloadedError("x", reason="tokens_quota"))[0] == 429
    assert kind_and_code(MeshError("x")) == KINDS[InternalError]
    assert http_status(MeshError("x"))[0] == 500


def test_received_values_are_bounded() -> None:
    """A peer cannot send unbounded labels and messages, or invalid kinds and delays."""
    detail = errors_pb2.ErrorDetail(kind=99, reason="Not A Word", message="m" * 5000)  # type: ignore[arg-type]
    detail.retry_after.FromNanoseconds(-5)
    error = from_detail(detail)
    assert type(error) is InternalError
    assert (error.reason, len(error.message), error.retry_after_s) == ("internal", 2000, None)
    assert len(to_detail(InternalError("m" * 5000)).message) == 2000


def test_invalid_values_of_an_error_do_not_fail_its_encoding() -> None:
    """An error with invalid text, reason or delay is still sent."""
    error = OverloadedError("bad \udc80 text", reason="Grüße", retry_after_s=float("nan"))
    status = to_status(error)
    received = from_rpc_error(rpc_error(status.code, status.details, status.trailing_metadata))
    assert as_dict(received) == as_dict(OverloadedError("bad ? text"))


@pytest.mark.parametrize(
    ("code", "has_begun", "cls", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, UnavailableError, "w1 cannot be reached"),
        (grpc.StatusCode.UNAVAILABLE, True, LostError, "the connection to w1 broke"),
        (grpc.StatusCode.INTERNAL, True, LostError, "the connection to w1 broke"),
        (grpc.StatusCode.INTERNAL, False, InternalError, "the call to w1 ended with INTERNAL"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True, errors.DeadlineError, "w1 did not answer in time"),
        (grpc.StatusCode.CANCELLED, False, errors.CancelledByCallerError, "the call to w1 ended with CANCELLED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False, OverloadedError, "words"),
        (grpc.StatusCode.UNIMPLEMENTED, False, errors.UnsupportedError, "w1 does not have this method"),
    ],
)
def test_a_plain_status_code_becomes_an_error(
    code: grpc.StatusCode, has_begun: bool, cls: type[MeshError], message: str
) -> None:
    """A status of gRPC, or of another server, becomes the nearest class. The details that gRPC wrote do not become the message, except for
    overload."""
    error = from_rpc_error(rpc_error(code, "words"), where="w1", has_begun=has_begun)
    assert (type(error), error.message, error.where) == (cls, message, "w1")


def test_a_message_too_large_is_not_retried() -> None:
    """gRPC reports it with the code of overload, but a retry of the same message would fail, too."""
    error = from_rpc_error(
        rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)")
    )
    assert (type(error), error.reason) == (InvalidRequestError, "message_too_large")


def test_invalid_details_fall_back_to_the_code() -> None:
    """Details that cannot be decoded do not hide the error."""
    error = from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, "words", ((DETAILS_KEY, b"\xff\xff"),)))
    assert type(error) is errors.NotFoundError
