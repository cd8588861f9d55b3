"""A whole mesh in one event loop on virtual time: the seam on which fault simulation stands.

    mesh = SimulatedMesh(seed=7)
    await mesh.start()
    ledger = mesh.begin(request)      # or: await mesh.request(request)
    await mesh.kill("decode-0")
    await mesh.idle()
    assert mesh.problems() == []

Everything but the wires, the registry's HTTP and the model is the code that serves: pipeline, clients, router, workers,
simulated engines, health checks. The same seed gives the same run, message by message.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core import Role
from kvmesh.discovery.base import Health, Instance
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import MeshError
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.worker.settings import WorkerSettings
from services.frontend.access.caller import ANYBODY
from services.frontend.model_cards import Described, read_card
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings
from services.router.core_settings import SyncSettings
from services.router.settings import RouterSettings
from tests.simulation.frontend import EOS_TOKEN_ID, MODEL, VOCABULARY_SIZE, SimulatedFrontend
from tests.simulation.invariants import frontend_problems, router_problems, worker_problems
from tests.simulation.ledger import Ledger, Phase, check_ledger
from tests.simulation.load import Cancel, Planned
from tests.simulation.router import SimulatedRouter
from tests.simulation.worker import SimulatedWorker
from tests.simulation.world import Latencies, World

READY_S_MAX = 30.0
FORGOTTEN_S = 130.0
"""TTL, time after which the registry forgets who is critical, and some seconds for the sweep of the index."""


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
    engine: SimulatedSettings = field(default_factory=default_engine)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    latencies: Latencies = field(default_factory=Latencies)
    link: RouterLinkSettings = field(default_factory=RouterLinkSettings)


MESHES = {
    "small": MeshShape(),
    "tight": MeshShape(engine=default_engine(kv_blocks=130, running_requests_max=16, step_tokens_max=128, lease_s=2.0)),
    "two-routers": MeshShape(routers=2),
    "two-quick-routers": MeshShape(routers=2, router=RouterSettings(sync=SyncSettings(interval_s=0.01))),
    "four-routers": MeshShape(routers=4, link=RouterLinkSettings(move_pause_s=0.2, leave_s=0.5, shun_s=1.0)),
    "no-prefill": MeshShape(prefill=0),
    "crowded": MeshShape(router=RouterSettings(requests_per_decode_max=8, prompt_tokens_per_prefill_max=1024)),
    "crowded-two-routers": MeshShape(routers=2, router=RouterSettings(requests_per_decode_max=4)),
    "three-and-three": MeshShape(
        prefill=3, decode=3, routers=2, engine=default_engine(kv_blocks=4000, eos_after_tokens=400)
    ),
    "rendezvous": MeshShape(engine=default_engine(handoff="rendezvous")),
    "rendezvous-tight": MeshShape(
        engine=default_engine(
            handoff="rendezvous",
            kv_blocks=130,
            running_requests_max=16,
            step_tokens_max=128,
            reserved_output_tokens=16,
            eos_after_tokens=120,
        )
    ),
    "rendezvous-three-and-three": MeshShape(
        prefill=3,
        decode=3,
        routers=2,
        engine=default_engine(handoff="rendezvous", kv_blocks=4000, eos_after_tokens=400),
    ),
    "three-tokens": MeshShape(engine=default_engine(decode_tokens_per_step=3)),
}
"""What can be named on the command line, so that every run can be played again."""


def listed(worker: SimulatedWorker) -> Instance:
    """A worker's entry in the registry."""
    registration = worker.membership.registration()
    return Instance(
        service=registration.service,
        instance_id=registration.instance_id,
        host=registration.host,
        port=registration.port,
        meta=registration.meta,
        tags=registration.tags,
        health=Health.PASSING,
        is_draining=worker.worker.is_draining,
    )


