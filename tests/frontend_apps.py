"""A frontend with all of its APIs on loopback, in front of a fake mesh."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.clock import SystemClock
from kvmesh.lifecycle import Part, RunningPart
from kvmesh.telemetry import Instruments
from services.frontend.access.access import Access
from services.frontend.api.anthropic.serve import add_message_routes
from services.frontend.api.batches.part import BatchesPart
from services.frontend.api.http.server import HttpServer
from services.frontend.api.openapi.routes import add_description_routes
from services.frontend.api.responses.serve import Responses
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import BatchSettings, HttpSettings, PipelineSettings, ResponsesSettings, StoresSettings
from services.frontend.stores.url import shared_database
from tests.frontend_mesh import FakeMesh, StaticModels


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """Settings of the APIs that store something."""

    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    stores: StoresSettings = field(default_factory=StoresSettings)


@dataclass(slots=True)
class RunningApps:
    """A running frontend."""

    url: str
    mesh: FakeMesh
    pipeline: Pipeline
    batches: BatchesPart
    registry: CollectorRegistry
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any, Any]:
        """Sends a request and returns status, JSON body and headers."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            kwargs["headers"] = {"Content-Type": "application/json", **kwargs.get("headers", {})}
        async with self.session.request(method, self.url + path, data=data, **kwargs) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path: str, body: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """Returns name and data of all events of a stream."""
        async with self.session.post(self.url + path, json={**body, "stream": True}, **kwargs) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            records = (await response.text()).split("\n\n")
        assert records.pop() == ""
        return [read_event(record) for record in records]

    def metrics(self) -> str:
        return generate_latest(self.registry).decode()


def read_event(record: str) -> tuple[str, Any]:
    """Returns name and data of one server-sent event."""
    first, _, second = record.partition("\n")
    assert first.startswith("event: ") and second.startswith("data: "), record
    return first[7:], json.loads(second[6:])


@asynccontextmanager
async def running_part(part: Part) -> AsyncIterator[None]:
    """Starts, runs and closes a part in the same way as the process does."""
    await part.start()
    running = asyncio.create_task(part.run()) if isinstance(part, RunningPart) else None
    try:
        yield
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled() or running.exception() is None, running.exception()
        await part.aclose()


@asynccontextmanager
async def running_apps(
    models: Sequence[ServedModel],
    mesh: FakeMesh,
    directory: Path,
    *,
    apps: AppSettings | None = None,
    http: HttpSettings | None = None,
    instance_id: str = "frontend-a",
    seed: int | None = None,
    access: Access | None = None,
    **settings: Any,
) -> AsyncIterator[RunningApps]:
    """Starts the frontend and stops it in the same order as the process does."""
    registry = CollectorRegistry()
    pipeline = Pipeline(
        models=StaticModels(models), links=mesh, router=mesh, clock=SystemClock(),
        generator=random.Random(seed),
        metrics=FrontendMetrics(Instruments(registry, "frontend"), lambda: pipeline.in_flight),
        settings=PipelineSettings(**settings), access=access,
    )  # fmt: skip
    apps = apps or AppSettings()
    shared = shared_database(apps.stores, pipeline.clock)
    responses = Responses(apps.responses, directory, pipeline.clock, shared=shared)
    instruments = Instruments(registry, "frontend")
    batches = BatchesPart(
        settings=apps.batches,
        directory=directory,
        pipeline=pipeline,
        responses=responses,
        instruments=instruments,
        instance_id=instance_id,
        shared=shared,
    )
    routes = [responses.add_routes, add_message_routes, batches.add_routes, add_description_routes]
    server = HttpServer(pipeline, replace(http or HttpSettings(), port=0), registry, more_routes=routes)
    parts: list[Part] = [*([access] if access is not None else []), responses, batches, server]
    async with AsyncExitStack() as stack:
        for part in parts:
            await stack.enter_async_context(running_part(part))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield RunningApps(
            url=f"http://127.0.0.1:{server.port}",
            mesh=mesh,
            pipeline=pipeline,
            batches=batches,
            registry=registry,
            session=session,
        )
