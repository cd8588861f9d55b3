"""A worker process of the simulation, composed as `kvmesh/worker/host.py` composes a real one."""

import asyncio
from contextlib import suppress
from typing import Any

from kvmesh.api.decode.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.api.prefill.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from kvmesh.api.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from kvmesh.core import Role
from kvmesh.engines.base import EngineRequest
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import Step
from kvmesh.errors import MeshError
from kvmesh.rpc.health import GrpcHealth
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.prefill_client import GrpcPrefillClient
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.simulation.faulty_engine import Die, FaultyEngine
from kvmesh.simulation.kv_transport import MemoryTransport
from kvmesh.simulation.rendezvous import MemoryWire
from kvmesh.telemetry import Telemetry
from kvmesh.worker.admission import admissions
from kvmesh.worker.kv_checks import KvChecks
from kvmesh.worker.leg_servicer import LegServicer
from kvmesh.worker.membership import WorkerMembership
from kvmesh.worker.metrics import WorkerMetrics
from kvmesh.worker.own_handoff import OwnHandoff
from kvmesh.worker.servicer import WorkerServicer
from kvmesh.worker.settings import WorkerSettings
from kvmesh.worker.worker import Worker, WorkerIdentity
from services.simulation.frontend import byte_tokenizer
from services.simulation.tools import ByteWriter
from services.simulation.world import World

PORT = 9000


class _TracedEngine(FaultyEngine):
    """Tells the trace which legs it accepted."""

    def __init__(
        self,
        *,
        world: World,
        worker_id: str,
        settings: SimulatedSettings,
        transport: MemoryTransport,
        wire: MemoryWire,
    ) -> None:
        generator = world.random(f"engine/{worker_id}")
        super().__init__(
            settings, world.clock_of(worker_id.partition("/")[0]), transport, wire=wire, generator=generator
        )
        # Forced tool calls need a tokenizer, and a simulated engine without a model's directory has none.
        self.scheduler._writer = ByteWriter(byte_tokenizer())
        self._trace = world.trace
        self._worker_id = worker_id
        self.accepted = 0
        self._leg_ids: dict[int, str] = {}
        self.handed_out: dict[str, tuple[str, float]] = {}
        """By handle id: the leg that made it, and when."""

    def submit_nowait(self, request: EngineRequest) -> None:
        super().submit_nowait(request)
        self.accepted += 1
        self._leg_ids[request.key] = request.leg_id
        self._trace.note("accepted", self._worker_id, request.leg_id)

    def _settle(self, step: Step | None = None) -> None:
        for finish in step.finishes if step is not None else ():
            if finish.handle is not None:
                self.handed_out[finish.handle.handle_id] = (self._leg_ids[finish.key], self._clock.now())
        super()._settle(step)


