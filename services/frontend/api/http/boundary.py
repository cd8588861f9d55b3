"""Runs the handler of one HTTP request: authenticates it, converts failures to responses, counts and logs its outcome."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from kvmesh.errors import WORKER_LOST_TWICE, MeshError, UnauthenticatedError
from kvmesh.rpc.http_status import http_status
from services.frontend.access.caller import ANYBODY
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.http.large_bodies import LargeBodies
from services.frontend.api.http.stream import EventPace
from services.frontend.api.openai.bodies import error_body
from services.frontend.api.run import CLIENT_GONE
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings

REQUEST_ID_HEADER = "x-request-id"
MESH_ID_HEADER = "x-kvmesh-request-id"
"""The mesh's own id, which logs and `kvmesh explain` use; `x-request-id` echoes the client's."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_CORS_AGE_S = 600
"""Seconds for which a browser caches the answer to a preflight request: few are sent, and changed origins take effect soon."""
_CORS_METHODS = "GET, POST, DELETE, OPTIONS"
_CORS_EXPOSED = "x-request-id, x-kvmesh-request-id, request-id, retry-after, x-kvmesh-warning, x-kvmesh-max-tokens"

Serve = Callable[[Exchange], Awaitable[web.StreamResponse]]
"""Serves one request. Raises a failure that happens before the first byte of the response."""
ErrorBody = Callable[[MeshError], Mapping[str, Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Boundary:
    """Makes aiohttp handlers that answer every failure and count each request once."""

    def __init__(self, pipeline: Pipeline, settings: HttpSettings) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._origins = frozenset(settings.cors_origins)
        self._pace = EventPace()
        self._large_bodies = LargeBodies(settings.bodies_bytes_max)

    def handler(self, serve: Serve, *, error_body: ErrorBody = error_body) -> Handler:
        """Returns the handler of a route. `error_body` makes the error object of the route's API."""
        return partial(self._handle, serve, error_body)

    async def _handle(self, serve: Serve, error_body: ErrorBody, request: web.Request) -> web.StreamResponse:
        request_id = self._pipeline.new_id()
        headers = {REQUEST_ID_HEADER: request_id, MESH_ID_HEADER: request_id, **self.common_headers(request)}
        exchange = Exchange(
            request=request,
            pipeline=self._pipeline,
            settings=self._settings,
            pace=self._pace,
            large_bodies=self._large_bodies,
            began_s=self._pipeline.clock.now(),
            caller=ANYBODY,
            client_id="" if headers[REQUEST_ID_HEADER] == request_id else headers[REQUEST_ID_HEADER],
            request_id=request_id,
            headers=headers,
        )
        access = self._pipeline.access
        try:
            exchange.caller = access.authenticate(request.headers)
            access.check_level(exchange.caller)
            return await serve(exchange)
        except asyncio.CancelledError:
            exchange.code, exchange.reason = CLIENT_GONE, "client_gone"
            raise
        except Exception as error:  # noqa: BLE001 (the boundary that keeps defects from clients; logged)
            failure = error if isinstance(error, MeshError) else exchange.internal_error(error)
            exchange.code, exchange.reason = http_status(failure)[0], failure.reason
            try:
                return error_response(failure, body=error_body(failure), headers=exchange.headers)
            finally:
                # Its traceback has this frame: the cycle would keep the request's body until a rare collection.
                del failure
        finally:
            access.charge_refusal(exchange.caller, exchange.code, body_bytes=exchange.body_bytes)
            exchange.account(path=request.path, code=exchange.code, reason=exchange.reason)

    def common_headers(self, request: web.Request) -> dict[str, str]:
        """Returns the headers of every response: the client's own id of the request, and what its origin may read (CORS).

        The client's id is never used inside the mesh.
        """
        client_id = request.headers.get(REQUEST_ID_HEADER, "")
        headers = {REQUEST_ID_HEADER: client_id} if _REQUEST_ID.match(client_id) else {}
        if not self._origins or not (origin := request.headers.get("Origin", "")):
            return headers
        if "*" in self._origins:
            return headers | {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _CORS_EXPOSED}
        headers["Vary"] = "Origin"
        if origin in self._origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _CORS_EXPOSED}
        return headers

    async def preflight(self, request: web.Request) -> web.Response:
        """Answers OPTIONS, with which browsers ask whether a page may send a request."""
        headers = self.common_headers(request)
        headers.pop(REQUEST_ID_HEADER, None)
        if "Access-Control-Allow-Origin" in headers:
            headers["Access-Control-Allow-Methods"] = _CORS_METHODS
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            headers["Access-Control-Allow-Headers"] = wanted or "authorization, content-type, x-request-id"
            headers["Access-Control-Max-Age"] = str(_CORS_AGE_S)
        return web.Response(status=204, headers=headers)


def error_response(
    error: MeshError, *, headers: Mapping[str, str], body: Mapping[str, Any] | None = None
) -> web.Response:
    """Returns the response of a failure; by default with OpenAI's error object."""
    return json_response(
        body or error_body(error), status=http_status(error)[0], headers={**headers, **error_headers(error)}
    )


def error_headers(error: MeshError) -> Mapping[str, str]:
    """Returns Retry-After in whole seconds, or how to authenticate, or that the client must not retry."""
    if isinstance(error, UnauthenticatedError):
        return {"WWW-Authenticate": "Bearer"}
    if error.reason == WORKER_LOST_TWICE:
        # The request may have killed its workers. OpenAI's and Anthropic's clients retry any other 5xx.
        return {"x-should-retry": "false"}
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
