"""A simulated mesh that a test drives: it sends requests, cuts connections and waits for the end."""

import asyncio

from services.frontend.pipeline.request import Request
from services.simulation.frontend import SimulatedFrontend
from services.simulation.ledger import Ledger
from services.simulation.mesh import SimulatedMesh

FORGOTTEN_S = 130.0
"""The TTL, the time after which the registry removes critical instances, and some seconds for the sweep of the index."""


class ScriptedMesh(SimulatedMesh):
    """Use:

    mesh = ScriptedMesh(seed=7)
    await mesh.start()
    ledger = mesh.begin(request)      # or: await mesh.request(request)
    await mesh.kill("decode-0")
    await mesh.idle()
    assert mesh.problems() == []
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.killed_at_s: dict[str, float] = {}
        """The time at which each worker was last killed."""

    @property
    def frontend(self) -> SimulatedFrontend:
        return self.frontends["frontend-0"]

    async def request(self, request: Request) -> Ledger:
        """Runs a request to its end."""
        ledger = self.begin(request)
        await asyncio.wait([self._requests[request.request_id]])
        return ledger

    async def kill(self, name: str) -> None:
        if name in self.workers:
            self.killed_at_s[name] = self.now_s
        await super().kill(name)

    async def drain(self, worker_id: str) -> None:
        """Sets a worker's drain mark."""
        await self.workers[worker_id].mark_draining()

    def partition(self, name: str) -> None:
        """Cuts a worker or a router off from all other processes; the KV network and the registry stay reachable."""
        self.world.trace.note("partition", name)
        self.world.network.partition(self.address_of(name))

    def heal(self, name: str) -> None:
        """Ends a partition."""
        self.world.trace.note("heal", name)
        self.world.network.heal(self.address_of(name))

    def cut(self, frontend: str, worker_id: str) -> None:
        """Blocks all messages between a frontend and a worker, without closing connections."""
        self.world.trace.note("cut", frontend, worker_id)
        self.world.network.partition(self.address_of(worker_id), client=frontend)

    def reconnect(self, frontend: str, worker_id: str) -> None:
        """Ends a cut."""
        self.world.trace.note("mend", frontend, worker_id)
        self.world.network.heal(self.address_of(worker_id), client=frontend)

    async def idle(self) -> None:
        """Waits until all requests have ended, and then until all leases have expired and been checked.

        If a worker was killed, waits until the registry has removed it.
        """
        if self._requests:
            await asyncio.wait(list(self._requests.values()))
        settling_s = self.shape.engine.lease_s + 2 * self.shape.worker.lease_check_s + 1.0
        await self.world.clock.sleep(FORGOTTEN_S if self.killed_at_s else settling_s)
        self.world.trace.note("idle")

    def problems(self) -> list[str]:
        """Returns the violated invariants after `idle`. Empty if there are none."""
        return self.wrong_answers() + self.left()
