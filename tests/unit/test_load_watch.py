"""The records that a watch of a worker's load yields, and when."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.clock import SystemClock
from kvmesh.core import Leg, LegTask
from kvmesh.engines.ranked import RankedEngine
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import KvLostError
from kvmesh.kv.paths import KvPaths
from kvmesh.kv.transport import Piece
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.servicer import WorkerServicer
from kvmesh.worker.settings import WorkerSettings
from kvmesh.worker.worker import Worker, WorkerIdentity
from services.simulation.world import VirtualClock
from tests.patience import PATIENCE_S
from tests.virtual_loop import run_virtual
from tests.worker_rig import generation

PULL_S = 20.0
INTERVAL_S = 0.1


class _SlowPull(asyncio.Future[None]):
    """A pull from a stalled peer. It ends when the peer resumes, and a cancellation does not shorten it."""

    def __init__(self) -> None:
        super().__init__()
        asyncio.get_running_loop().call_later(PULL_S, self.set_exception, KvLostError("late", reason="kv_pull_timeout"))

    def cancel(self, msg: Any = None) -> bool:
        return True


class _SlowTransport(MemoryTransport):
    def pull_nowait(self, peer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> Any:
        return _SlowPull()


class _Outlet:
    """Collects the finishes of a link."""

    def __init__(self) -> None:
        self.finishes: list[Any] = []

    def on_step(self, step: int, share: Any, logprobs: Any) -> None:
        self.finishes += share.finishes

    def on_lost(self, error: Exception) -> None:
        pass


def test_blocks_that_become_free_without_a_step_are_reported() -> None:
    """No step follows a pull that outlives its request. The watcher gets the freed blocks within an interval.

    It does not wait for the next regular record, which is ten minutes away in this test.
    """

    async def main() -> None:
        clock = VirtualClock()
        network = MemoryKvNetwork(clock=clock)
        settings = WorkerSettings(load_interval_s=600.0)

        def worker_of(transport: MemoryTransport, role: str, name: str) -> Worker:
            engine = SimulatedEngine(SimulatedSettings(role=role, pull_timeout_s=1.0, lease_s=5.0), clock, transport)
            return Worker(engine, identity=WorkerIdentity(worker_id=name, epoch=1), settings=settings, clock=clock)

        prefill = worker_of(MemoryTransport(network), "prefill", "p")
        decode = worker_of(_SlowTransport(network), "decode", "d")
        for worker in (prefill, decode):
            await worker.start()
        await asyncio.sleep(5)
        request = generation(prompt=range(3, 103))

        async def run(worker: Worker, **more: Any) -> Any:
            outlet = _Outlet()
            link = worker.open_link(outlet)
            link.submit_nowait(0, Leg(leg_id="r", generation=request, **more), None)
            while not outlet.finishes:
                await asyncio.sleep(0.01)
            return outlet.finishes[0]

        handle = (await run(prefill, task=LegTask.PREFILL)).handle
        membership = WorkerMembership(decode, MemoryAgent().registry(), host="w", uses_tls=False, clock=clock)
        servicer = WorkerServicer(decode, membership=membership, clock=clock)
        loop, began_s, records = asyncio.get_running_loop(), clock.now(), []

        async def watch() -> None:
            watch_request = pb.WatchLoadRequest()
            watch_request.interval.FromMilliseconds(int(INTERVAL_S * 1000))
            async for message in servicer.WatchLoad(watch_request, None):  # type: ignore[arg-type]
                records.append((clock.now() - began_s, message.load))

        watching = loop.create_task(watch())
        finish = await run(decode, task=LegTask.GENERATE, handle=replace(handle, lease_s=5.0))
        assert finish.was_recomputed and clock.now() - began_s < PULL_S / 2
        assert decode.engine.load().kv_blocks_used > 0 and not decode.legs
        await asyncio.sleep(PULL_S + 10)
        at_s, last = records[-1]
        assert last.kv_blocks_used == 0 and at_s < PULL_S + 3 * INTERVAL_S
        watching.cancel()
        await asyncio.wait([watching])
        for worker in (prefill, decode):
            await worker.aclose()

    run_virtual(main())


async def test_a_record_for_each_data_parallel_rank() -> None:
    """A watcher first gets the record of every rank, then those of changed ranks."""
    clock, paths = SystemClock(), KvPaths(pull_timeout_s=1.0)
    engines = [SimulatedEngine(SimulatedSettings(), clock, paths=paths) for _ in range(2)]
    settings = WorkerSettings(load_interval_s=600.0)
    worker = Worker(
        RankedEngine(engines, paths), identity=WorkerIdentity(worker_id="d", epoch=1), settings=settings, clock=clock
    )
    await worker.start()
    membership = WorkerMembership(worker, MemoryAgent().registry(), host="w", uses_tls=False, clock=clock)
    servicer = WorkerServicer(worker, membership=membership, clock=clock)
    records = servicer.WatchLoad(pb.WatchLoadRequest(), None)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(PATIENCE_S):
            first = [(await anext(records)).load for _ in range(2)]
            assert [(load.data_parallel_rank, load.running_requests) for load in first] == [(0, 0), (1, 0)]
            long = replace(generation(prompt=range(3, 103), tokens=4000), data_parallel_rank=1)
            link = worker.open_link(_Outlet())
            link.submit_nowait(0, Leg(leg_id="r", task=LegTask.GENERATE, generation=long), None)
            while not (load := (await anext(records)).load).running_requests:
                assert load.data_parallel_rank == 1, "the load of rank 0 has not changed"
            assert load.data_parallel_rank == 1
    finally:
        await records.aclose()  # type: ignore[attr-defined]
        await worker.aclose()
