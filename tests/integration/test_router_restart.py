"""A router restarts among workers with full caches, over real gRPC. Its index then equals their caches."""

import asyncio
from contextlib import AsyncExitStack
from random import Random

from kvmesh.clock import SystemClock
from kvmesh.core import KvRemoved, KvStored
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.simulation.registry import MemoryAgent
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.index.kv_feed import Trust
from services.router.serving.membership import FleetMembership
from services.simulation.invariants import blocks_of
from tests.index_checks import flush_all
from tests.integration.test_router_service import end, eventually
from tests.integration.workers import ToldWorker

WORKERS = 4
RUNS = 60
RUN_BLOCKS = 100


async def start_router(registry, channels: ChannelPool, stack: AsyncExitStack) -> RouterCore:
    core = RouterCore(CoreSettings(), router_id="router", generator=Random(1))
    membership = FleetMembership(
        registry,
        GrpcWorkerClient(channels),
        core.fleet,
        clock=SystemClock(),
        generator=Random(1),
    )
    stack.push_async_callback(end, asyncio.create_task(membership.run()))
    return core


def are_exact(core: RouterCore, workers: list[ToldWorker]) -> bool:
    known = core.fleet.workers
    feeds = [known[w.description.worker.worker_id].feed for w in workers] if len(known) == len(workers) else [None]
    return all(f is not None and f.trust is Trust.EXACT for f in feeds) and all(
        feed is not None and feed.resume_at == worker.feed.at for feed, worker in zip(feeds, workers, strict=True)
    )


async def test_a_restarted_router_knows_the_workers_blocks():
    """Snapshots consist of several parts, and blocks change while they are read. The test starts two routers, one after the other."""
    generator = Random(5)
    async with AsyncExitStack() as stack:
        registry = MemoryAgent().registry()
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        workers = [ToldWorker(f"w{number}", "decode") for number in range(WORKERS)]
        held: list[set[int]] = [set() for _ in workers]
        shared = [[generator.getrandbits(64) for _ in range(RUN_BLOCKS)] for _ in range(RUNS // 2)]
        for worker, blocks in zip(workers, held, strict=True):
            own = [[generator.getrandbits(64) for _ in range(RUN_BLOCKS)] for _ in range(RUNS // 2)]
            for run in shared + own:
                worker.tell(KvStored(block_hashes=run))
                blocks.update(run)
            await worker.start(registry)
            stack.push_async_callback(worker.die)
        for _ in range(2):
            core = await start_router(registry, channels, stack)
            while not are_exact(core, workers):
                for worker, blocks in zip(workers, held, strict=True):
                    run = [generator.getrandbits(64) for _ in range(20)]
                    gone = generator.sample(sorted(blocks), 10)
                    worker.tell(KvStored(block_hashes=run), KvRemoved(block_hashes=gone))
                    blocks.update(run)
                    blocks.difference_update(gone)
                await asyncio.sleep(0.02)
                await eventually(lambda core=core: bool(core.fleet.workers))
                if all(worker.feed.at[1] > 80 for worker in workers):
                    await eventually(lambda core=core: are_exact(core, workers))
            for worker, blocks in zip(workers, held, strict=True):
                feed = core.fleet.workers[worker.description.worker.worker_id].feed
                assert blocks_of(core.index.device, feed.bits[0]) == blocks
            while core.index.sweep(10_000):
                pass
            flush_all(core.index.device)
            assert len(core.index.device) == len(set().union(*held))
