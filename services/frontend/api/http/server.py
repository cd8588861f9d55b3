"""The HTTP server: routes and limits."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvmesh.errors import MeshError, NotFoundError
from kvmesh.event_log import event_logger
from kvmesh.network.names import LOOPBACK
from kvmesh.rpc.http_status import METHOD_NOT_ALLOWED
from services.frontend.api.anthropic.body import MESSAGES_PATH, VERSION_HEADER
from services.frontend.api.anthropic.body import error_body as messages_error_body
from services.frontend.api.http.boundary import Boundary, Serve, error_response
from services.frontend.api.http.exchange import json_response
from services.frontend.api.http.hosts import with_host_check
from services.frontend.api.http.request_bytes import defer_continue
from services.frontend.api.http.runner import ConnectionRunner
from services.frontend.api.openai.bodies import model_body
from services.frontend.api.openai.embeddings import serve_embeddings
from services.frontend.api.openai.serve import serve_chat, serve_completion
from services.frontend.api.openai.tokens import serve_detokenize, serve_tokenize
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings

_log = event_logger(__name__)
ANY_PATH, ANY_PATH_CANONICAL = "/{path:.*}", "/{path}"
HEADER_BYTES_MAX, HEADERS_MAX = 8190, 128
"""Bytes of the request line and of each header, and number of headers: aiohttp's defaults."""
BACKLOG = 1024
"""Connections waiting to be accepted."""
SERVED_PATHS: Mapping[str, Serve] = {
    "/v1/chat/completions": serve_chat,
    "/v1/completions": serve_completion,
    "/v1/embeddings": serve_embeddings,
    "/tokenize": serve_tokenize,
    "/detokenize": serve_detokenize,
    "/v1/tokenize": serve_tokenize,
    "/v1/detokenize": serve_detokenize,
}


AddRoutes = Callable[[web.Application, Boundary], None]
"""Adds the routes of one more API."""


class HttpServer:
    """Serves OpenAI's API and `more_routes`. A part. `problems`: for /health, why models are not available."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: HttpSettings,
        registry: CollectorRegistry,
        *,
        problems: Callable[[], Mapping[str, str]] = dict,
        more_routes: Sequence[AddRoutes] = (),
    ) -> None:
        self._boundary = Boundary(pipeline, settings)
        self._more_routes = more_routes
        self._pipeline = pipeline
        self._settings = settings
        self._registry = registry
        self._problems = problems
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port; 0 before `start`."""
        return self._port

    async def start(self) -> None:
        """Binds the address and serves. Raises OSError if the address cannot be bound."""
        settings = self._settings
        app = web.Application(client_max_size=settings.body_bytes_max)
        for path, serve in SERVED_PATHS.items():
            app.router.add_post(path, self._boundary.handler(serve))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/live", self._live)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        for add_routes in self._more_routes:
            add_routes(app, self._boundary)
        # Last: the first route that matches is used.
        app.router.add_route("OPTIONS", ANY_PATH, self._boundary.preflight)
        app.router.add_route("*", ANY_PATH, self._no_route)
        for route in app.router.routes():
            # aiohttp has no such setting for a whole application.
            route._expect_handler = defer_continue
        self._runner = ConnectionRunner(
            app,
            wrap=lambda handler: with_host_check(handler, settings, self._refuse_host),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            # A client that disconnects cancels its handler, and with it the request on every hop.
            handler_cancellation=True,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            head_timeout_s=settings.head_timeout_s,
            stalled_timeout_s=settings.stalled_client_timeout_s,
            connections_max=settings.connections_max,
            keepalive_timeout=settings.idle_timeout_s,
            # A body is decompressed after its sender is known, and only if the key allows it.
            auto_decompress=False,
            # Connection discards what no handler has read.
            lingering_time=0,
        )
        await self._runner.setup()
        site = web.TCPSite(
            self._runner,
            settings.host or LOOPBACK,
            settings.port,
            backlog=BACKLOG,
            ssl_context=tls_context(settings),
            reuse_port=settings.shares_port or None,
        )
        await site.start()
        self._port = self._runner.addresses[0][1]
        _log.info("http_server_started", host=settings.host, port=self._port)

    async def aclose(self) -> None:
        """Stops listening and cancels all handlers. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _refuse_host(self, request: web.Request, error: MeshError) -> web.Response:
        return error_response(error, headers=self._boundary.common_headers(request))

    async def _models(self, request: web.Request) -> web.Response:
        headers = self._boundary.common_headers(request)
        try:
            caller = self._pipeline.access.authenticate(request.headers)
        except MeshError as error:
            return error_response(error, headers=headers)
        data = [
            model_body(model, name)
            for model in self._pipeline.models.served()
            for name in (model.name, *model.adapters)
            if caller.allows(name)
        ]
        return json_response({"object": "list", "data": data}, headers=headers)

    async def _model(self, request: web.Request) -> web.Response:
        name, headers = request.match_info["name"], self._boundary.common_headers(request)
        try:
            self._pipeline.access.authenticate(request.headers).check_model(name)
            return json_response(model_body(self._pipeline.models.find(name), name), headers=headers)
        except MeshError as error:
            return error_response(error, headers=headers)

    async def _health(self, _: web.Request) -> web.Response:
        models = [model.name for model in self._pipeline.models.served()]
        is_healthy = bool(models) and not self._pipeline.is_draining
        status = "ok" if is_healthy else "draining" if self._pipeline.is_draining else "no model is available"
        body = {"status": status, "models": models, "problems": dict(self._problems())}
        return json_response(body, status=200 if is_healthy else 503)

    async def _live(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": version("kvmesh")})

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _no_route(self, request: web.Request) -> web.Response:
        methods = await allowed_methods(request)
        what = (
            f"has no {request.method}, only {', '.join(methods)}"
            if methods
            else "does not exist; /docs lists the paths"
        )
        error = NotFoundError(f"{request.path[:128]} {what}", reason=METHOD_NOT_ALLOWED if methods else "not_found")
        headers = self._boundary.common_headers(request) | ({"Allow": ", ".join(methods)} if methods else {})
        is_anthropic = request.path.startswith(MESSAGES_PATH) or VERSION_HEADER in request.headers
        body = messages_error_body(error) if is_anthropic else None
        return error_response(error, headers=headers, body=body)


def tls_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """Returns the TLS context; None without TLS. Raises OSError (ssl.SSLError) if a file cannot be read."""
    if not settings.tls_certificate_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.tls_certificate_file, settings.tls_key_file)
    if settings.tls_authority_file:
        context.load_verify_locations(settings.tls_authority_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def allowed_methods(request: web.Request) -> list[str]:
    """Returns the methods of the request's path."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.canonical != ANY_PATH_CANONICAL:
            _, allowed = await resource.resolve(request)
            methods |= allowed
    return sorted(methods)
