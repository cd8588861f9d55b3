"""Runs a router process with a fixed fleet, for `bench.router_grpc`.

It runs all parts of a router: gRPC server with interceptors, servicer, queue, core, metrics, maintenance. The fleet's workers are entries
without processes. With `--bare`, a servicer answers every request with the same placement, to measure gRPC alone.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator

from grpc.aio import ServicerContext

from bench.router import fill, fleet
from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.types.v1.model_pb2 import WorkerRef
from kvmesh.clock import SystemClock
from kvmesh.core import Handoff
from kvmesh.lifecycle import die_with_parent, run
from kvmesh.lifecycle.process import collect_rarely
from kvmesh.rpc.codec.worker import HANDOFF_NUMBERS
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.telemetry import Telemetry, configure_logging
from kvmesh.telemetry.logging import LogFormat, LogLevel
from services.router.metrics import RouterMetrics
from services.router.servicer import SERVICE_NAME, RouterServicer
from services.router.serving.maintenance import Maintenance
from services.router.serving.queue_dispatcher import QueueDispatcher


class BareServicer(RouterServicer):
    """Sends fixed answers, several per message as a router does."""

    async def Route(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.RouteRequest],
        context: ServicerContext[pb.RouteRequest, pb.RouteResponse],
    ) -> None:
        """Sends one answer per placement request."""
        await context.send_initial_metadata(())
        pair = [WorkerRef(worker_id=name, address="10.0.0.1:1", epoch=1) for name in ("p1", "d1")]
        handoff = HANDOFF_NUMBERS[Handoff.SEQUENTIAL]
        async for message in request_iterator:
            response = pb.RouteResponse()
            for ask in message.asks:
                response.placements.add(
                    ask_id=ask.ask_id, reservation_id="r", prefill=pair[0], decode=pair[1], handoff=handoff
                )
            if message.asks:
                await context.write(response)


async def serve(workers: int, blocks: int, depths: int, *, is_bare: bool) -> None:
    """Prints its port when it is ready. Serves until it is killed."""
    telemetry, clock = Telemetry.create("router"), SystemClock()
    core = fleet(workers, workers // 2, "kv")
    if not is_bare:
        fill(core, blocks, depths)
    metrics = RouterMetrics(telemetry.instruments, core)
    dispatch = QueueDispatcher(core, metrics, clock)
    servicer = (BareServicer if is_bare else RouterServicer)(
        core, metrics, clock, tracing=telemetry.tracing, dispatcher=dispatch
    )
    server = RpcServer(
        RpcSettings(),
        service_names=[SERVICE_NAME],
        add_services=servicer.add_to,
        interceptors=server_interceptors(telemetry),
    )
    collect_rarely()
    await server.start()
    await server.set_serving(True)
    print(server.port, flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatch.run())
        tasks.create_task(Maintenance(core, metrics, clock).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    die_with_parent(os.getppid())
    configure_logging(level=LogLevel.WARNING, style=LogFormat.TEXT, service="router")
    run(serve(options.workers, options.blocks, options.depths, is_bare=options.bare))


if __name__ == "__main__":
    main()
