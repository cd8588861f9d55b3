"""A process that takes part in an election, as the planner does."""

import asyncio

from kvmesh.discovery.leader import LeaderElection
from services.simulation.world import World

KEY = "kvmesh/simulation/leader"


class SimulatedCandidate:
    """One process."""

    def __init__(self, world: World, member_id: str) -> None:
        self.member_id = member_id
        self.registry = world.agent.registry()
        self._world = world
        self._election = LeaderElection(self.registry, KEY, member_id=member_id, clock=world.clock_of(member_id))
        self._task: asyncio.Task[None] | None = None
        self._resigning = asyncio.Lock()

    @property
    def fencing_token(self) -> int:
        """0 while it does not lead."""
        return self._election.fencing_token

    async def start(self) -> None:
        """Takes part from now on."""
        self._task = asyncio.create_task(self._election.run(), name=f"election-{self.member_id}")

    async def resign(self) -> None:
        """Gives the lead up, as a planner that is restarted does, and takes part again."""
        self._world.trace.note("resign", self.member_id)
        async with self._resigning:
            await self._stop()
            await self.start()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._election.aclose()

    async def aclose(self) -> None:
        """Leaves the election."""
        await self._stop()
        await self.registry.aclose()
