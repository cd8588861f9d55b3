"""The boundary around one HTTP request: its body, its failures as answers, its outcome counted and logged once."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import StreamReader, web

from kvmesh.clock import awake_timeout
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.access.caller import current_caller
from services.frontend.api.http.cross_origin import CrossOrigin
from services.frontend.api.http.event_pace import EventPace
from services.frontend.api.http.owner import OWNER
from services.frontend.api.openai.bodies import error_body, error_headers, to_json
from services.frontend.api.openai.fields import read_object
from services.frontend.api.openai.serve import CLIENT_GONE, Exchange, defect
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings

_log = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
MESH_ID_HEADER = "x-kvmesh-request-id"
"""The mesh's own id, which logs and `kvmesh explain` know, where the other header echoes the client's."""
BODY_TOO_LARGE = "body_too_large"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")

Work = Callable[[Exchange], Awaitable[web.StreamResponse]]
"""Makes the answer; raises what happened before its first byte."""
ErrorBody = Callable[[MeshError], Mapping[str, Any]]


class Boundary:
    """Runs handlers so that no failure leaves without an answer and none is counted twice."""

    def __init__(self, pipeline: Pipeline, settings: HttpSettings) -> None:
        self.pipeline = pipeline
        self.settings = settings
        self.cross_origin = CrossOrigin(settings)
        self._pace = EventPace(settings.detailed_events_per_s_max)

    async def handle(
        self, request: web.Request, work: Work, *, error_body: ErrorBody = error_body
    ) -> web.StreamResponse:
        """One request, its outcome counted and logged once. `error_body` gives failures their shape."""
        request_id, client_id = self.pipeline.new_id(), client_id_of(request)
        exchange = Exchange(
            request=request,
            pipeline=self.pipeline,
            settings=self.settings,
            pace=self._pace,
            began_s=self.pipeline.clock.now(),
            client_id=client_id,
            request_id=request_id,
            headers={
                REQUEST_ID_HEADER: client_id or request_id,
                MESH_ID_HEADER: request_id,
                **self.cross_origin.headers(request),
            },
        )
        try:
            response = await self._worked(exchange, work, error_body)
        except asyncio.CancelledError:
            exchange.code, exchange.reason = CLIENT_GONE, "client_gone"
            raise
        finally:
            self._account(exchange)
        return response

    async def _worked(self, exchange: Exchange, work: Work, error_body: ErrorBody) -> web.StreamResponse:
        try:
            caller = self.pipeline.access.authenticate(exchange.request.headers)
            current_caller.set(caller)
            exchange.request[OWNER] = caller.tenant
            return await work(exchange)
        except MeshError as error:
            return failed(exchange, error, error_body)
        except Exception as error:  # noqa: BLE001 (the boundary that keeps defects from clients; logged)
            return failed(exchange, defect(error, exchange.request_id), error_body)

    async def body(self, request: web.Request) -> bytes:
        """The whole body. InvalidRequestError when it is too large, does not come in time or cannot be read."""
        try:
            if request.content.is_eof():
                # All of it came with the head, as most do: nothing to wait for, and nothing to put together.
                return self._whole(request.content)
            async with awake_timeout(self.settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise InvalidRequestError("the body did not come in time", reason="body_timeout") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except (web.RequestPayloadError, ValueError) as error:
            raise InvalidRequestError("the body cannot be read", reason="invalid_body") from error

    async def object(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object, with a `model` where there is only one to ask. InvalidRequestError as `body`."""
        values = read_object(await self.body(request))
        if values.get("model") is None and self.settings.model_is_optional:
            served = self.pipeline.models.served()
            if len(served) == 1:
                values["model"] = served[0].name
        return values

    def _whole(self, content: StreamReader) -> bytes:
        """A body that is all here, without the two copies that the framework makes of a long one."""
        body = content.read_nowait()
        while not content.at_eof():
            body += content.read_nowait()
        if len(body) > self.settings.body_bytes_max:
            raise self._too_large()
        return body

    def _too_large(self) -> InvalidRequestError:
        limit = self.settings.body_bytes_max
        return InvalidRequestError(f"the body is larger than {limit} bytes", reason=BODY_TOO_LARGE)

    def _account(self, exchange: Exchange) -> None:
        model = exchange.model_name or UNKNOWN_MODEL
        self.pipeline.metrics.requests.of(model, str(exchange.code)).value += 1
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
            "duration_s": round(self.pipeline.clock.now() - exchange.began_s, 6),
        }
        _log.info("request_finished", extra={"data": data})


def status_of(error: MeshError) -> int:
    """The HTTP status; a body beyond the limit has its own."""
    return 413 if error.reason == BODY_TOO_LARGE else http_status(error)[0]


def failed(exchange: Exchange, error: MeshError, error_body: ErrorBody = error_body) -> web.Response:
    """A failure as the answer."""
    exchange.code, exchange.reason = status_of(error), error.reason
    headers = {**exchange.headers, **error_headers(error)}
    return json_response(error_body(error), status=exchange.code, headers=headers)


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON body."""
    return web.Response(body=to_json(body), status=status, headers=headers, content_type="application/json")


def client_id_of(request: web.Request) -> str:
    """The client's own id of the request, for the log and for the echo; never used inside the mesh."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.match(given) else ""
