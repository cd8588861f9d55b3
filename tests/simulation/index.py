"""The router's index under faults, on virtual time: `python -m tests.simulation.index --seed 7`.

The workers' KV feeds, the encoding of every batch, and the router's membership, fleet, feeds and index are real. A client between them loses,
duplicates, delays and swaps batches and breaks streams while faults last. Meanwhile workers restart under their addresses, and the router
restarts with an empty index.

When the faults have stopped, the index must equal the union of the workers' caches: every tier, every rank, block by block, and no other block.
Lookups must return what a walk along the prompt returns.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.clock import SystemClock
from kvmesh.core import KvBatch, KvCleared, KvEvent, KvRemoved, KvStored, KvTier, LoadRecord, WorkerDescription
from kvmesh.discovery.base import DECODE, PREFILL, Health, Instance, View
from kvmesh.errors import MeshError, UnavailableError
from kvmesh.rpc.codec.worker import from_kv_batch, to_kv_batch
from kvmesh.worker.kv_feed import KvEventFeed
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.index.holder_index import bits
from services.router.index.kv_feed import Trust
from services.router.serving.membership import FleetMembership
from services.simulation.invariants import blocks_of
from tests.index_checks import flush_all, matches
from tests.unit.router_fleets import description
from tests.virtual_loop import run_virtual

FAULTS_S = 3.0
SETTLED_WITHIN_S = 8.0
"""The longest reconnect pause, a snapshot, and one more of each: a stream may have broken just before the faults stopped."""

PROMPTS = 12
LENGTH = 24
TIERS = (KvTier.DEVICE, KvTier.DEVICE, KvTier.DEVICE, KvTier.HOST, KvTier.DISK)
GONE = UnavailableError("the worker's process has ended", reason="worker_gone")


def prompt(number: int) -> list[int]:
    """Returns prompts that form a tree: prompt n differs from prompt n - 1 from depth 2n on."""
    return [1000 * min(number, depth // 2) + depth + 1 for depth in range(LENGTH)]


ALL_PROMPTS = [prompt(number) for number in range(PROMPTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities per batch, and how many processes restart."""

    lose: float
    double: float
    swap: float
    stall: float
    break_off: float
    worker_restarts: int
    router_restarts: int

    @classmethod
    def drawn(cls, generator: Random) -> "Faults":
        """Draws the faults. Often one kind dominates, because a mix of all kinds hides the effect of a single one."""
        chances = [generator.choice((0.0, 0.02, 0.2)) for _ in range(5)]
        return cls(
            lose=chances[0],
            double=chances[1],
            swap=chances[2],
            stall=chances[3],
            break_off=chances[4] / 2,
            worker_restarts=generator.randrange(4),
            router_restarts=generator.randrange(3),
        )


class CachingWorker:
    """A worker's cache, and the feed that reports its changes. The sets of blocks are the reference."""

    def __init__(self, name: str, generator: Random) -> None:
        self.name = name
        self.ranks = generator.choice((1, 1, 2))
        self.epoch = 1
        self._random = generator
        self.cached: dict[tuple[int, KvTier], set[int]] = {
            (rank, tier): set() for rank in range(self.ranks) for tier in KvTier
        }
        self.feed = self._make_feed()

    def _make_feed(self) -> KvEventFeed:
        history_max = self._random.choice((1, 8, 64))
        return KvEventFeed(epoch=self.epoch, history_max=history_max, buffer_max=24, message_blocks_max=24)

    def restart(self) -> None:
        """Starts a new process under the same address, with an empty cache."""
        self.feed.close_nowait(GONE)
        self.epoch += 1
        for blocks in self.cached.values():
            blocks.clear()
        self.feed = self._make_feed()

    def describe(self) -> WorkerDescription:
        return description(self.name, "decode", epoch=self.epoch, ranks=self.ranks)

    def change(self) -> None:
        """Stores, evicts or clears blocks, and reports the events in one batch."""
        events = [self._event() for _ in range(self._random.randint(1, 3))]
        self.feed.append_nowait(events)

    def _event(self) -> KvEvent:
        rank, tier = self._random.randrange(self.ranks), self._random.choice(TIERS)
        held = self.cached[rank, tier]
        draw = self._random.random()
        if draw < 0.02:
            for of in KvTier:
                self.cached[rank, of].clear()
            return KvCleared(data_parallel_rank=rank)
        if draw < 0.4 and held:
            gone = self._random.sample(sorted(held), min(len(held), self._random.randint(1, 12)))
            held.difference_update(gone)
            return KvRemoved(block_hashes=gone, tier=tier, data_parallel_rank=rank)
        chain = self._random.choice(ALL_PROMPTS)
        first = self._random.choice((0, 0, 0, self._random.randrange(LENGTH)))
        run = chain[first : self._random.randint(first + 1, LENGTH)]
        held.update(run)
        parent = chain[first - 1] if first else None
        return KvStored(block_hashes=run, parent_hash=parent, tier=tier, data_parallel_rank=rank)


