"""A frontend's HTTP server with /ui on loopback, with a fake mesh."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvmesh.clock import SystemClock
from kvmesh.core import Generation
from kvmesh.discovery.base import Registry
from kvmesh.rpc.channels import ChannelPool
from kvmesh.telemetry import Telemetry
from services.frontend.access.access import Access
from services.frontend.access.settings import AccessSettings
from services.frontend.api.http.server import HttpServer
from services.frontend.metrics import FrontendMetrics
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings, PipelineSettings, UiSettings
from services.frontend.ui.observer import MeshObserver, Reads
from services.frontend.ui.routes import UiRoutes
from tests.batch_process import answering
from tests.frontend_apps import running_part
from tests.frontend_mesh import StaticModels, served_model, write_model


@asynccontextmanager
async def running_page(
    directory: Path,
    reader: Reads,
    *,
    registry: Registry,
    channels: ChannelPool,
    access: Access | None = None,
    ui: UiSettings | None = None,
    http: HttpSettings | None = None,
    rest_may_follow: asyncio.Event | None = None,
) -> AsyncIterator[str]:
    """Runs the server. Yields its address. Chat answers `answer N` for the last number N of the prompt.

    `rest_may_follow`: each answer waits for it after its first token.
    """
    clock = SystemClock()
    access = access or Access(AccessSettings(), clock)
    ui, http = ui or UiSettings(), replace(http or HttpSettings(), port=0)
    model = served_model(write_model(directory / "model"))
    mesh = answering(model, step_s=0.01)
    if rest_may_follow is not None:

        async def wait_for_rest(_: Generation, sent: int) -> None:
            if sent:
                await rest_may_follow.wait()

        mesh.before_step = wait_for_rest
    telemetry = Telemetry.create("frontend")
    pipeline = Pipeline(
        models=StaticModels([model]), links=mesh, router=mesh, clock=clock, generator=random.Random(1),
        metrics=FrontendMetrics(telemetry.instruments, lambda: pipeline.in_flight),
        settings=PipelineSettings(), access=access,
    )  # fmt: skip
    observer = MeshObserver(reader, clock, frontend_id="frontend-1", instruments=telemetry.instruments)
    routes = UiRoutes(observer, access=access, registry=registry, channels=channels, ui=ui, http=http)
    server = HttpServer(pipeline, http, telemetry.registry, more_routes=[routes.add_routes])
    async with AsyncExitStack() as stack:
        for part in (access, server, observer):
            await stack.enter_async_context(running_part(part))
        yield f"http://127.0.0.1:{server.port}"
