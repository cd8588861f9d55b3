"""/metrics, /health and /live over HTTP."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvmesh.event_log import event_logger
from kvmesh.network.names import LOOPBACK, host_port

_log = event_logger(__name__)
_REQUEST_BYTES_MAX = 64 * 1024


class MetricsServer:
    """A small HTTP server beside the gRPC server.

    An empty `host` is 127.0.0.1. `/live` answers while the event loop runs. `/health` answers 503 unless `is_healthy()`.
    """

    def __init__(
        self, registry: CollectorRegistry, host: str, port: int, *, is_healthy: Callable[[], bool] = lambda: True
    ) -> None:
        self._registry = registry
        self._host = host or LOOPBACK
        self._wanted_port = port
        self._is_healthy = is_healthy
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return host_port(self._host, self.port)

    async def start(self) -> None:
        """OSError when the address cannot be bound."""
        app = web.Application(client_max_size=_REQUEST_BYTES_MAX)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/live", self._live)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._wanted_port).start()
        self.port = self._runner.addresses[0][1]
        _log.debug("metrics_server_started", address=self.address)

    async def aclose(self) -> None:
        """Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        if self._is_healthy():
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "unavailable"}, status=503)

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})
