"""The error classes. They differ in what the caller does next. `reason` is a stable word for metrics and logs.

Refused means that nothing was done; lost means that work was done and is gone. Only `kvmesh.rpc.status` translates to and from gRPC
status, only `kvmesh.rpc.http_status` to HTTP.
"""

from typing import ClassVar

ENGINE_WEDGED = "engine_wedged"
"""Reason of a LostError whose worker gives up on its engine because it does not answer cancels."""
ENGINE_DIED = frozenset({"engine_died", "worker_defect", ENGINE_WEDGED})
"""Reasons of a LostError whose worker reports that its engine, or the loop around it, failed. One of its requests may be the cause."""
WORKER_LOST_TWICE = "worker_lost_twice"
"""Reason of a request that is not placed again because two workers died while they ran it."""
WORKER_UNREACHABLE = "worker_unreachable"
"""Reason of an UnavailableError: no connection to the worker, so it has nothing of the request."""
IDLE_TIMEOUT = "idle_timeout"
"""Reason of a DeadlineError whose worker is connected but sends no token."""


class MeshError(Exception):
    """Base of all errors that cross a process boundary. `message` is one sentence for people, without prompt text or tokens."""

    default_reason: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        request_id: str = "",
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.where = where


class InvalidRequestError(MeshError):
    """The request is invalid; a retry would fail again. `field` is the path of the invalid field."""

    default_reason = "invalid_request"


class NotFoundError(MeshError):
    """The named model, adapter, worker or record does not exist."""

    default_reason = "not_found"


class UnauthenticatedError(MeshError):
    """Missing or invalid credentials."""

    default_reason = "unauthenticated"


class PermissionDeniedError(MeshError):
    """The caller may not do this."""

    default_reason = "permission_denied"


class UnsupportedError(MeshError):
    """No present worker supports this."""

    default_reason = "unsupported"


class OverloadedError(MeshError):
    """Refused because of load. Retry after `retry_after_s`."""

    default_reason = "overloaded"


class UnavailableError(MeshError):
    """Refused because the server is absent, starting or draining. Retry elsewhere."""

    default_reason = "unavailable"


class LostError(MeshError):
    """The worker died or its stream broke. Place the request again, with the tokens that were emitted."""

    default_reason = "worker_lost"


class KvLostError(MeshError):
    """The KV blocks of a handle are gone or incompatible. Compute the prompt again."""

    default_reason = "kv_lost"


class DeadlineError(MeshError):
    """A deadline or an idle timeout has passed."""

    default_reason = "deadline_exceeded"


class CancelledByCallerError(MeshError):
    """The remote caller cancelled, or reads nothing of its answer. Unlike `asyncio.CancelledError` it is a normal error value."""

    default_reason = "cancelled"


class InternalError(MeshError):
    """A defect of the mesh. The client gets only the request id; details are in the log."""

    default_reason = "internal"