class SimulatedMesh:
    """Made and used on a virtual loop."""

    def __init__(self, seed: int, shape: MeshShape | None = None) -> None:
        self.shape = shape or MeshShape()
        self.world = World(seed, self.shape.latencies)
        self.workers: dict[str, SimulatedWorker] = {}
        self.dead: list[SimulatedWorker] = []
        self.ledgers: dict[str, Ledger] = {}
        self._epochs = 0
        self._cancels: dict[str, Cancel] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        self.routers = {
            name: SimulatedRouter(self.world, name, self.shape.router)
            for name in (f"router-{number}" for number in range(self.shape.routers))
        }
        self._frontend_of: dict[str, SimulatedFrontend] = {}
        """By request."""
        self.frontends = {
            name: SimulatedFrontend(
                self.world,
                name,
                self.shape.pipeline,
                block_size_tokens=self.shape.engine.block_size_tokens,
                context_tokens_max=self.shape.engine.context_tokens_max,
                on_phase=self._on_phase,
                on_placed=self._on_placed,
                on_continued=self._on_continued,
                workers=self._described,
                link=self.shape.link,
            )
            for name in (f"frontend-{number}" for number in range(self.shape.frontends))
        }
        self.frontend = self.frontends["frontend-0"]

    def _described(self, model: str) -> Sequence[Described]:
        """The workers as the registry lists them."""
        return [(listed(worker), read_card(worker.membership.card())) for worker in self.workers.values()]

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.world.clock.now()

    async def start(self) -> None:
        """Starts everything and waits until requests can be placed on all workers."""
        await self.world.agent.start()
        for router in self.routers.values():
            await router.start()
        for role, count in ((Role.PREFILL, self.shape.prefill), (Role.DECODE, self.shape.decode)):
            for number in range(count):
                await self.start_worker(f"{role.value}-{number}", role)
        for frontend in self.frontends.values():
            await frontend.start()
        async with asyncio.timeout(READY_S_MAX):
            while not self._is_ready():
                await self.world.clock.sleep(0.05)
        self.world.trace.note("ready")

    def _is_ready(self) -> bool:
        count = len(self.workers)
        return all(frontend.router_link.router_ids for frontend in self.frontends.values()) and all(
            r.workers_ready() == count for r in self.routers.values()
        )

    async def start_worker(self, worker_id: str, role: Role) -> SimulatedWorker:
        """A new process; of an id that died, the next epoch."""
        self._epochs += 1
        settings = replace(self.shape.engine, role=role.value)
        worker = SimulatedWorker(self.world, worker_id, self._epochs, settings, self.shape.worker)
        self.workers[worker_id] = worker
        await worker.start()
        return worker

    async def restart_router(self, name: str) -> SimulatedRouter:
        """A new process under the id of one that died. It takes requests once it knows what the others know."""
        router = SimulatedRouter(self.world, name, self.shape.router, run=self.routers[name].run + 1)
        self.routers[name] = router
        await router.start()
        return router

    # Requests

    def begin(
        self, request: Request, cancel: Cancel | None = None, *, is_whole: bool = False, frontend: str = "frontend-0"
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
        self._requests[request.request_id] = asyncio.create_task(self._run(ledger))
        self._on_phase(request.request_id, Phase.WAITING)
        return ledger

    async def request(self, request: Request) -> Ledger:
        """Runs a request to its end."""
        ledger = self.begin(request)
        await asyncio.wait([self._requests[request.request_id]])
        return ledger

    async def play(self, load: Sequence[Planned]) -> None:
        """Begins each request at its time, counted from now, and waits for all."""
        began_s = self.now_s
        for planned in load:
            await self.world.clock.sleep(began_s + planned.at_s - self.now_s)
            self.begin(planned.request, planned.cancel, is_whole=planned.is_whole)
        await asyncio.wait([self._requests[planned.request.request_id] for planned in load])

    async def _run(self, ledger: Ledger) -> None:
        trace, request_id = self.world.trace, ledger.request.request_id
        pipeline = self._frontend_of[request_id].pipeline
        ledger.arrived_s = began_s = self.now_s
        trace.note("arrived", request_id)
        outcome = "defect"
        try:
            ledger.prepared = await pipeline.prepare(ledger.request, caller=ANYBODY, began_s=began_s)
            ledger.answer = await pipeline.run(ledger.prepared, ledger, began_s=began_s)
            outcome = "answered"
        except MeshError as error:
            ledger.error, outcome = error, error.reason
        except asyncio.CancelledError:
            outcome = "cancelled"
        finally:
            ledger.ended(self.now_s, outcome)
            trace.note("ended", request_id, outcome, *(choice.token_ids for choice in ledger.choices))

    def _on_phase(self, request_id: str, phase: Phase) -> None:
        ledger = self.ledgers[request_id]
        ledger.phase = phase
        cancel = self._cancels.get(request_id)
        if cancel is not None and cancel.phase is phase:
            del self._cancels[request_id]
            asyncio.get_running_loop().call_later(cancel.after_s, self._cancel, ledger)

    def _cancel(self, ledger: Ledger) -> None:
        if not ledger.outcome:
            ledger.cancelled_in = ledger.phase
            self.world.trace.note("cancel", ledger.request.request_id, ledger.phase.name)
            self._requests[ledger.request.request_id].cancel()

    def _on_placed(self, request_id: str, prefill_id: str, decode_id: str) -> None:
        self.ledgers[request_id].placements.append((prefill_id, decode_id))

    def _on_continued(self, request_id: str, emitted_tokens: int) -> None:
        self.ledgers[request_id].continued_after.append(emitted_tokens)

    # Faults

    async def kill(self, name: str) -> None:
        """SIGKILL to a worker or a router."""
        if name in self.routers:
            await self.routers[name].kill()
            return
        worker = self.workers.pop(name)
        self.dead.append(worker)
        await worker.kill()

    async def drain(self, worker_id: str) -> None:
        """Sets a worker's drain mark."""
        await self.workers[worker_id].mark_draining()

    def partition(self, name: str) -> None:
        """Silence between a worker or a router and everybody; the KV network and the registry are not touched."""
        self.world.trace.note("partition", name)
        self.world.network.partition(self._address(name))

    def heal(self, name: str) -> None:
        """Ends a partition."""
        self.world.trace.note("heal", name)
        self.world.network.heal(self._address(name))

    def cut(self, frontend: str, worker_id: str) -> None:
        """Silence between a frontend and a worker."""
        self.world.trace.note("cut", frontend, worker_id)
        self.world.network.partition(self._address(worker_id), client=frontend)

    def mend(self, frontend: str, worker_id: str) -> None:
        """Ends a cut."""
        self.world.trace.note("mend", frontend, worker_id)
        self.world.network.heal(self._address(worker_id), client=frontend)

    def _address(self, name: str) -> str:
        return self.routers[name].address if name in self.routers else self.workers[name].address

    # The end

    async def idle(self) -> None:
        """Waits until all requests are over and, after that, as long as a lease and what looks for its end may take.

        After a death, until the registry has forgotten it.
        """
        if self._requests:
            await asyncio.wait(list(self._requests.values()))
        settling_s = self.shape.engine.lease_s + 2 * self.shape.worker.lease_check_s + 1.0
        await self.world.clock.sleep(FORGOTTEN_S if self.dead else settling_s)
        self.world.trace.note("idle")

    def problems(self) -> list[str]:
        """What is not as it must be after `idle`; empty when all is well."""
        found = [
            f"{request_id}: {problem}"
            for request_id, ledger in self.ledgers.items()
            for problem in check_ledger(
                ledger,
                next(iter(self.workers.values())).engine.token_range,
                eos_after_tokens=self.shape.engine.eos_after_tokens,
                eos_token_id=EOS_TOKEN_ID,
            )
        ]
        for worker in self.workers.values():
            found += worker_problems(worker)
        for router in self.routers.values():
            if router.is_alive:
                found += router_problems(router, self.workers)
        for frontend in self.frontends.values():
            found += frontend_problems(frontend)
        return found

    async def aclose(self) -> None:
        """Stops everything, the last started first."""
        for task in self._requests.values():
            task.cancel()
        await asyncio.gather(*self._requests.values(), return_exceptions=True)
        for frontend in self.frontends.values():
            await frontend.aclose()
        for worker in self.workers.values():
            await worker.aclose()
        for router in self.routers.values():
            await router.aclose()
        await self.world.agent.aclose()