class SimulatedWorker:
    """One process: engine, worker, server, presence. It is used once; a worker that comes back is a new one."""

    def __init__(
        self, *, world: World, worker_id: str, epoch: int, engine: SimulatedSettings, worker: WorkerSettings
    ) -> None:
        self._world = world
        self.worker_id = worker_id
        self.role = Role(engine.role)
        self.address = f"{worker_id}:{PORT}"
        self.is_alive = False
        self.is_leaving = False
        """True from the signal that ends it."""
        self.accepted_at_drain: int | None = None
        clock = world.clock_of(worker_id)
        self._transport = MemoryTransport(world.kv_network)
        self._wire = MemoryWire(world.rendezvous_network, worker_id)
        self.engine = _TracedEngine(
            world=world, worker_id=f"{worker_id}/{epoch}", settings=engine, transport=self._transport, wire=self._wire
        )
        self.worker = Worker(
            self.engine, identity=WorkerIdentity(worker_id=worker_id, epoch=epoch), settings=worker, clock=clock
        )
        self.registry = world.agent.registry()
        self.membership = WorkerMembership(
            self.worker,
            self.registry,
            host=worker_id,
            uses_tls=False,
            clock=clock,
            make_presence=world.make_presence,
        )
        self._channels = world.network.pool(client=worker_id)
        self.checks = KvChecks(
            self.worker,
            self.registry,
            GrpcPrefillClient(self._channels),
            host=worker_id,
            clock=clock,
            random=world.random(f"checks/{worker_id}/{epoch}"),
        )
        self.own_handoff = OwnHandoff(
            self.worker,
            self.registry,
            GrpcWorkerClient(self._channels),
            host=worker_id,
            address=lambda: self.address,
            random=world.random(f"own-handoff/{worker_id}/{epoch}"),
        )
        self._checking: asyncio.Task[None] | None = None
        self._telemetry = Telemetry.create(engine.role)
        WorkerMetrics(self.worker, self._telemetry.registry)
        self._health = GrpcHealth(())
        self._server: Any = None

    async def start(self) -> None:
        """Starts what `serve_worker` starts: engine, server, then the registry."""
        await self.worker.start()
        # A MemoryServer has the methods that generated code calls, without being grpc.aio's class.
        server: Any = self._world.network.server(self.address, server_interceptors(self._telemetry))
        self._server = server
        rules = admissions(waiting_prompt_tokens_max=262_144, waiting_requests_max=1024)
        prefill: Any = LegServicer(self.worker, Role.PREFILL, rules[Role.PREFILL])
        decode: Any = LegServicer(self.worker, Role.DECODE, rules[Role.DECODE])
        add_PrefillServiceServicer_to_server(prefill, server)
        add_DecodeServiceServicer_to_server(decode, server)
        servicer = WorkerServicer(self.worker, membership=self.membership, clock=self._world.clock, checks=self.checks)
        add_WorkerServiceServicer_to_server(servicer, server)
        await self._health.add_to(server)
        await server.start()
        self.membership.set_ports(port=PORT, metrics_port=0)
        await self._health.set_serving(True)
        await self.membership.start()
        self._checking = asyncio.create_task(self.checks.run(), name="kv-checks")
        self.is_alive = True
        self._world.trace.note("started", self.worker_id, self.worker.identity.epoch)

    async def mark_draining(self) -> None:
        """Sets the drain mark; requests in flight continue."""
        self._world.trace.note("drain", self.worker_id)
        self.accepted_at_drain = self.engine.accepted
        await self.membership.set_draining(True)

    async def undo_draining(self) -> None:
        """Takes the drain mark off."""
        self._world.trace.note("undo-drain", self.worker_id)
        self._check_drained()
        self.accepted_at_drain = None
        await self.membership.set_draining(False)

    def _check_drained(self) -> None:
        if self.accepted_at_drain not in (None, self.engine.accepted):
            self._world.violations.append(f"{self.worker_id}: took a request after its drain mark")

    async def kill(self) -> None:
        """SIGKILL: from this turn of the loop on nothing leaves the process, and its memory cannot be read."""
        self._world.trace.note("kill", self.worker_id)
        self.is_alive = False
        self._world.network.kill(self.address)
        self.registry.set_reachable(False)
        await self._transport.aclose()
        await self._wire.aclose()
        self.engine.inject(Die(message="killed"))
        await self._close()

    async def leave(self, drain_s: float) -> None:
        """SIGTERM: drains as `serve_worker` does, then ends. Requests that run longer than `drain_s` are lost."""
        await self.mark_draining()
        await self.worker.drain(drain_s)
        await self.worker.wait_handles_gone()
        self._check_drained()
        await self.aclose()

    async def aclose(self) -> None:
        """Waits for the end of a process that is stopping."""
        if not self.is_alive:
            return
        self.is_alive = False
        await self._close()

    async def _close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        await self._channels.aclose()
        # A dead process cannot sign off: the registry says so, and what stands there is left to its checks.
        with suppress(MeshError):
            await self.membership.aclose()
        self.worker.stop_nowait()
        if self._server is not None:
            await self._server.stop(None)
        await self.worker.aclose()
        await self.registry.aclose()
