"""A worker as routers see it: real gRPC, a real KV feed and a registration, but no engine. The test determines what it sends."""

import asyncio
from contextlib import aclosing

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.api.worker.v1 import worker_pb2_grpc
from kvmesh.core import KvEvent, LoadRecord, WorkerDescription
from kvmesh.discovery.base import DECODE, PREFILL, Health, Registration, Registry
from kvmesh.rpc.codec.scalars import optional_field
from kvmesh.rpc.codec.worker import to_description, to_kv_batch, to_load
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.worker.kv_feed import KvEventFeed
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import description

REPEAT_S = 0.1


class ToldWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends the events and load records that the test sets."""

    def __init__(self, name: str, role: str, *, epoch: int = 1, **options) -> None:
        self.description: WorkerDescription = description(name, role, epoch=epoch, **options)
        self.feed = KvEventFeed(epoch=epoch, history_max=100, buffer_max=100)
        self.load = LoadRecord(worker_id=name, epoch=epoch)
        self.is_silent = False
        self.watches = 0
        self._server: RpcServer | None = None
        self.port = 0

    def tell(self, *events: KvEvent) -> None:
        """Publishes events of its cache."""
        self.feed.append_nowait(events)

    async def Describe(self, request, context):
        return to_description(self.description)

    async def WatchKv(self, request, context):
        self.watches += 1
        resume = optional_field(request, "resume_epoch"), optional_field(request, "resume_sequence")
        async with aclosing(self.feed.watch(*resume)) as batches:
            async for batch in batches:
                yield to_kv_batch(batch)

    async def WatchLoad(self, request, context):
        while True:
            if not self.is_silent:
                yield pb.WatchLoadResponse(load=to_load(self.load))
            await asyncio.sleep(REPEAT_S)

    async def start(self, registry: Registry, *, port: int = 0) -> None:
        """Starts the server and registers the worker."""
        self._server = RpcServer(
            RpcSettings(port=port, grace_s=0),
            service_names=["kvmesh.worker.v1.WorkerService"],
            add_services=lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server),
        )
        await self._server.start()
        await self._server.set_serving(True)
        self.port = self._server.port
        name = self.description.worker.worker_id
        await registry.register(
            Registration(
                service=PREFILL if self.description.role == "prefill" else DECODE,
                instance_id=name,
                host="127.0.0.1",
                port=self.port,
                check_interval_s=0.5,
                ttl_s=10 * PATIENCE_S,
            )
        )
        await registry.heartbeat(name, health=Health.PASSING)

    async def die(self) -> None:
        """Breaks all connections without deregistering."""
        if self._server is not None:
            await self._server.aclose()
            self._server = None
