"""One HTTP request on its way through an API: its body, its answer so far, and what is logged of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import StreamReader, web

from kvmesh.clock import awake_timeout
from kvmesh.core import Usage
from kvmesh.errors import InternalError, InvalidRequestError, MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.access.caller import ANYBODY, Caller
from services.frontend.api.http.event_pace import EventPace
from services.frontend.api.openai.bodies import to_json
from services.frontend.api.request_body import read_object
from services.frontend.api.run import WARNING_HEADER
from services.frontend.api.unknown_fields import read_tolerantly
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings

_log = logging.getLogger(__name__)
BODY_TOO_LARGE = "body_too_large"
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before the answer was complete."""

Read = TypeVar("Read")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request. `code`, `reason`, `model_name`, `usage` and `ttft_s` are for the log and the metrics."""

    request: web.Request
    pipeline: Pipeline
    settings: HttpSettings
    pace: EventPace
    began_s: float
    request_id: str
    client_id: str
    headers: dict[str, str]
    caller: Caller = ANYBODY
    code: int = 200
    reason: str = "ok"
    model_name: str = ""
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None

    @property
    def owner(self) -> str:
        """The tenant that owns what this request stores; empty where no keys are required."""
        return self.caller.tenant

    async def read_object(self, *, adds_model: bool = True) -> dict[str, Any]:
        """Reads the body as a JSON object. `adds_model`: fills in an absent `model` where only one is served.

        InvalidRequestError when the body is too large, late, unreadable or not a JSON object.
        """
        values = read_object(await self._read_body())
        if adds_model and values.get("model") is None and self.settings.model_is_optional:
            served = self.pipeline.models.served()
            if len(served) == 1:
                values["model"] = served[0].name
        return values

    async def read_request(self, read: Callable[[dict[str, Any]], Read]) -> Read:
        """Reads the body as `read` does. Unless the settings refuse them, fields that no API knows become a warning."""
        values = await self.read_object()
        if self.settings.refuses_unknown_fields:
            return read(values)
        request, ignored = read_tolerantly(read, values)
        if ignored:
            self.warn(f"ignored: {' '.join(ignored)}")
        return request

    def warn(self, *warnings: str) -> None:
        """Adds warnings to the answer's header."""
        if warnings:
            self.headers[WARNING_HEADER] = ", ".join([*filter(None, [self.headers.get(WARNING_HEADER)]), *warnings])

    async def _read_body(self) -> bytes:
        request = self.request
        try:
            if request.content.is_eof():
                # Most bodies arrive with the head: there is nothing to wait for.
                return self._take_body(request.content)
            async with awake_timeout(self.settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise InvalidRequestError("the body did not arrive in time", reason="body_timeout") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except (web.RequestPayloadError, ValueError) as error:
            raise InvalidRequestError("the body cannot be read", reason="invalid_body") from error

    def _take_body(self, content: StreamReader) -> bytes:
        """A complete body, without the two copies that aiohttp makes of a long one."""
        body = content.read_nowait()
        while not content.at_eof():
            body += content.read_nowait()
        if len(body) > self.settings.body_bytes_max:
            raise self._too_large()
        return body

    def _too_large(self) -> InvalidRequestError:
        limit = self.settings.body_bytes_max
        return InvalidRequestError(f"the body is larger than {limit} bytes", reason=BODY_TOO_LARGE)


def internal_error(error: Exception, request_id: str) -> InternalError:
    """Logs an unexpected exception. The client gets the request's id and no detail."""
    _log.error("request_defect", exc_info=error, extra={"data": {"request_id": request_id}})
    return InternalError(f"internal error {request_id}", request_id=request_id)


def status_of(error: MeshError) -> int:
    """The HTTP status of an error. A body beyond the limit has a status of its own."""
    return 413 if error.reason == BODY_TOO_LARGE else http_status(error)[0]


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response of `body` as compact JSON."""
    return web.Response(body=to_json(body), status=status, headers=headers, content_type="application/json")
