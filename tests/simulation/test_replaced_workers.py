"""Frontends and routers keep no objects of workers that were removed."""

import asyncio
import gc
from collections import Counter

from kvmesh.core import Role, SamplingParams
from services.frontend.pipeline.request import Request
from services.router.settings import RouterSettings
from services.simulation.frontend import MODEL
from services.simulation.mesh import MeshShape
from tests.simulation.scripted_mesh import FORGOTTEN_S, ScriptedMesh
from tests.virtual_loop import run_virtual

REPLACED = 6
"""Number of workers of each role that are replaced, twice."""
REQUESTS = 8
"""Number of requests per worker. Their prompts share beginnings with those of the worker before."""
SIMULATION_TYPES = (
    "tests.", "kvmesh.discovery.", "kvmesh.simulation.rpc.", "kvmesh.telemetry.interceptors.", "kvmesh.engines.", "kvmesh.worker.",
    "kvmesh.core.kv.KvBatch", "kvmesh.core.kv.KvStored",
)  # fmt: skip
"""Types of the simulation, which knows all addresses of a run, and of worker processes with their KV events. `test_rpc_server` tests real
channels."""


def objects() -> Counter[str]:
    """Counts the live objects of the product's types. Cancelled timers do not count, because the loop removes them only when they are due."""
    gc.collect()
    alive = (each for each in gc.get_objects() if not (isinstance(each, asyncio.TimerHandle) and each.cancelled()))
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in alive)
    return Counter(
        name for name in names if name.startswith(("services.", "kvmesh.")) and not name.startswith(SIMULATION_TYPES)
    )


class ReplacementScenario:
    """A mesh whose workers are killed one after the other, each replaced by a worker with a new name and address."""

    def __init__(self) -> None:
        # The router's history may name removed workers; its size is bounded.
        self.mesh = ScriptedMesh(5, MeshShape(router=RouterSettings(history_max=0)))
        self._made = 0

    async def replace(self, count: int) -> None:
        for _ in range(count):
            for role in (Role.PREFILL, Role.DECODE):
                self._made += 1
                oldest = next(name for name, worker in self.mesh.workers.items() if worker.role is role)
                await self.mesh.start_worker(f"{role.value}-{self._made + 10}", role)
                await self.mesh.world.clock.sleep(0.5)
                await self._ask()
                await self.mesh.kill(oldest)
        await self.mesh.world.clock.sleep(FORGOTTEN_S)
        for known in (self.mesh.killed_at_s, self.mesh.ledgers, self.mesh._requests, self.mesh.world.trace.lines):
            known.clear()
        # The simulation keeps the clocks of all processes, including dead ones.
        clocks = self.mesh.world._clocks
        for name in [
            name for name in clocks if name.startswith(("prefill", "decode")) and name not in self.mesh.workers
        ]:
            del clocks[name]
        self.mesh.frontend.pipeline._router.asked.clear()  # type: ignore[attr-defined]

    async def _ask(self) -> None:
        for number in range(REQUESTS):
            request_id = f"r{self._made}x{number}"
            prompt = [(number + self._made // 4 + i) % 250 for i in range(60 + 10 * number)]
            sampling = SamplingParams(max_tokens=4)
            ledger = await self.mesh.request(
                Request(request_id=request_id, model=MODEL, prompt=prompt, sampling=sampling)
            )
            assert ledger.outcome == "answered"


def test_removed_workers_leave_no_objects_behind() -> None:
    """Frontend and router hold as many objects after 24 workers came and went as after half of them."""

    async def main() -> tuple[Counter[str], Counter[str]]:
        scenario = ReplacementScenario()
        await scenario.mesh.start()
        await scenario.replace(REPLACED)
        before = objects()
        await scenario.replace(REPLACED)
        after = objects()
        await scenario.mesh.aclose()
        return before, after

    before, after = run_virtual(main())
    grown = {name: count for name, count in (after - before).items() if count >= REPLACED // 2}
    assert not grown, grown
