"""More load than the workers may hold: requests wait in the router's queue, and every one ends as if there were no queue."""

from services.simulation.router import SimulatedRouter
from tests.simulation.faults import FAULT_AT_S, mixed
from tests.simulation.runs import Report, run
from tests.simulation.scripted_mesh import ScriptedMesh

WAITING = 5
"""Asks in the queue of a router when it dies."""


def placed_after_waiting(router: SimulatedRouter) -> float:
    name, labels = "kvmesh_router_queue_wait_seconds_count", {"outcome": "placed"}
    return router._telemetry.registry.get_sample_value(name, labels) or 0.0


class Watched:
    """A fault script that remembers the mesh and how many waited at most."""

    def __init__(self, script=None) -> None:
        self._script = script
        self.waited_max = 0
        self.placed_after_waiting = 0.0

    async def __call__(self, mesh: ScriptedMesh) -> None:
        if self._script is not None:
            await self._script(mesh)
        routers = mesh.routers.values()
        while not mesh.ledgers or any(not ledger.outcome for ledger in mesh.ledgers.values()):
            self.waited_max = max(self.waited_max, sum(router.core.queue.requests for router in routers))
            await mesh.world.clock.sleep(0.05)
        self.placed_after_waiting = sum(placed_after_waiting(router) for router in routers)


async def kill_a_router(mesh: ScriptedMesh) -> None:
    """The router that the frontend uses dies while asks wait in its queue."""
    await mesh.world.clock.sleep(FAULT_AT_S)
    used = mesh.routers[mesh.frontend.router_link.router_ids[0]]
    while used.core.queue.requests < WAITING:
        assert any(not ledger.outcome for ledger in mesh.ledgers.values()), "the load is over"
        await mesh.world.clock.sleep(0.01)
    await mesh.kill(used.router_id)


def failed(report: Report) -> dict[str, int]:
    return {outcome: count for outcome, count in report.outcomes.items() if outcome not in ("answered", "cancelled")}


def test_a_crowd_waits_and_is_served() -> None:
    """Nobody is refused for busy workers; those who leave meanwhile leave nothing behind; the run repeats exactly."""
    watched = Watched()
    report = run(5, 400, mesh="crowded", load="dense", script=watched).check()
    assert not failed(report)
    assert watched.waited_max > 10
    assert watched.placed_after_waiting > 200
    assert run(5, 400, mesh="crowded", load="dense", script=Watched()).hash == report.hash


def test_a_router_dies_with_asks_in_its_queue() -> None:
    """They are asked again of the other one, and wait there."""
    watched = Watched(kill_a_router)
    report = run(6, 400, mesh="crowded-two-routers", load="dense", script=watched).check()
    assert not failed(report)
    assert watched.placed_after_waiting > 100


def test_workers_die_while_a_crowd_waits() -> None:
    """Whatever fails, every request ends once and the queue is empty in the end."""
    watched = Watched(mixed)
    report = run(8, 400, mesh="crowded", load="dense", script=watched).check()
    assert watched.placed_after_waiting > 50
    assert report.outcomes["answered"] > 200
