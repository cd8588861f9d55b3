"""A mesh that loses all its routers under load, on virtual time: the frontends place requests themselves until a router returns."""

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core import Role
from services.simulation.mesh import MeshShape
from services.simulation.play import play as play_schedule
from services.simulation.schedule import RequestPlan, Schedule, TimedFault, Topology
from tests.simulation.load import LOADS, plan_load
from tests.simulation.meshes import MESHES
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

KILLED_AT_S, AWAY_S = 3.0, 6.0
REQUESTS = 500
WAITED_S = 1.5
"""`WITHOUT_ROUTER_AFTER_S`, and some time for the request itself."""


@pytest.mark.parametrize("shape", ["small", "rendezvous"])
def test_requests_are_placed_without_a_router(shape: str) -> None:
    """All requests are answered without long waits, on workers of both roles. Frontends stop placing when the router returns."""

    async def play() -> None:
        mesh = ScriptedMesh(5, replace(MESHES[shape], frontends=2))
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


async def _kill_routers(mesh: ScriptedMesh) -> None:
    await mesh.world.clock.sleep(KILLED_AT_S)
    for name in list(mesh.routers):
        await mesh.kill(name)
    await mesh.world.clock.sleep(AWAY_S)
    for name in list(mesh.routers):
        await mesh.restart_router(name)


def test_a_frontend_that_never_had_a_router_refuses() -> None:
    """A frontend without a router since its start is misconfigured, and its error shows that."""

    async def play() -> None:
        mesh = ScriptedMesh(5, MeshShape(prefill=1, decode=1))
        await mesh.world.agent.start()
        await mesh.start_worker("prefill-0", Role.PREFILL)
        await mesh.start_worker("decode-0", Role.DECODE)
        await mesh.frontend.start()
        while not mesh.frontend.takes_requests:
            await mesh.world.clock.sleep(0.1)
        (planned,) = plan_load(mesh.world.random("load"), 1, LOADS["calm"])
        ledger = await mesh.request(planned.request)
        assert ledger.outcome == "no_router"
        await mesh.aclose()

    run_virtual(play())


def test_a_frontend_that_starts_while_the_router_joins_places_requests() -> None:
    """The only router has left the registry and starts again, but waits for the blocks of an unreachable worker. A frontend that starts
    meanwhile does not wait for it."""

    async def play() -> None:
        mesh = ScriptedMesh(6, MESHES["small"])
        await mesh.start()
        await mesh.routers["router-0"].aclose()
        mesh.partition("prefill-0")
        joining = asyncio.create_task(mesh.restart_router("router-0"))
        await mesh.frontend.aclose()
        await mesh.restart_frontend("frontend-0")
        await mesh.world.clock.sleep(1.0)  # The frontend finds the workers.
        (planned,) = plan_load(mesh.world.random("load"), 1, replace(LOADS["calm"], cancelled_fraction=0.0))
        ledger = await mesh.request(planned.request)
        assert ledger.outcome == "answered"
        assert not joining.done()
        mesh.heal("prefill-0")
        await joining
        await mesh.aclose()

    run_virtual(play())


def test_a_router_that_joins_refuses_no_request() -> None:
    """A restarted router is reachable at its registered address before it knows the workers. The frontend places requests without it."""

    async def play() -> None:
        mesh = ScriptedMesh(6, MESHES["small"])
        await mesh.start()
        mesh.partition("prefill-0")  # The router waits for this worker's blocks.
        await mesh.kill("router-0")
        joining = asyncio.create_task(mesh.restart_router("router-0"))
        ledgers = []
        for planned in plan_load(mesh.world.random("load"), 40, replace(LOADS["calm"], cancelled_fraction=0.0)):
            await mesh.world.clock.sleep(0.05)
            ledgers.append(mesh.begin(planned.request))
        assert not joining.done()
        mesh.heal("prefill-0")
        await joining
        await mesh.idle()
        assert {each.outcome for each in ledgers} == {"answered"}
        await mesh.aclose()

    run_virtual(play())


@pytest.mark.parametrize("name", ["alone", "with-routers"])
def test_a_router_that_starts_at_an_empty_registry_waits_for_workers(name: str) -> None:
    """The registry has lost its state and lists no worker yet. The router would refuse requests that the frontend can place."""
    plans = tuple(
        RequestPlan(request_id=f"r{i}", at_s=0.05 * i, family=i, tail_tokens=60, tail_seed=i, max_tokens=8)
        for i in range(60)
    )
    routers = 1 if name == "alone" else 2
    faults = (
        *(TimedFault(at_s=0.4, kind="kill", target=f"router-{i}", duration_s=1.0) for i in range(routers)),
        TimedFault(at_s=0.5, kind="registry-empty", target="registry", duration_s=0.8),
    )
    topology = Topology(prefill=1, decode=2, routers=routers, frontends=1)
    outcome = play_schedule(Schedule(seed=4, topology=topology, requests=plans, faults=faults))
    assert not outcome.problems, outcome.problems
    assert outcome.outcomes == {"answered": 60}
