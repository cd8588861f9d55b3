"""Files and batches as one part of a frontend."""

from pathlib import Path
from random import Random

from aiohttp import web

from kvmesh.errors import NotFoundError, UnavailableError
from kvmesh.telemetry import Instruments, event_logger
from services.frontend.api.batches.batch_run import BatchResources, LineSlots
from services.frontend.api.batches.file_routes import FileRoutes
from services.frontend.api.batches.line_runner import Endpoints, LineRunner
from services.frontend.api.batches.routes import BatchRoutes
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.batches.service import BatchCalls
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.responses.serve import Responses
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.stores.batch_rows import MIGRATIONS
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.database import Database
from services.frontend.stores.files import FileStore

_log = event_logger(__name__)


class Batches:
    """A running part and an extension: the stores, the routes, and the runner."""

    def __init__(
        self,
        directory: Path,
        settings: BatchSettings,
        pipeline: Pipeline,
        responses: Responses,
        instruments: Instruments,
        *,
        instance_id: str,
    ) -> None:
        self._settings = settings
        self._database = Database(
            directory / "batches.sqlite",
            MIGRATIONS,
            busy_timeout_s=settings.busy_timeout_s,
            calls_max=settings.calls_max,
        )
        self._files = FileStore(directory, self._database, settings, pipeline.clock)
        store = BatchStore(self._database, settings, pipeline.clock, instance_id=instance_id)
        endpoints = Endpoints(responses, settings)
        self._runner = BatchRunner(
            BatchResources(
                store=store,
                files=self._files,
                lines=LineRunner(pipeline, endpoints, settings, Random(instance_id)),
                slots=LineSlots(pipeline, settings),
                settings=settings,
                clock=pipeline.clock,
                new_id=pipeline.new_id,
                is_draining=lambda: pipeline.is_draining,
            )
        )
        self._calls = BatchCalls(store, self._files, self._runner, settings, pipeline.new_id)
        self._routes = (
            FileRoutes(self._files, settings),
            BatchRoutes(store, self._files, self._runner, settings),
        )
        self._is_on = settings.is_on
        instruments.gauge_function(
            "running_batches", "Batches that this frontend works on.", lambda: float(self._runner.running)
        )

    @property
    def calls(self) -> BatchCalls | None:
        """Batches for other callers than HTTP; None where there are none, which is known once it has started."""
        return self._calls if self._is_on else None

    @property
    def running(self) -> int:
        """Batches that this process works on."""
        return self._runner.running

    async def start(self) -> None:
        """Opens the store. Where it was not asked for by name and cannot be had, there are no batches."""
        if not self._is_on:
            return
        try:
            await self._files.start()
            await self._database.open()
        except (UnavailableError, OSError) as error:
            if self._settings.directory:
                raise
            _log.warning("batches_off", why=str(error))
            self._is_on = False

    async def run(self) -> None:
        """Runs batches until cancelled."""
        if self._is_on:
            await self._runner.run()

    async def aclose(self) -> None:
        """Closes the store."""
        await self._database.aclose()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension. Started before: it is known whether there are batches."""
        if self._is_on:
            for routes in self._routes:
                routes.add_routes(app, boundary)
            return
        for path in ("/v1/files{rest:(/.*)?}", "/v1/batches{rest:(/.*)?}"):
            app.router.add_route("*", path, boundary.handler(_off))


async def _off(_: Exchange) -> web.StreamResponse:
    raise NotFoundError("this frontend has no files and batches", reason="batches_off")
