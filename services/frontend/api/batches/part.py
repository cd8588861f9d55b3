"""Files and batches: the part of a frontend that owns their stores, routes and runner."""

from pathlib import Path
from random import Random

from aiohttp import web

from kvmesh.errors import NotFoundError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.telemetry import Instruments
from services.frontend.api.anthropic.batches import MessageBatchRoutes
from services.frontend.api.batches.batch_run import BatchResources, LineSlots
from services.frontend.api.batches.file_routes import FileRoutes
from services.frontend.api.batches.line_runner import LineRunner
from services.frontend.api.batches.routes import BatchRoutes
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.batches.service import BatchService
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.responses.serve import Responses
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import MIGRATIONS
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.contents import DirectoryContents, FileContents
from services.frontend.stores.database import Database, StoreClock
from services.frontend.stores.database_contents import DatabaseContents
from services.frontend.stores.files import FileStore
from services.frontend.stores.sqlite import SqliteDatabase

_log = event_logger(__name__)
BUSY_TIMEOUT_S = 10.0
"""Longest wait for another process that writes to the database."""


class BatchesPart:
    """A running part. `directory`: of the files and the store, unless the settings name another one.

    `shared`: the database that frontends on several machines share, which the process opens too. The directory then holds only files in use.
    """

    def __init__(
        self,
        *,
        settings: BatchSettings,
        directory: Path,
        pipeline: Pipeline,
        responses: Responses,
        instruments: Instruments,
        instance_id: str,
        shared: Database | None = None,
    ) -> None:
        self._settings = settings
        self._is_optional = not settings.directory and shared is None
        directory = Path(settings.directory).expanduser() if settings.directory else directory / "batches"
        self._database = shared or SqliteDatabase(
            directory / "batches.sqlite",
            MIGRATIONS,
            busy_timeout_s=BUSY_TIMEOUT_S,
        )
        clock = StoreClock(pipeline.clock, self._database)
        contents: FileContents = DirectoryContents(directory / "files")
        if shared is not None:
            contents = DatabaseContents(shared, directory / "files", clock)
        self._files = FileStore(contents=contents, database=self._database, settings=settings, clock=clock)
        store = BatchStore(self._database, settings, clock, instance_id=instance_id)
        self._runner = BatchRunner(
            BatchResources(
                store=store,
                files=self._files,
                lines=LineRunner(
                    pipeline=pipeline, responses=responses, settings=settings, generator=Random(instance_id)
                ),
                slots=LineSlots(pipeline, settings),
                settings=settings,
                pipeline=pipeline,
            )
        )
        self._service = BatchService(
            store=store, files=self._files, runner=self._runner, settings=settings, new_id=pipeline.new_id
        )
        self._is_on = settings.is_on
        instruments.gauge_function(
            "running_batches", help="Batches that this frontend works on.", function=lambda: float(self.running)
        )

    @property
    def service(self) -> BatchService | None:
        """Batches for gRPC clients; None if they are off, which is known after `start`."""
        return self._service if self._is_on else None

    @property
    def running(self) -> int:
        """The number of batches that this process works on."""
        return self._runner.running

    async def start(self) -> None:
        """Opens the store. If its directory is the default and it cannot be opened, batches are off."""
        if not self._is_on:
            return
        try:
            await self._files.start()
            await self._database.open()
        except (UnavailableError, OSError) as error:
            if not self._is_optional:
                raise
            _log.warning("batches_off", detail=str(error))
            self._is_on = False

    async def run(self) -> None:
        """Runs batches until cancelled."""
        if self._is_on:
            await self._runner.run()

    async def aclose(self) -> None:
        await self._database.aclose()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """Called after `start`, which decides whether there are batches."""
        if self._is_on:
            FileRoutes(self._files, self._settings).add_routes(app, boundary)
            BatchRoutes(self._service, self._settings).add_routes(app, boundary)
            MessageBatchRoutes(self._service, self._settings).add_routes(app, boundary)
            return
        for path in ("/v1/files{rest:(/.*)?}", "/v1/batches{rest:(/.*)?}", "/v1/messages/batches{rest:(/.*)?}"):
            app.router.add_route("*", path, boundary.handler(_serve_off))


async def _serve_off(_: Exchange) -> web.StreamResponse:
    raise NotFoundError("this frontend has no store for files and batches", reason="batches_off")
