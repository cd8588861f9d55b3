"""More load than the workers may hold: requests wait in the router's queue, and each ends as it would without a queue."""

from services.simulation.router import SimulatedRouter
from tests.simulation.faults import FAULT_AT_S, mixed
from tests.simulation.runs import Report, run
from tests.simulation.scripted_mesh import ScriptedMesh

WAITING = 5
"""Minimum number of asks in a router's queue when it is killed."""


def placed_after_waiting(router: SimulatedRouter) -> float:
    name, labels = "kvmesh_router_queue_wait_seconds_count", {"outcome": "placed"}
    return router._telemetry.registry.get_sample_value(name, labels) or 0.0


class QueueObserver:
    """A fault script that records the largest number of waiting requests, and how many were placed after waiting."""

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
    """Kills the router that the frontend uses while asks wait in its queue."""
    await mesh.world.clock.sleep(FAULT_AT_S)
    used = mesh.routers[mesh.frontend.router_link.router_ids[0]]
    while used.core.queue.requests < WAITING:
        assert any(not ledger.outcome for ledger in mesh.ledgers.values()), "the load ended before enough asks waited"
        await mesh.world.clock.sleep(0.01)
    await mesh.kill(used.router_id)


def failed(report: Report) -> dict[str, int]:
    return {outcome: count for outcome, count in report.outcomes.items() if outcome not in ("answered", "cancelled")}


def test_requests_wait_for_busy_workers_and_are_served() -> None:
    """No request is refused because workers are busy. Requests cancelled while they wait leave nothing behind. The run repeats exactly."""
    observer = QueueObserver()
    report = run(5, 400, mesh="crowded", load="dense", script=observer).check()
    assert not failed(report)
    assert observer.waited_max > 10
    assert observer.placed_after_waiting > 200
    assert run(5, 400, mesh="crowded", load="dense", script=QueueObserver()).hash == report.hash


def test_a_router_dies_with_asks_in_its_queue() -> None:
    """The frontend sends the asks to the other router, where they wait again."""
    observer = QueueObserver(kill_a_router)
    report = run(6, 400, mesh="crowded-two-routers", load="dense", script=observer).check()
    assert not failed(report)
    assert observer.placed_after_waiting > 100


def test_workers_die_while_requests_wait() -> None:
    """Under mixed faults every request ends exactly once, and the queue is empty in the end."""
    observer = QueueObserver(mixed)
    report = run(8, 400, mesh="crowded", load="dense", script=observer).check()
    assert observer.placed_after_waiting > 50
    assert report.outcomes["answered"] > 200
