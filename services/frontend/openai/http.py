"""The HTTP server: routes, limits, and the one boundary where failures become answers."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError
from kvmesh.rpc.http_status import http_status
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.models import ServedModel
from services.frontend.openai.asked import Asked
from services.frontend.openai.bodies import error_body, error_headers, model_body, to_json
from services.frontend.openai.chat_request import read_chat
from services.frontend.openai.completion_request import read_completion
from services.frontend.openai.embeddings import serve_embeddings
from services.frontend.openai.fields import read_object
from services.frontend.openai.serve import CLIENT_GONE, Exchange, defect, serve
from services.frontend.openai.tokens import serve_detokenize, serve_tokenize
from services.frontend.pipeline import Pipeline
from services.frontend.settings import HttpSettings

_log = logging.getLogger(__name__)
REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"

Reader = Callable[[Mapping[str, Any], str], Asked]
Answerer = Callable[[Exchange, Mapping[str, Any]], Awaitable[web.StreamResponse]]
# What takes a JSON object and answers it without a stream.
ANSWERERS: Mapping[str, Answerer] = {
    "/v1/embeddings": serve_embeddings,
    "/tokenize": serve_tokenize,
    "/detokenize": serve_detokenize,
    "/v1/tokenize": serve_tokenize,
    "/v1/detokenize": serve_detokenize,
}


class HttpServer:
    """Serves the API. A part; `problems` tells for /health why models cannot be asked."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: HttpSettings,
        registry: CollectorRegistry,
        *,
        problems: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._registry = registry
        self._problems = problems
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port listened on; 0 before `start`."""
        return self._port

    async def start(self) -> None:
        """Binds and serves. OSError when the address cannot be bound."""
        app = web.Application(client_max_size=self._settings.body_bytes_max)
        app.router.add_post(CHAT_PATH, self._chat)
        app.router.add_post(COMPLETION_PATH, self._completion)
        for path, answerer in ANSWERERS.items():
            app.router.add_post(path, partial(self.answer, answerer))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            # A client that goes away cancels its handler, and with it the request on every hop.
            handler_cancellation=True,
            max_line_size=self._settings.header_bytes_max,
            max_field_size=self._settings.header_bytes_max,
            max_headers=self._settings.headers_max,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=self._settings.backlog)
        await site.start()
        self._port = self._runner.addresses[0][1]
        _log.info("http_server_started", extra={"data": {"host": self._settings.host, "port": self._port}})

    async def aclose(self) -> None:
        """Stops listening and cancels what is left. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, lambda values, id_: read_completion(values, id_, self._pipeline.settings))

    async def _answer(self, request: web.Request, read: Reader) -> web.StreamResponse:
        async def generate(exchange: Exchange, values: Mapping[str, Any]) -> web.StreamResponse:
            return await serve(exchange, read(values, exchange.request_id))

        return await self.answer(generate, request)

    async def answer(self, answerer: Answerer, request: web.Request) -> web.StreamResponse:
        """One request whose body is a JSON object, its outcome counted and logged once."""
        began_s = self._pipeline.clock.now()
        request_id, client_id = self._pipeline.new_id(), _client_id(request)
        exchange = Exchange(
            request=request,
            pipeline=self._pipeline,
            settings=self._settings,
            began_s=began_s,
            client_id=client_id,
            request_id=request_id,
            headers={REQUEST_ID_HEADER: client_id or request_id},
        )
        try:
            response = await self._served(exchange, answerer)
        except asyncio.CancelledError:
            exchange.code, exchange.reason = CLIENT_GONE, "client_gone"
            raise
        finally:
            self._account(exchange)
        return response

    async def _served(self, exchange: Exchange, answerer: Answerer) -> web.StreamResponse:
        try:
            body = await self._body(exchange.request)
            return await answerer(exchange, read_object(body))
        except web.HTTPRequestEntityTooLarge:
            limit = self._settings.body_bytes_max
            error = InvalidRequestError(f"the body is larger than {limit} bytes", reason="body_too_large")
            return _failed(exchange, error, code=413)
        except MeshError as error:
            return _failed(exchange, error)
        except Exception as error:  # noqa: BLE001 (the boundary that keeps defects from clients; logged)
            return _failed(exchange, defect(error, exchange.request_id))

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise InvalidRequestError("the body did not come in time", reason="body_timeout") from None
        except (web.RequestPayloadError, ValueError) as error:
            raise InvalidRequestError("the body cannot be read", reason="invalid_body") from error

    def _account(self, exchange: Exchange) -> None:
        model = exchange.model_name or UNKNOWN_MODEL
        self._pipeline.metrics.requests.labels(model, str(exchange.code)).inc()
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

    async def _models(self, request: web.Request) -> web.Response:
        data = [body for model in self._pipeline.models.served() for body in _entries(model)]
        return _json({"object": "list", "data": data}, headers=_common_headers(request))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            return _json(model_body(self._pipeline.models.find(name), name), headers=_common_headers(request))
        except MeshError as error:
            return _error_response(error, headers=_common_headers(request))

    async def _health(self, _: web.Request) -> web.Response:
        models = [model.name for model in self._pipeline.models.served()]
        is_healthy = bool(models) and not self._pipeline.is_draining
        why = "ok" if is_healthy else "draining" if self._pipeline.is_draining else "no model can be asked"
        body = {"status": why, "models": models, "problems": dict(self._problems())}
        return _json(body, status=200 if is_healthy else 503)

    async def _live(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _nothing(self, request: web.Request) -> web.Response:
        others = (CHAT_PATH, COMPLETION_PATH, "/v1/models", "/health", "/live", "/metrics")
        is_known = request.path in others or request.path in ANSWERERS
        error = NotFoundError(
            f"{request.method} {request.path[:128]} does not exist",
            reason="method_not_allowed" if is_known else "not_found",
        )
        return _error_response(error, code=405 if is_known else 404, headers=_common_headers(request))


def _failed(exchange: Exchange, error: MeshError, *, code: int = 0) -> web.Response:
    exchange.code, exchange.reason = code or http_status(error)[0], error.reason
    return _error_response(error, code=exchange.code, headers=exchange.headers)


def _error_response(error: MeshError, *, code: int = 0, headers: Mapping[str, str]) -> web.Response:
    return _json(error_body(error), status=code or http_status(error)[0], headers={**headers, **error_headers(error)})


def _json(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=to_json(body), status=status, headers=headers, content_type="application/json")


def _entries(model: ServedModel) -> list[dict[str, Any]]:
    return [model_body(model, name) for name in (model.name, *model.adapters)]


def _client_id(request: web.Request) -> str:
    """The client's own id of the request, for the log and for the echo; never used inside the mesh."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.match(given) else ""


def _common_headers(request: web.Request) -> dict[str, str]:
    client_id = _client_id(request)
    return {REQUEST_ID_HEADER: client_id} if client_id else {}
