"""Lets a caller use only the methods of its role (`kvmesh/identity/permissions.py`), while the intentions allow it, and records what
operators do."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from kvmesh.errors import PermissionDeniedError
from kvmesh.event_log import event_logger
from kvmesh.identity.certificates import CertificateSource
from kvmesh.identity.permissions import Intentions, is_audited, may_call
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.revoking import RunningCalls, denied
from kvmesh.telemetry.handlers import wrap_handler

AUDIT_LOGGER = "kvmesh.audit"
_audit = event_logger(AUDIT_LOGGER)


class AuthorisationInterceptor(grpc.aio.ServerInterceptor):
    """For servers with mesh TLS. Must come after the interceptor that converts errors to status codes.

    `intentions` None: the table of permissions decides alone. A role that the intentions deny loses its running calls, too.
    """

    def __init__(self, mesh: CertificateSource, intentions: Intentions | None = None) -> None:
        self._mesh = mesh
        self._intentions = intentions
        self._running = RunningCalls()
        if intentions is not None:
            intentions.on_denied(self._running.end)

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See the base class."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return None

        def checking(inner: Any) -> Any:
            async def behave(request: Any, context: Any) -> Any:
                role = caller_role(context, self._mesh)
                if role is None or not may_call(role, method):
                    raise PermissionDeniedError(
                        f"{method} is not for {role or 'this certificate'}", reason="role_not_permitted"
                    )
                if self._intentions is None:
                    return await run(role, request, context)
                if not self._intentions.allows(role):
                    raise denied(role)
                with self._running.call_of(role):
                    return await run(role, request, context)

            async def run(role: MeshRole, request: Any, context: Any) -> Any:
                if is_audited(role, method):
                    return await _audited(inner, request, context, method=method)
                return await inner(request, context)

            return behave

        return wrap_handler(handler, checking)


def caller_role(context: Any, mesh: CertificateSource) -> MeshRole | None:
    """Returns the role in the caller's certificate; None: it names none, or several."""
    uris = context.auth_context().get("peer_uri", ())
    return mesh.current().names.role_of(uris[0].decode(errors="replace")) if len(uris) == 1 else None


async def _audited(inner: Any, request: Any, context: Any, *, method: str) -> Any:
    """Runs an operator's call. The audit log gets the caller, its address, the method and the outcome; never arguments."""
    outcome = "failed"
    try:
        answer = await inner(request, context)
        outcome = "done"
        return answer
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        names = context.auth_context().get("x509_common_name", (b"",))
        _audit.warning(
            "operator_call",
            method=method,
            caller=names[0].decode(errors="replace"),
            peer=context.peer(),
            outcome=outcome,
        )
