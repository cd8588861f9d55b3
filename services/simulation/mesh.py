"""A whole mesh in one event loop on virtual time, for the simulation of faults.

    mesh = SimulatedMesh(seed=7)
    await mesh.start()
    ledger = mesh.begin(request)
    await mesh.kill("decode-0")
    ...                               # Wait until `ledger.outcome` is set and what the request used is free.
    assert mesh.wrong_answers() + mesh.left() == []

All parts except the network, the registry's HTTP and the model are production code: pipeline, clients, router, workers, simulated
engines, health checks. The same seed gives the same run, message by message.
"""

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core import Role
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import MeshError
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.simulation.virtual_loop import process_context
from kvmesh.worker.kv_checks import LEG_ID_PREFIX
from kvmesh.worker.settings import WorkerSettings
from services.frontend.access.caller import ANYBODY
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings
from services.router.settings import RouterSettings
from services.simulation.candidate import SimulatedCandidate
from services.simulation.frontend import EOS_TOKEN_ID, MODEL, VOCABULARY_SIZE, SimulatedFrontend, request_of
from services.simulation.invariants import frontend_problems, router_problems, worker_problems
from services.simulation.ledger import Ledger, PlannedCancel, RequestPhase, check_ledger
from services.simulation.router import PORT as ROUTER_PORT
from services.simulation.router import SimulatedRouter
from services.simulation.worker import PORT as WORKER_PORT
from services.simulation.worker import SimulatedWorker
from services.simulation.world import Latencies, World

READY_S_MAX = 30.0