class FaultyClient:
    """Calls workers like `GrpcWorkerClient`. Encodes and decodes each batch, and loses, repeats or delays some of them."""

    def __init__(self, workers: Sequence[CachingWorker], faults: Faults, generator: Random) -> None:
        self._workers = {f"{worker.name}:1": worker for worker in workers}
        self._faults = faults
        self._random = generator
        self.is_faulty = True

    async def describe(self, address: str, *, timeout_s: float) -> WorkerDescription:
        return self._workers[address].describe()

    async def watch_kv(
        self, address: str, *, resume_at: tuple[int, int] | None = None
    ) -> AsyncGenerator[KvBatch, None]:
        """Yields batches of the worker's feed. The stream ends with the worker's process."""
        kept: KvBatch | None = None
        async with aclosing(self._workers[address].feed.watch(*(resume_at or (None, None)))) as batches:  # type: ignore[type-var]
            async for batch in batches:
                await asyncio.sleep(0.001)
                if self.is_faulty and kept is None and self._random.random() < self._faults.swap:
                    kept = batch
                    continue
                for each in self._drop_or_repeat(batch):
                    yield self._encode_and_decode(each)
                if kept is not None:
                    late, kept = kept, None
                    yield self._encode_and_decode(late)
                await self._inject_stream_faults()

    async def watch_load(self, address: str, *, interval_s: float) -> AsyncGenerator[LoadRecord, None]:
        """Yields an empty load record every second, until the worker's process ends."""
        worker = self._workers[address]
        epoch = worker.epoch
        while worker.epoch == epoch:
            yield LoadRecord(worker_id=worker.name, epoch=epoch)
            await asyncio.sleep(1.0)
        raise GONE

    def _drop_or_repeat(self, batch: KvBatch) -> Iterator[KvBatch]:
        if self.is_faulty and self._random.random() < self._faults.lose:
            return
        yield batch
        if self.is_faulty and self._random.random() < self._faults.double:
            yield batch

    async def _inject_stream_faults(self) -> None:
        if not self.is_faulty:
            return
        if self._random.random() < self._faults.stall:
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
        if self._random.random() < self._faults.break_off:
            raise UnavailableError("the connection broke", reason="connection_broken")

    def _encode_and_decode(self, batch: KvBatch) -> KvBatch:
        return from_kv_batch(pb.WatchKvResponse.FromString(to_kv_batch(batch).SerializeToString()))


class StaticRegistry:
    """Lists the same healthy workers forever, because these runs do not test the registry."""

    def __init__(self, workers: Sequence[CachingWorker]) -> None:
        self._workers = workers

    async def watch(self, service: str) -> AsyncIterator[View]:
        """Yields one view."""
        instances = [
            Instance(
                service=DECODE,
                instance_id=worker.name,
                host=worker.name,
                port=1,
                meta={},
                tags=(),
                health=Health.PASSING,
                is_draining=False,
            )
            for worker in self._workers
            if service != PREFILL
        ]
        yield View(service=service, index=1, instances=instances)
        await asyncio.Event().wait()


