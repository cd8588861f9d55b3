"""A frontend with its HTTP and gRPC servers on loopback, connected to a fake mesh."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvmesh.api.inference.grpc_service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kvmesh.api.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvmesh.clock import SystemClock
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.telemetry import Instruments, Telemetry
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.api.http.server import AddRoutes, HttpServer
from services.frontend.api.kserve.servicer import SERVICE_NAME as KSERVE_NAME
from services.frontend.api.kserve.servicer import KserveServicer
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import FrontendSettings
from tests.conformance.manual_clock import ManualClock
from tests.frontend_mesh import FakeMesh, StaticModels

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A running frontend and its addresses."""

    mesh: FakeMesh
    pipeline: Pipeline
    http_port: int
    rpc_address: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


_writers: list[asyncio.StreamWriter] = []
"""Writers of the test's raw connections. The rig closes them."""


@dataclass(kw_only=True)
class Connection:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)

    @classmethod
    async def open(cls, port: int) -> "Connection":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        _writers.append(writer)
        return cls(reader=reader, writer=writer)

    async def head(self) -> bytes:
        """Reads the head of the next response."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """Reads all bytes until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


def head_of(path: str = CHAT, *, method: str = "POST", **headers: str) -> bytes:
    """Returns the head of a request. Header names have _ for -."""
    lines = [f"{method} {path} HTTP/1.1"]
    given = {"Host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in given.items()), "", ""]).encode()


def write_keys(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a key document. Each row has its `key` in clear text."""
    entries = [{**{k: v for k, v in row.items() if k != "key"}, "key_sha256": hash_of(row["key"])} for row in rows]
    path.write_text(json.dumps({"keys": entries}))
    return path


@asynccontextmanager
async def frontend(
    model: ServedModel,
    *,
    keys: Path | None = None,
    mesh: FakeMesh | None = None,
    settings: FrontendSettings | None = None,
    more_routes: Sequence[AddRoutes] = (),
) -> AsyncIterator[Rig]:
    """Runs a frontend. `keys` is the key document; None: no key is required."""
    settings = settings or FrontendSettings()
    mesh = mesh or FakeMesh(answer=lambda _: [3, 4, 2])
    metrics = CollectorRegistry()
    instruments = Instruments(metrics, "frontend")
    clock = SystemClock()
    # With a clock that stands still no quota refills, however long a test takes.
    access = Access(AccessSettings(keys_file=str(keys or "")), ManualClock(), instruments=instruments)
    await access.start()
    pipeline = Pipeline(
        models=StaticModels([model]),
        links=mesh,
        router=mesh,
        clock=clock,
        generator=random.Random(3),
        metrics=FrontendMetrics(instruments, lambda: 0.0),
        settings=settings.pipeline,
        access=access,
    )
    http = HttpServer(pipeline, replace(settings.http, port=0), metrics, more_routes=more_routes)

    def add_services(server: Any) -> None:
        add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server)
        add_GRPCInferenceServiceServicer_to_server(KserveServicer(pipeline), server)

    rpc = RpcServer(
        settings.server_rpc,
        service_names=[SERVICE_NAME, KSERVE_NAME],
        add_services=add_services,
        interceptors=[*server_interceptors(Telemetry.create("frontend")), AccessInterceptor(access)],
    )
    await http.start()
    await rpc.start()
    try:
        yield Rig(mesh=mesh, pipeline=pipeline, http_port=http.port, rpc_address=rpc.address)
    finally:
        while _writers:
            _writers.pop().close()
        await http.aclose()
        await rpc.aclose()
