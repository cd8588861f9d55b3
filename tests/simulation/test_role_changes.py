"""Workers that change their role under load, in a whole mesh on virtual time: no request fails, and the new pool uses them."""

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core import Role
from services.simulation.mesh import MeshShape
from tests.simulation.load import LOADS, plan_load, play_load
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

SHAPE = MeshShape(prefill=2, decode=2, routers=2)
REQUESTS = 600
PAUSE_S = 0.7
NOTICED_S = 1.0
"""Time from the end of SetRole until all routers use the worker in its new role."""


async def change_roles(mesh: ScriptedMesh, log: list[tuple[float, str, Role]]) -> None:
    """Moves a random worker to the other pool again and again, but never the last one of a pool."""
    generator = mesh.world.random("roles")
    while any(not each.outcome for each in mesh.ledgers.values()):
        pools = {role: [name for name in sorted(mesh.workers) if _role(mesh, name) is role] for role in Role}
        role = generator.choice([role for role in (Role.PREFILL, Role.DECODE) if len(pools[role]) > 1])
        name = generator.choice(pools[role])
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        assert await mesh.workers[name].membership.set_role(other) is other
        log.append((mesh.now_s, name, other))
        await mesh.world.clock.sleep(generator.uniform(0.1, PAUSE_S))


def _role(mesh: ScriptedMesh, name: str) -> Role:
    return mesh.workers[name].worker.description.role


@pytest.mark.parametrize("seed", [11])
def test_workers_change_roles_under_load(seed: int) -> None:
    """All requests are answered with the right tokens, no handle or block is left, and each worker serves in its new pool."""

    async def play() -> None:
        mesh = ScriptedMesh(seed, SHAPE)
        log: list[tuple[float, str, Role]] = []
        await mesh.start()
        load = plan_load(mesh.world.random("load"), REQUESTS, replace(LOADS["calm"], cancelled_fraction=0.0))
        playing = asyncio.create_task(play_load(mesh, load))
        await mesh.world.clock.sleep(1.0)
        await change_roles(mesh, log)
        await playing
        await mesh.idle()
        assert mesh.problems() == []
        assert {each.outcome for each in mesh.ledgers.values()} == {"answered"}
        assert len(log) >= 5
        assert _unused(mesh, log) == []
        await mesh.aclose()

    run_virtual(play())


def test_a_worker_that_dies_after_a_change_of_role_restarts() -> None:
    """Routers accept the new process in its first role, although its count of role changes is smaller than that of the dead process."""

    async def play() -> None:
        mesh = ScriptedMesh(5, SHAPE)
        await mesh.start()
        await mesh.workers["prefill-1"].membership.set_role(Role.DECODE)
        await mesh.world.clock.sleep(NOTICED_S)
        await mesh.kill("prefill-1")
        await mesh.start_worker("prefill-1", Role.PREFILL)
        await mesh.world.clock.sleep(NOTICED_S)
        for router in mesh.routers.values():
            assert router.core.fleet.workers["prefill-1"].role is Role.PREFILL
            assert not router.core.fleet.workers["prefill-1"].excluded_by
        await mesh.aclose()

    run_virtual(play())


def _unused(mesh: ScriptedMesh, log: list[tuple[float, str, Role]]) -> list[tuple[float, str, Role]]:
    """Returns the periods in a role, long enough to be noticed, in which the worker got no request."""
    found = []
    for number, (began_s, name, role) in enumerate(log):
        ended_s = next((at_s for at_s, other, _ in log[number + 1 :] if other == name), mesh.now_s)
        last_s = max(each.arrived_s for each in mesh.ledgers.values())
        placed = [
            name == each.placements[-1][0 if role is Role.PREFILL else 1]
            for each in mesh.ledgers.values()
            if began_s + NOTICED_S <= each.arrived_s < min(ended_s, last_s)
        ]
        if len(placed) > 50 and not any(placed):
            found.append((began_s, name, role))
    return found


def test_a_role_change_completes_without_its_caller() -> None:
    """A role change whose caller cancels still leaves the engine and the registry with the same role."""

    async def play() -> None:
        mesh = ScriptedMesh(7, SHAPE)
        await mesh.start()
        asking = asyncio.create_task(mesh.workers["prefill-1"].membership.set_role(Role.DECODE))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await mesh.world.clock.sleep(2 * NOTICED_S)
        assert _role(mesh, "prefill-1") is Role.DECODE
        for router in mesh.routers.values():
            assert router.core.fleet.workers["prefill-1"].role is Role.DECODE
            assert not router.core.fleet.workers["prefill-1"].excluded_by
        await mesh.aclose()

    run_virtual(play())