def default_engine(**changes: Any) -> SimulatedSettings:
    """Few enough blocks that caches are evicted and long queues form; answers end by themselves after 40 tokens."""
    settings = SimulatedSettings(
        model=MODEL,
        vocabulary_size=VOCABULARY_SIZE,
        eos_token_id=EOS_TOKEN_ID,
        eos_after_tokens=40,
        context_tokens_max=2048,
        block_size_tokens=16,
        kv_blocks=600,
        kv_bytes_per_block=64,
        step_tokens_max=1024,
        running_requests_max=64,
        lease_s=10.0,
        pull_timeout_s=5.0,
    )
    return replace(settings, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many of what, and their settings."""

    prefill: int = 2
    decode: int = 2
    routers: int = 1
    frontends: int = 1
    candidates: int = 0
    """Processes that elect a leader, as planners do."""
    kv_groups: int = 1
    """Workers exchange KV within their group only: worker i is in group i modulo this."""
    adapters: tuple[str, ...] = ()
    engine: SimulatedSettings = field(default_factory=default_engine)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    latencies: Latencies = field(default_factory=Latencies)
    link: RouterLinkSettings = field(default_factory=RouterLinkSettings)


class SimulatedMesh:
    """Made and used on a virtual loop."""

    def __init__(self, seed: int, shape: MeshShape | None = None) -> None:
        self.shape = shape or MeshShape()
        self.world = World(seed, self.shape.latencies)
        self.workers: dict[str, SimulatedWorker] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.registry_lost_s = float("-inf")
        """When the registry last lost its state."""
        self._epochs = 0
        self._cancels: dict[str, PlannedCancel] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        self.routers = {
            name: SimulatedRouter(self.world, name, self.shape.router)
            for name in (f"router-{number}" for number in range(self.shape.routers))
        }
        self.candidates = {
            name: SimulatedCandidate(self.world, name)
            for name in (f"planner-{number}" for number in range(self.shape.candidates))
        }
        self._frontend_of: dict[str, SimulatedFrontend] = {}
        """By request."""
        self.frontends = {
            name: self._make_frontend(name) for name in (f"frontend-{number}" for number in range(self.shape.frontends))
        }

    def _make_frontend(self, name: str, run: int = 1) -> SimulatedFrontend:
        return SimulatedFrontend(
            self.world,
            name,
            self.shape.pipeline,
            on_phase=self._on_phase,
            on_placed=self._on_placed,
            on_continued=self._on_continued,
            link=self.shape.link,
            run=run,
        )

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.world.clock.now()

    async def start(self) -> None:
        """Starts everything and waits until requests can be placed on all workers."""
        await self.world.agent.start()
        starting = [self._spawn(router.router_id, router.start()) for router in self.routers.values()]
        for role, count in ((Role.PREFILL, self.shape.prefill), (Role.DECODE, self.shape.decode)):
            for number in range(count):
                await self.start_worker(f"{role.value}-{number}", role)
        await asyncio.gather(*starting)
        for frontend in self.frontends.values():
            await self.world.run_in(frontend.frontend_id, frontend.start())
        for candidate in self.candidates.values():
            await self.world.run_in(candidate.member_id, candidate.start())
        async with asyncio.timeout(READY_S_MAX):
            while not self._is_ready():
                await self.world.clock.sleep(0.05)
        self.world.trace.note("ready")

    def _is_ready(self) -> bool:
        count = len(self.workers)
        is_served = all(len(frontend.models.workers(MODEL)) == count for frontend in self.frontends.values())
        has_router = all(frontend.router_link.router_ids for frontend in self.frontends.values())
        return is_served and has_router and all(r.workers_ready() == count for r in self.routers.values())

    async def start_worker(self, worker_id: str, role: Role) -> SimulatedWorker:
        """Starts a new process; of an id that died, with the next epoch."""
        self._epochs += 1
        group = int(worker_id.rpartition("-")[2]) % self.shape.kv_groups
        revision = f"group-{group}" if self.shape.kv_groups > 1 else self.shape.engine.revision
        settings = replace(self.shape.engine, role=role.value, adapters=self.shape.adapters, revision=revision)
        worker = SimulatedWorker(
            world=self.world, worker_id=worker_id, epoch=self._epochs, engine=settings, worker=self.shape.worker
        )
        self.workers[worker_id] = worker
        await self.world.run_in(worker_id, worker.start())
        return worker

    async def restart_router(self, name: str) -> SimulatedRouter:
        """Starts a new process under the id of one that died. It takes requests once it knows what the others know."""
        router = SimulatedRouter(self.world, name, self.shape.router, run=self.routers[name].run + 1)
        self.routers[name] = router
        await self.world.run_in(name, router.start())
        return router

    async def restart_frontend(self, name: str) -> SimulatedFrontend:
        """Starts a new process under the id of one that has ended. It counts its asks from one again."""
        frontend = self._make_frontend(name, self.frontends[name].run + 1)
        self.frontends[name] = frontend
        await self.world.run_in(name, frontend.start())
        return frontend

    @staticmethod
    def _spawn(process: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=process_context(process))

    # Requests

    def begin(
        self,
        request: Request,
        cancel: PlannedCancel | None = None,
        *,
        is_whole: bool = False,
        frontend: str = "frontend-0",
    ) -> Ledger:
        """Starts a request at a frontend and gives its account."""
        self._frontend_of[request.request_id] = self.frontends[frontend]
        ledger = Ledger(
            request=request,
            on_phase=lambda phase: self._on_phase(request.request_id, phase),
            is_whole=is_whole,
        )
        self.ledgers[request.request_id] = ledger
        if cancel is not None:
            self._cancels[request.request_id] = cancel
        running = self._requests[request.request_id] = self._spawn(frontend, self._run(ledger))
        running.add_done_callback(lambda ended: self._end_unbegun(ledger) if ended.cancelled() else None)
        self._on_phase(request.request_id, RequestPhase.WAITING)
        return ledger

    async def _run(self, ledger: Ledger) -> None:
        trace, request_id = self.world.trace, ledger.request.request_id
        pipeline = self._frontend_of[request_id].pipeline
        ledger.arrived_s = began_s = self.now_s
        trace.note("arrived", request_id)
        outcome = "defect"
        try:
            model = pipeline.models.find(ledger.request.model)
            ledger.prepared = await pipeline.prepare(ledger.request, model, caller=ANYBODY, began_s=began_s)
            ledger.answer = await pipeline.run(ledger.prepared, ledger, began_s=began_s)
            outcome = "answered"
        except MeshError as error:
            ledger.error, outcome = error, error.reason
        except asyncio.CancelledError:
            outcome = self._cancelled_by(request_id)
        finally:
            ledger.ended(self.now_s, outcome)
            trace.note("ended", request_id, outcome, *(choice.token_ids for choice in ledger.choices))

    def _end_unbegun(self, ledger: Ledger) -> None:
        """A task that is cancelled before its first step does not run at all, as a client's when its frontend dies at that moment."""
        ledger.ended(self.now_s, self._cancelled_by(ledger.request.request_id))

    def _cancelled_by(self, request_id: str) -> str:
        return "cancelled" if self._frontend_of[request_id].is_alive else "frontend_lost"

    def involved(self, leg_id: str) -> set[str]:
        """Returns the frontend of a leg's request, and all workers that it was placed on; of a check of a KV path, the worker that checks.

        Empty for other legs of the mesh itself.
        """
        if leg_id.startswith(LEG_ID_PREFIX):
            return {leg_id.removeprefix(LEG_ID_PREFIX).rsplit("-", 2)[0]}
        request_id = request_of(leg_id)
        if request_id not in self.ledgers:
            return set()
        placed = {name for placement in self.ledgers[request_id].placements for name in placement}
        return {self._frontend_of[request_id].frontend_id, *placed}

    def _on_phase(self, request_id: str, phase: RequestPhase) -> None:
        ledger = self.ledgers[request_id]
        ledger.phase = phase
        cancel = self._cancels.get(request_id)
        if cancel is not None and cancel.phase is phase:
            del self._cancels[request_id]
            asyncio.get_running_loop().call_later(cancel.after_s, self._cancel, ledger)

    def _cancel(self, ledger: Ledger) -> None:
        if not ledger.outcome:
            self.world.trace.note("cancel", ledger.request.request_id, ledger.phase.name)
            self._requests[ledger.request.request_id].cancel()

    def _on_placed(self, request_id: str, prefill_id: str, decode_id: str) -> None:
        self.ledgers[request_id].placements.append((prefill_id, decode_id))

    def _on_continued(self, request_id: str, emitted_tokens: int) -> None:
        self.ledgers[request_id].continued_after.append(emitted_tokens)

    # Faults

    async def kill(self, name: str) -> None:
        """SIGKILL to a worker, a router or a frontend, which may be paused."""
        # The cleanup below awaits tasks of the process, which do not run while it is paused.
        self.world.resume(name)
        if name in self.frontends:
            frontend = self.frontends[name]
            # Before the cancels: `_cancelled_by` then reports that the frontend was lost.
            frontend.is_alive = False
            self.world.network.kill_client(name)
            for request_id, task in self._requests.items():
                if self._frontend_of[request_id] is frontend:
                    task.cancel()
            await frontend.kill()
            return
        if name in self.routers:
            await self.routers[name].kill()
            return
        await self.workers.pop(name).kill()

    def address_of(self, name: str) -> str:
        """Of a router or a worker. It is the same for every process under the name."""
        return f"{name}:{ROUTER_PORT if name in self.routers else WORKER_PORT}"

    def wrong_answers(self) -> list[str]:
        """Returns what is wrong with what clients got."""
        return [
            f"{request_id}: {problem}"
            for request_id, ledger in self.ledgers.items()
            for problem in check_ledger(
                ledger,
                next(iter(self.workers.values())).engine.token_range,
                eos_after_tokens=self.shape.engine.eos_after_tokens,
                eos_token_id=EOS_TOKEN_ID,
            )
        ]

    def left(self, excused: Collection[str] = ()) -> list[str]:
        """Returns what is left of requests that are over. `excused`: handles that only the end of their lease can free."""
        found: list[str] = []
        for worker in self.workers.values():
            found += worker_problems(worker, excused)
        for router in self.routers.values():
            if router.is_alive:
                found += router_problems(router, self.workers)
        for frontend in self.frontends.values():
            if frontend.is_alive:
                found += frontend_problems(frontend)
        return found

    async def aclose(self) -> None:
        """Stops all parts in reverse order of their start."""
        for name in (*self.frontends, *self.workers, *self.routers, *self.candidates):
            self.world.resume(name)
        for task in self._requests.values():
            task.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
        for candidate in self.candidates.values():
            await candidate.aclose()
        for frontend in self.frontends.values():
            await frontend.aclose()
        for worker in self.workers.values():
            await worker.aclose()
        for router in self.routers.values():
            await router.aclose()
        await self.world.agent.aclose()