class IndexSimulation:
    """Workers, a router that restarts now and then, and their faults, all drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.workers = [CachingWorker(f"w{number}", self.random) for number in range(self.random.randint(1, 4))]
        self.faults = Faults.drawn(self.random)
        self.client = FaultyClient(self.workers, self.faults, self.random)
        self.router: RouterCore
        self._membership: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises AssertionError if the index is wrong."""
        for worker in self.workers:
            for _ in range(self.random.randrange(40)):
                worker.change()
        await self._start_router()
        async with asyncio.TaskGroup() as tasks:
            ending = asyncio.get_running_loop().time() + FAULTS_S
            for worker in self.workers:
                tasks.create_task(self._keep_changing(worker, ending))
            for _ in range(self.faults.worker_restarts):
                tasks.create_task(self._restart_worker())
            for _ in range(self.faults.router_restarts):
                tasks.create_task(self._restart_router())
            tasks.create_task(self._use(ending))
        self.client.is_faulty = False
        # A stream cannot detect that its very last message was lost; the next message reveals it.
        for worker in self.workers:
            worker.change()
        await self._wait_settled()
        self.check()
        await self._stop_router()

    async def _start_router(self) -> None:
        self.router = RouterCore(CoreSettings(), router_id="r", generator=self.random)
        membership = FleetMembership(
            StaticRegistry(self.workers),  # type: ignore[arg-type]
            self.client,
            self.router.fleet,
            clock=SystemClock(),
            generator=self.random,
        )
        self._membership = asyncio.create_task(membership.run())

    async def _stop_router(self) -> None:
        assert self._membership is not None
        self._membership.cancel()
        await asyncio.wait([self._membership])

    async def _restart_router(self) -> None:
        await asyncio.sleep(self.random.uniform(0, FAULTS_S))
        await self._stop_router()
        await self._start_router()

    async def _restart_worker(self) -> None:
        await asyncio.sleep(self.random.uniform(0, FAULTS_S))
        self.random.choice(self.workers).restart()

    async def _keep_changing(self, worker: CachingWorker, ending: float) -> None:
        while asyncio.get_running_loop().time() < ending:
            await asyncio.sleep(self.random.expovariate(20))
            for _ in range(self.random.choice((1, 1, 1, 1, 16))):
                worker.change()

    async def _use(self, ending: float) -> None:
        """Places requests, sweeps the index and expires predictions between the events."""
        loop = asyncio.get_running_loop()
        while loop.time() < ending:
            await asyncio.sleep(self.random.expovariate(20))
            self.router.index.sweep(self.random.randint(1, 40))
            self.router.index.expire(loop.time())
            for known in self.router.fleet.workers.values():
                if known.feed is not None:
                    rank = self.random.randrange(len(known.feed.bits))
                    chain = prompt(self.random.randrange(PROMPTS))[: self.random.randint(1, LENGTH)]
                    known.feed.on_placed(rank, chain, now=loop.time(), is_computing=True)

    async def _wait_settled(self) -> None:
        for _ in range(int(SETTLED_WITHIN_S / 0.1)):
            if self._is_settled():
                return
            await asyncio.sleep(0.1)
        states = {name: (w.feed and (w.feed.trust, w.feed.reason)) for name, w in self.router.fleet.workers.items()}
        raise AssertionError(f"the index is not exact {SETTLED_WITHIN_S:g} s after the last fault: {states}")

    def _is_settled(self) -> bool:
        for worker in self.workers:
            known = self.router.fleet.workers.get(worker.name)
            if known is None or known.feed is None or known.feed.trust is not Trust.EXACT:
                return False
            if known.feed.resume_at != worker.feed.at:
                return False
        return True

    def check(self) -> None:
        """Checks that the index is the union of the caches, before and after the last sweep."""
        for _ in range(2):
            for tier, index in self.router.index.tiers.items():
                union: set[int] = set()
                for worker in self.workers:
                    for rank in range(worker.ranks):
                        held = worker.cached[rank, tier]
                        bit = self._bit(worker, rank)
                        assert blocks_of(index, bit) == held, (worker.name, rank, tier)
                        assert index.count(bit) == len(held), (worker.name, rank, tier)
                        union |= held
                assert len(index) >= len(union)
                self._check_lookups(tier)
            while self.router.index.sweep(50):
                pass
        for tier, index in self.router.index.tiers.items():
            flush_all(index)
            caches = [blocks for worker in self.workers for (_, of), blocks in worker.cached.items() if of == tier]
            assert len(index) == len(set().union(*caches)), tier

    def _check_lookups(self, tier: KvTier) -> None:
        caches = {
            self._bit(worker, rank): worker.cached[rank, tier]
            for worker in self.workers
            for rank in range(worker.ranks)
        }
        for asked in ALL_PROMPTS:
            found = {bit: m.depth for m in matches(self.router.index.tiers[tier], asked) for bit in bits(m.holders)}
            depths = {
                bit: next((i for i, block in enumerate(asked) if block not in held), LENGTH)
                for bit, held in caches.items()
            }
            assert found == {bit: depth for bit, depth in depths.items() if depth}, (tier, asked)

    def _bit(self, worker: CachingWorker, rank: int) -> int:
        feed = self.router.fleet.workers[worker.name].feed
        assert feed is not None
        return feed.bits[rank]


def run(seed: int) -> None:
    """Plays one run. Raises AssertionError with the command that replays it."""
    logging.disable(logging.WARNING)
    try:
        simulation = IndexSimulation(seed)
        run_virtual(simulation.run())
    except (AssertionError, MeshError, ExceptionGroup) as error:
        raise AssertionError(f"{error!r}\nreplay: python -m tests.simulation.index --seed {seed}") from error
    finally:
        logging.disable(logging.NOTSET)


def run_many(first: int, count: int) -> None:
    """Plays one run per seed. The first failure ends it."""
    for seed in range(first, first + count):
        run(seed)


def main() -> int:
    """Returns 0 if the index was right in all runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.index", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    given = parser.parse_args()
    started_s = time.process_time()
    run_many(given.seed, given.seeds)
    print(
        f"{given.seeds} runs from seed {given.seed} on, all exact, in {time.process_time() - started_s:.1f} s of CPU time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
