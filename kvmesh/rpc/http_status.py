"""Maps the errors of kvmesh.errors to HTTP status codes."""

from collections.abc import Mapping

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

# Status, and `type` in OpenAI's error body. 499 is nginx's status for a client that disconnected.
HTTP_STATUS: Mapping[type[MeshError], tuple[int, str]] = {
    InvalidRequestError: (400, "invalid_request_error"),
    UnsupportedError: (400, "invalid_request_error"),
    UnauthenticatedError: (401, "authentication_error"),
    PermissionDeniedError: (403, "permission_error"),
    NotFoundError: (404, "not_found_error"),
    OverloadedError: (503, "overloaded_error"),
    CancelledByCallerError: (499, "request_cancelled"),
    InternalError: (500, "server_error"),
    LostError: (502, "server_error"),
    KvLostError: (502, "server_error"),
    UnavailableError: (503, "service_unavailable_error"),
    DeadlineError: (504, "timeout_error"),
}

BODY_TOO_LARGE, MEDIA_TYPE, METHOD_NOT_ALLOWED = "body_too_large", "unsupported_media_type", "method_not_allowed"
REASON_STATUS: Mapping[str, int] = {
    "requests_quota": 429,
    "tokens_quota": 429,
    "concurrency_quota": 429,
    BODY_TOO_LARGE: 413,
    MEDIA_TYPE: 415,
    METHOD_NOT_ALLOWED: 405,
}
"""Reasons with a status of their own. A quota is exceeded by the caller itself; other overloads are 503."""


def http_status(error: MeshError) -> tuple[int, str]:
    """Returns the HTTP status and OpenAI type word; a subclass counts as its nearest listed base, the bare root as internal."""
    status, word = next(
        (HTTP_STATUS[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS), HTTP_STATUS[InternalError]
    )
    own = REASON_STATUS.get(error.reason, status)
    return own, "rate_limit_error" if own == 429 else word
