"""What must hold at every moment of a run."""

from collections import Counter

from kvmesh.discovery.leader import TTL_S
from kvmesh.engines.simulated.blocks import BlockPool
from services.simulation.mesh import SimulatedMesh

INTERVAL_S = 0.5


def count_blocks(pool: BlockPool) -> Counter[str]:
    """Returns the number of blocks by state, counted from the pool's runs."""
    counted = Counter(free=pool._free.count)
    for run in pool._runs.values():
        state = "leased" if run.leases else "held" if run.references else "cached"
        counted[state] += len(run.blocks)
    return counted


class Watcher:
    """Looks every 0.5 s: blocks free + held + cached + leased = total, at most one leader, and growing fencing tokens."""

    def __init__(self, mesh: SimulatedMesh) -> None:
        self._mesh = mesh
        self._leads: dict[tuple[str, int], None] = {}
        """Member and token of each lead."""
        self.problems: list[str] = []

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._mesh.world.clock.sleep(INTERVAL_S)
            self._check_blocks()
            self._check_leaders()

    def _check_blocks(self) -> None:
        for worker in self._mesh.workers.values():
            pool = worker.engine.scheduler.pool
            counted, counts = count_blocks(pool), pool.counts()
            listed = {"free": counts.free, "cached": counts.cached, "held": counts.held, "leased": counts.leased}
            if counted.total() != pool.total or any(counted[state] != count for state, count in listed.items()):
                self.problems.append(f"{worker.worker_id}: {dict(counted)} blocks of {pool.total}, listed as {listed}")

    def _check_leaders(self) -> None:
        leads = [
            (name, candidate.fencing_token)
            for name, candidate in self._mesh.candidates.items()
            if candidate.fencing_token
        ]
        # A registry that loses its state may elect another leader before the old leader notices. Their fencing tokens differ.
        if len(leads) > 1 and self._mesh.now_s - self._mesh.registry_lost_s > TTL_S:
            self.problems.append(f"two leaders: {leads}")
        for lead in leads:
            if lead not in self._leads and any(lead[1] <= token for _, token in self._leads):
                self.problems.append(f"{lead[0]} leads with token {lead[1]} after {self._leads}")
            self._leads[lead] = None
