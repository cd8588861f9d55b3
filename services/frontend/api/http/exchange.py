"""One HTTP request while it is served: its body, the headers of its response, and its outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import web

from kvmesh.clock import awake_timeout
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.http.stream import EventPace
from services.frontend.api.request_body import parse_object
from services.frontend.api.run import WARNING_HEADER, RequestContext
from services.frontend.api.unknown_fields import read_tolerantly, unused_hints
from services.frontend.settings import HttpSettings

BODY_TOO_LARGE = "body_too_large"
ParsedBody = TypeVar("ParsedBody")


@dataclass(slots=True, kw_only=True)
class Exchange(RequestContext):
    """`headers` go into the response. `code` and `reason` are for the log and the metrics."""

    request: web.Request
    settings: HttpSettings
    pace: EventPace
    client_id: str
    headers: dict[str, str]
    code: int = 200
    reason: str = "ok"

    @property
    def owner(self) -> str:
        """The tenant that owns what this request stores; empty if no keys are required."""
        return self.caller.tenant

    async def read_object(self, *, adds_model: bool = True) -> dict[str, Any]:
        """Reads the body as a JSON object. `adds_model`: fills in an absent `model` if only one is served.

        Raises InvalidRequestError if the body is too large, late, unreadable or not a JSON object.
        """
        content = self.request.content
        if content.is_eof():
            # Most bodies arrive with the head. This saves the two copies that aiohttp makes of a long one.
            body = content.read_nowait()
            while not content.at_eof():
                body += content.read_nowait()
            if len(body) > self.settings.body_bytes_max:
                raise self._body_too_large()
        else:
            body = await self._wait_body()
        values = parse_object(body)
        if adds_model and values.get("model") is None and self.settings.model_is_optional:
            served = self.pipeline.models.served()
            if len(served) == 1:
                values["model"] = served[0].name
        return values

    async def read_request(self, read: Callable[[dict[str, Any]], ParsedBody]) -> ParsedBody:
        """Reads the body with `read`. Ignores unknown fields with a warning, unless the settings refuse them, and unused hints."""
        values = await self.read_object()
        body, ignored = (read(values), []) if self.settings.refuses_unknown_fields else read_tolerantly(read, values)
        if ignored := [*ignored, *unused_hints(values)]:
            self.warn(f"ignored: {' '.join(ignored)}")
        return body

    def warn(self, *warnings: str) -> None:
        """Adds warnings to the header of the response."""
        if warnings:
            earlier = self.headers.get(WARNING_HEADER)
            self.headers[WARNING_HEADER] = ", ".join([earlier, *warnings] if earlier else warnings)

    async def _wait_body(self) -> bytes:
        try:
            async with awake_timeout(self.settings.body_timeout_s):
                return await self.request.read()
        except TimeoutError:
            raise InvalidRequestError("the body did not arrive in time", reason="body_timeout") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._body_too_large() from None
        except (web.RequestPayloadError, ValueError) as error:
            raise InvalidRequestError("the body cannot be read", reason="invalid_body") from error

    def _body_too_large(self) -> InvalidRequestError:
        limit = self.settings.body_bytes_max
        return InvalidRequestError(f"the body is larger than {limit} bytes", reason=BODY_TOO_LARGE)

    def json_response(self, body: Any) -> web.Response:
        """Returns a response of `body` with the headers of this exchange."""
        return json_response(body, headers=self.headers)


def status_of(error: MeshError) -> int:
    """Returns the HTTP status of an error. A body beyond the limit has a status of its own."""
    return 413 if error.reason == BODY_TOO_LARGE else http_status(error)[0]


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns a response of `body` as compact JSON."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
