"""A worker of either role behind either transport, and a frontend that checks the Attach protocol."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from kvmesh.api.decode.v1.decode_pb2_grpc import DecodeServiceStub, add_DecodeServiceServicer_to_server
from kvmesh.api.prefill.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.api.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvmesh.clock import SystemClock
from kvmesh.core import Generation, Leg, LegTask, Role, SamplingParams, WorkerRef
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.legs import to_leg
from kvmesh.rpc.codec.scalars import to_positive_duration
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.faulty_engine import FaultyEngine
from kvmesh.simulation.kv_transport import MemoryKvNetwork, MemoryTransport
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.simulation.rpc import MemoryNetwork
from kvmesh.telemetry import Telemetry
from kvmesh.worker.admission import admissions
from kvmesh.worker.leg_servicer import LegServicer
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.servicer import WorkerServicer
from kvmesh.worker.settings import WorkerSettings
from kvmesh.worker.worker import Worker, WorkerIdentity
from tests.patience import PATIENCE_S

MODEL = "demo"
EPOCH = 7
SLOW = SimulatedSettings(profile=StepProfile(base_s=0.005), vocabulary_size=1000, lease_s=20.0)
WORKER = WorkerSettings(heartbeat_s=0.2, lease_check_s=0.02)

AddServices = Callable[[Any], None]


def generation(
    prompt: Sequence[int] = tuple(range(3, 40)), tokens: int = 8, logprobs: int | None = None, **more: Any
) -> Generation:
    """Returns a small greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    return Generation(**{"model": MODEL, "token_ids": list(prompt), "sampling": sampling, **more})


def make_leg(leg_id: str, task: LegTask = LegTask.GENERATE, **more: Any) -> Leg:
    """Returns a leg with the request of `generation`."""
    return Leg(leg_id=leg_id, task=task, generation=generation(**more))


def submission(slot: int, leg: Leg, timeout_s: float = 30.0) -> pb.Submission:
    """Returns a leg on a slot, as a frontend sends it."""
    return pb.Submission(slot=slot, leg=to_leg(leg), timeout=to_positive_duration(timeout_s))


async def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Polls until the condition holds, for conditions without an event."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"did not happen in {timeout_s} s: {what}") from None


@asynccontextmanager
async def serving(
    kind: str, add_services: AddServices, grace_s: float = 5.0
) -> AsyncIterator[tuple[str, ChannelPool, Any]]:
    """Serves services through grpc.aio on loopback, or in memory. Yields the address, channels to it, and a function that stops the server."""
    telemetry = Telemetry.create("decode")
    if kind == "memory":
        network = MemoryNetwork()
        memory = network.server("worker:1", server_interceptors(telemetry))
        add_services(memory)
        await memory.start()
        pool: Any = network.pool()
        try:
            yield "worker:1", pool, lambda: memory.stop(grace_s)
        finally:
            await pool.aclose()
            await memory.stop(0.1)
        return
    settings = RpcSettings(grace_s=grace_s)
    server = RpcServer(
        settings, service_names=(), add_services=add_services, interceptors=server_interceptors(telemetry)
    )
    await server.start()
    pool = ChannelPool(settings=settings)
    try:
        yield server.address, pool, server.aclose
    finally:
        await pool.aclose()
        await server.aclose()


@dataclass
class WorkerRig:
    """A running worker."""

    engine: FaultyEngine
    worker: Worker
    address: str = ""
    channels: Any = None
    stop_server: Any = None

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(worker_id="w1", address=self.address, epoch=EPOCH)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.channels.channel(self.address)  # type: ignore[no-any-return]

    async def wait_free(self) -> None:
        """Waits until the worker has no legs and holds no blocks, including leased ones."""
        await wait_until(
            lambda: self.worker.statistics().legs == 0 and self.engine.load().kv_blocks_used == 0, "all blocks are free"
        )


@contextmanager
def stopped(engine: FaultyEngine) -> Iterator[None]:
    """The engine begins no step within the block, however long the block takes."""
    step_once, goes_on = engine._step_once, asyncio.Event()

    async def wait() -> None:
        await goes_on.wait()

    engine._step_once = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._step_once = step_once  # type: ignore[method-assign]
        goes_on.set()


