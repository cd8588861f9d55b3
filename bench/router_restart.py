"""Measures how long a restarted router takes until its index is exact: `python -m bench.router_restart`.

One process has a gRPC server and a KV feed per worker. Another has the router's membership, client and index. The time runs from the first
connection until all feeds are EXACT. Then the benchmark compares every worker's block count with its cache.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.api.worker.v1 import worker_pb2_grpc
from kvmesh.clock import SystemClock
from kvmesh.core import Capabilities, Handoff, KvStored, LoadRecord, ModelCard, Role, WorkerDescription, WorkerRef
from kvmesh.discovery.base import DECODE, Health, Registration
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.worker import to_description, to_kv_batch, to_load
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.worker.kv_feed import KvEventFeed
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.index.kv_feed import Trust
from services.router.serving.membership import FleetMembership

SEED = 7
EPOCH = 1


class FilledWorker:
    """A worker whose cache is full and does not change. The methods are named like those of the gRPC service."""

    def __init__(self, name: str, *, blocks: int, run_blocks: int, generator: Random) -> None:
        self.name = name
        self._feed = KvEventFeed(epoch=EPOCH, history_max=16, buffer_max=16)
        for start in range(0, blocks, run_blocks):
            run = [generator.getrandbits(64) for _ in range(min(run_blocks, blocks - start))]
            self._feed.append_nowait([KvStored(block_hashes=run)])
        servicer: Any = worker_pb2_grpc.WorkerServiceServicer
        service = servicer()
        service.Describe, service.WatchKv, service.WatchLoad = self.describe, self.watch_kv, self.watch_load
        self.service = service

    async def describe(self, request: pb.DescribeRequest, context: ServicerContext[Any, Any]) -> pb.DescribeResponse:
        return to_description(
            WorkerDescription(
                worker=WorkerRef(worker_id=self.name, address="127.0.0.1:1", epoch=EPOCH),
                role=Role.DECODE,
                model=ModelCard(name="m", source="m", context_tokens_max=4096, vocabulary_size=100),
                capabilities=Capabilities(
                    engine="simulated",
                    engine_version="1",
                    handoffs=(Handoff.SEQUENTIAL,),
                    roles=(Role.DECODE,),
                    features=("kv_events",),
                ),
                kv_compatibility_hash="same",
                block_size_tokens=16,
                kv_blocks_total=self._feed.blocks_count(),
            )
        )

    async def watch_kv(
        self, request: pb.WatchKvRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchKvResponse]:
        async for batch in self._feed.watch():
            yield to_kv_batch(batch)

    async def watch_load(
        self, request: pb.WatchLoadRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        while True:
            yield pb.WatchLoadResponse(load=to_load(LoadRecord(worker_id=self.name, epoch=EPOCH)))
            await asyncio.sleep(1.0)


async def serve(workers: int, blocks: int, run_blocks: int) -> None:
    """Prints the ports as a list, then serves until standard input ends."""
    generator = random.Random(SEED)
    servers = []
    for number in range(workers):
        worker = FilledWorker(f"worker-{number}", blocks=blocks // workers, run_blocks=run_blocks, generator=generator)
        server = RpcServer(
            RpcSettings(port=0, grace_s=0),
            service_names=["kvmesh.worker.v1.WorkerService"],
            add_services=lambda to, it=worker.service: worker_pb2_grpc.add_WorkerServiceServicer_to_server(it, to),  # type: ignore[misc]
        )
        await server.start()
        await server.set_serving(True)
        servers.append(server)
    print(json.dumps([server.port for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.aclose()


async def restart(ports: list[int], blocks: int) -> tuple[float, float, int]:
    """Starts a router with an empty index. Returns the seconds until it is exact, the longest time its loop was blocked, and the blocks
    indexed."""
    registry = MemoryAgent().registry()
    for number, port in enumerate(ports):
        await registry.register(
            Registration(
                service=DECODE,
                instance_id=f"worker-{number}",
                host="127.0.0.1",
                port=port,
                check_interval_s=5.0,
                ttl_s=600.0,
            )
        )
        await registry.heartbeat(f"worker-{number}", health=Health.PASSING)
    core = RouterCore(CoreSettings(), router_id="router", generator=Random(SEED))
    channels = ChannelPool(settings=RpcSettings())
    membership = FleetMembership(
        registry,
        GrpcWorkerClient(channels),
        core.fleet,
        clock=SystemClock(),
        generator=Random(SEED),
    )
    started_s = last_s = time.perf_counter()
    running = asyncio.create_task(membership.run())
    held_s = 0.0
    while not is_exact(core, len(ports)):
        await asyncio.sleep(0.001)
        held_s, last_s = max(held_s, time.perf_counter() - last_s - 0.001), time.perf_counter()
        if last_s - started_s > 15:
            raise TimeoutError("not exact after 120 s")
    took_s = time.perf_counter() - started_s
    for worker in core.fleet.workers.values():
        assert worker.feed is not None
        assert worker.feed.blocks == blocks // len(ports), (worker.worker_id, worker.feed.blocks)
    found = len(core.index.device)
    running.cancel()
    await asyncio.wait([running])
    await channels.aclose()
    return took_s, held_s, found


def is_exact(core: RouterCore, workers: int) -> bool:
    """Returns whether every worker is known and its feed is EXACT."""
    feeds = [worker.feed for worker in core.fleet.workers.values()]
    return len(feeds) == workers and all(feed is not None and feed.trust is Trust.EXACT for feed in feeds)


@contextmanager
def worker_process(arguments: argparse.Namespace) -> Iterator[list[int]]:
    """Starts the workers' process; yields their ports."""
    command = [sys.executable, "-m", "bench.router_restart", "--serve", "--workers", str(arguments.workers)]
    command += ["--blocks", str(arguments.blocks), "--run-blocks", str(arguments.run_blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="total blocks of all workers")
    parser.add_argument("--run-blocks", type=int, default=64, help="blocks of one prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.workers, arguments.blocks, arguments.run_blocks))
        return
    print(f"{arguments.blocks:,} blocks over {arguments.workers} workers, prompts of {arguments.run_blocks} blocks")
    with worker_process(arguments) as ports:
        for _ in range(arguments.repeats):
            took_s, held_s, found = asyncio.run(restart(ports, arguments.blocks))
            print(
                f"  exact after {took_s:.2f} s, {found:,} blocks; the loop was blocked for {1e3 * held_s:.0f} ms at most"
            )


if __name__ == "__main__":
    main()
