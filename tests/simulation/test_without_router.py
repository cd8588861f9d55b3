"""A mesh that loses all its routers under load, on virtual time: the frontends place requests themselves until one returns."""

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.load import LOADS, plan_load
from tests.simulation.mesh import MESHES, MeshShape, SimulatedMesh
from tests.virtual_loop import run_virtual

KILLED_AT_S, AWAY_S = 3.0, 6.0
REQUESTS = 500
WAITED_S = 1.5
"""`without_router_after_s` and some time for the request itself."""


@pytest.mark.parametrize("shape", ["small", "rendezvous"])
def test_requests_are_placed_without_a_router(shape: str) -> None:
    """All requests are answered, none waits long, workers of both roles are used, and the router's return ends it."""

    async def play() -> None:
        mesh = SimulatedMesh(5, replace(MESHES[shape], frontends=2))
        await mesh.start()
        load = plan_load(mesh.world.random("load"), REQUESTS, replace(LOADS["calm"], cancelled_fraction=0.0))
        began_s = mesh.now_s
        absence = asyncio.create_task(_kill_routers(mesh))
        for number, planned in enumerate(load):
            await mesh.world.clock.sleep(began_s + planned.at_s - mesh.now_s)
            mesh.begin(planned.request, frontend=f"frontend-{number % 2}")
        await absence
        await mesh.idle()
        assert mesh.problems() == []
        assert {each.outcome for each in mesh.ledgers.values()} == {"answered"}
        alone = [
            each
            for each in mesh.ledgers.values()
            if began_s + KILLED_AT_S + 0.5 <= each.arrived_s < began_s + KILLED_AT_S + AWAY_S - WAITED_S
        ]
        assert max(each.ended_s - each.arrived_s for each in alone) < 2 * WAITED_S
        used = {worker_id for each in alone for worker_id in each.placements[-1]}
        assert used >= set(mesh.workers)
        placed = [frontend.metrics.local_placements._value.get() for frontend in mesh.frontends.values()]
        assert 0.9 * len(alone) <= sum(placed) < 1.6 * len(alone)
        assert all(frontend.local.in_flight(name) == 0 for frontend in mesh.frontends.values() for name in mesh.workers)
        await mesh.aclose()

    run_virtual(play())


async def _kill_routers(mesh: SimulatedMesh) -> None:
    await mesh.world.clock.sleep(KILLED_AT_S)
    for name in list(mesh.routers):
        await mesh.kill(name)
    await mesh.world.clock.sleep(AWAY_S)
    for name in list(mesh.routers):
        await mesh.restart_router(name)


def test_a_frontend_that_never_had_a_router_refuses() -> None:
    """Its settings are wrong, and an operator should see that."""

    async def play() -> None:
        mesh = SimulatedMesh(5, MeshShape(prefill=1, decode=1))
        await mesh.world.agent.start()
        for frontend in mesh.frontends.values():
            await frontend.start()
        (planned,) = plan_load(mesh.world.random("load"), 1, LOADS["calm"])
        ledger = await mesh.request(planned.request)
        assert ledger.outcome == "no_router"
        await mesh.aclose()

    run_virtual(play())