def make_worker(engine: SimulatedSettings, settings: WorkerSettings) -> WorkerRig:
    """Returns a worker with a simulated engine on the memory transport. It is not started."""
    clock = SystemClock()
    simulated = FaultyEngine(engine, clock, MemoryTransport(MemoryKvNetwork(clock=clock)))
    return WorkerRig(
        simulated,
        Worker(simulated, identity=WorkerIdentity(worker_id="w1", epoch=EPOCH), settings=settings, clock=clock),
    )


@asynccontextmanager
async def running_worker(
    kind: str,
    role: Role = Role.DECODE,
    *,
    engine: SimulatedSettings = SLOW,
    settings: WorkerSettings = WORKER,
    waiting_requests_max: int = 0,
    grace_s: float = 5.0,
) -> AsyncIterator[WorkerRig]:
    """Runs a worker behind DecodeService, PrefillService and WorkerService."""
    rig = make_worker(replace(engine, role=role.value), settings)
    clock = SystemClock()
    membership = WorkerMembership(rig.worker, MemoryAgent().registry(), host="w", uses_tls=False, clock=clock)
    await rig.worker.start()
    await membership.files.start()

    def add_services(server: Any) -> None:
        rules = admissions(waiting_prompt_tokens_max=0, waiting_requests_max=waiting_requests_max)
        decode: Any = LegServicer(rig.worker, Role.DECODE, rules[Role.DECODE])
        prefill: Any = LegServicer(rig.worker, Role.PREFILL, rules[Role.PREFILL])
        add_DecodeServiceServicer_to_server(decode, server)
        add_PrefillServiceServicer_to_server(prefill, server)
        add_WorkerServiceServicer_to_server(WorkerServicer(rig.worker, membership=membership, clock=clock), server)

    try:
        async with serving(kind, add_services, grace_s) as (rig.address, rig.channels, rig.stop_server):
            try:
                yield rig
            finally:
                rig.worker.stop_nowait()
    finally:
        await rig.worker.aclose()


@dataclass
class RawFrontend:
    """A frontend that sends and reads the messages of an Attach stream directly, and asserts that the worker follows the protocol."""

    call: Any
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, list[pb.Finish]] = field(default_factory=dict)
    frames: int = 0
    heartbeats: int = 0

    @classmethod
    async def attach(cls, channel: grpc.aio.Channel, name: str = "f1") -> "RawFrontend":
        """Opens a stream and exchanges Hello and Welcome."""
        frontend = cls(DecodeServiceStub(channel).Attach())
        await frontend.call.write(pb.AttachRequest(hello=pb.Hello(frontend_id=name)))
        response = await frontend.call.read()
        assert response.WhichOneof("kind") == "welcome"
        assert response.welcome.epoch == EPOCH and response.welcome.worker_id == "w1"
        return frontend

    async def submit(self, *slots: int, timeout_s: float = 30.0, **more: Any) -> None:
        """Submits the same generation on each slot, in one message."""
        await self.send(*(submission(slot, make_leg(f"r{slot}", **more), timeout_s) for slot in slots))

    async def send(self, *submissions: pb.Submission, cancels: Sequence[int] = ()) -> None:
        await self.call.write(pb.AttachRequest(submissions=submissions, cancels=cancels))

    async def read_one(self) -> bool:
        """Reads one message. Returns False at the end of the stream."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        assert response.WhichOneof("kind") == "frame"
        frame = response.frame
        self.frames += 1
        self.heartbeats += not frame.slots and not frame.finishes
        assert len(set(frame.slots)) == len(frame.slots), "a frame lists a slot at most once"
        start = 0
        for slot, count in zip(frame.slots, frame.counts or [1] * len(frame.slots), strict=True):
            assert slot not in self.finishes, "a slot gets no token after its finish"
            self.tokens.setdefault(slot, []).extend(frame.token_ids[start : start + count])
            start += count
        assert start == len(frame.token_ids)
        for finish in frame.finishes:
            self.finishes.setdefault(finish.slot, []).append(finish)
        return True

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert await self.read_one(), "the stream ended"

    async def read_finishes(self, *slots: int) -> dict[int, pb.Finish]:
        """Reads until each slot has a finish, and checks that none has two."""
        await self.read_until(lambda: set(slots) <= set(self.finishes))
        assert all(len(self.finishes[slot]) == 1 for slot in slots)
        return {slot: self.finishes[slot][0] for slot in slots}

    async def read_to_end(self) -> grpc.aio.AioRpcError | None:
        """Reads to the end of the stream. Returns its error, or None if it ended without one."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await self.read_one():
                    pass
        except grpc.aio.AioRpcError as error:
            return error
        return None
