"""Runs the handler of one HTTP request: authenticates it, turns failures into responses, counts and logs its outcome once."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from kvmesh.errors import MeshError
from services.frontend.access.caller import current_caller
from services.frontend.api.http.cross_origin import CrossOrigin
from services.frontend.api.http.event_pace import EventPace
from services.frontend.api.http.exchange import CLIENT_GONE, Exchange, internal_error, json_response, status_of
from services.frontend.api.openai.bodies import error_body, error_headers
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings

_log = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
MESH_ID_HEADER = "x-kvmesh-request-id"
"""The mesh's own id, which logs and `kvmesh explain` use; `x-request-id` echoes the client's."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")

Serve = Callable[[Exchange], Awaitable[web.StreamResponse]]
"""Answers an exchange. Raises a failure that happens before the first byte of the answer."""
ErrorBody = Callable[[MeshError], Mapping[str, Any]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Boundary:
    """Makes aiohttp handlers that answer every failure and count each request once."""

    def __init__(self, pipeline: Pipeline, settings: HttpSettings) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self.cross_origin = CrossOrigin(settings)
        self._pace = EventPace(settings.detailed_events_per_s_max)

    def handler(self, serve: Serve, *, error_body: ErrorBody = error_body) -> Handler:
        """The handler of a route. `error_body` gives failures the shape of the route's API."""
        return partial(self._handle, serve, error_body)

    async def _handle(self, serve: Serve, error_body: ErrorBody, request: web.Request) -> web.StreamResponse:
        request_id, client_id = self._pipeline.new_id(), client_id_of(request)
        exchange = Exchange(
            request=request,
            pipeline=self._pipeline,
            settings=self._settings,
            pace=self._pace,
            began_s=self._pipeline.clock.now(),
            client_id=client_id,
            request_id=request_id,
            headers={
                REQUEST_ID_HEADER: client_id or request_id,
                MESH_ID_HEADER: request_id,
                **self.cross_origin.headers(request),
            },
        )
        try:
            exchange.caller = self._pipeline.access.authenticate(request.headers)
            current_caller.set(exchange.caller)
            return await serve(exchange)
        except asyncio.CancelledError:
            exchange.code, exchange.reason = CLIENT_GONE, "client_gone"
            raise
        except MeshError as error:
            return _failed_response(exchange, error, error_body)
        except Exception as error:  # noqa: BLE001 (the boundary that keeps defects from clients; logged)
            return _failed_response(exchange, internal_error(error, request_id), error_body)
        finally:
            self._account(exchange)

    def _account(self, exchange: Exchange) -> None:
        model = exchange.model_name or UNKNOWN_MODEL
        self._pipeline.metrics.requests.of(model, str(exchange.code)).value += 1
        if not _log.isEnabledFor(logging.INFO):
            return
        data = {
            "request_id": exchange.request_id,
            "client_id": exchange.client_id,
            "path": exchange.request.path,
            "model": model,
            "code": exchange.code,
            "reason": exchange.reason,
            "prompt_tokens": exchange.usage.prompt_tokens,
            "output_tokens": exchange.usage.output_tokens,
            "cached_tokens": exchange.usage.cached_tokens,
            "ttft_s": None if exchange.ttft_s is None else round(exchange.ttft_s, 6),
            "duration_s": round(self._pipeline.clock.now() - exchange.began_s, 6),
        }
        _log.info("request_finished", extra={"data": data})


def _failed_response(exchange: Exchange, error: MeshError, error_body: ErrorBody) -> web.Response:
    exchange.code, exchange.reason = status_of(error), error.reason
    headers = {**exchange.headers, **error_headers(error)}
    return json_response(error_body(error), status=exchange.code, headers=headers)


def client_id_of(request: web.Request) -> str:
    """The client's own id of the request, for the log and for the echo; never used inside the mesh."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.match(given) else ""
