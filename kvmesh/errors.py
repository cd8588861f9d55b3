"""The failure tree. Classes are split by what the caller does next; `reason` is the stable word for metrics and logs.

Refused means that nothing was done; lost means that work was done and is gone. `kvmesh.rpc.status` is the one place that
translates to and from gRPC status, `kvmesh.rpc.http_status` the one table to HTTP.
"""

from typing import ClassVar

ENGINE_DIED = frozenset({"engine_died", "worker_defect"})
"""Reasons of a LostError whose worker says that its engine, or the loop around it, failed. What it ran may be the cause."""
WORKER_LOST_TWICE = "worker_lost_twice"
"""Reason of a request that is not placed any more, because two engines died while they ran it."""


class MeshError(Exception):
    """Root of all failures that cross a boundary. `message` is one sentence for people, without prompt text or tokens."""

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
    """The request is wrong and will be wrong again. `field` is the path of the offending field."""

    default_reason = "invalid_request"


class NotFoundError(MeshError):
    """The named model, adapter, worker or record does not exist."""

    default_reason = "not_found"


class UnauthenticatedError(MeshError):
    """No or bad credentials."""

    default_reason = "unauthenticated"


class PermissionDeniedError(MeshError):
    """The caller may not do this."""

    default_reason = "permission_denied"


class UnsupportedError(MeshError):
    """No worker can do this in the mesh's present shape."""

    default_reason = "unsupported"


class OverloadedError(MeshError):
    """Refused for load; nothing was done. Retry after `retry_after_s`."""

    default_reason = "overloaded"


class UnavailableError(MeshError):
    """Refused because the server is absent, starting or draining; nothing was done. Retry elsewhere."""

    default_reason = "unavailable"


class LostError(MeshError):
    """Work was done and is gone: the worker died or its stream broke. Re-place with the tokens already emitted."""

    default_reason = "worker_lost"


class KvLostError(MeshError):
    """The KV blocks of a handle are gone or do not fit. Compute the prompt again."""

    default_reason = "kv_lost"


class DeadlineError(MeshError):
    """A deadline or an idle limit passed."""

    default_reason = "deadline_exceeded"


class CancelledByCallerError(MeshError):
    """The caller cancelled; distinct from `asyncio.CancelledError`, which is never turned into a value."""

    default_reason = "cancelled"


class InternalError(MeshError):
    """A defect on this side. The message tells the client nothing but the request id; the log has the rest."""

    default_reason = "internal"
