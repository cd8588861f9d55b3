"""Wedged engines in a whole mesh on virtual time: the router detects them, excludes them, and uses them again once they step."""

import asyncio
from dataclasses import replace

import pytest

from kvmesh.simulation.faulty_engine import Stall
from services.router.health import wedge
from services.simulation.mesh import MeshShape
from tests.simulation.load import LOADS, plan_load, play_load
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

WAIT_S = 3.0
STALL_S = 6.0
SHAPE = MeshShape()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wedge, "WAIT_MIN_S", WAIT_S)
    monkeypatch.setattr(wedge, "WAIT_MAX_S", WAIT_S)


async def until(mesh: ScriptedMesh, worker_id: str, state: str, within_s: float) -> float:
    """Waits until the router excludes the worker for that reason. Returns the time."""
    worker = mesh.routers["router-0"].core.fleet.workers[worker_id]
    async with asyncio.timeout(within_s):
        while worker.excluded_by != state:
            await mesh.world.clock.sleep(0.01)
    return mesh.now_s


def placed(lines: list[str]) -> set[str]:
    """Returns the workers of the placements that frontends received."""
    return {worker_id for line in lines if line.split()[2] == "placed" for worker_id in line.split()[4:6]}


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
def test_a_stalled_engine_gets_no_requests_until_it_steps(worker_id: str) -> None:
    """The stalled worker still answers RPCs. While it is wedged no request is placed there. No request is lost, and the worker serves again
    afterwards."""

    async def scenario() -> None:
        mesh = ScriptedMesh(11, SHAPE)
        await mesh.start()
        load = plan_load(mesh.world.random("load"), 480, replace(LOADS["calm"], cancelled_fraction=0.0))
        playing = asyncio.create_task(play_load(mesh, load))
        engine = mesh.workers[worker_id].engine
        await mesh.world.clock.sleep(2.0)
        engine.inject(Stall(duration_s=STALL_S))
        stalled_s = mesh.now_s
        wedged_s = await until(mesh, worker_id, "wedged", within_s=WAIT_S + 2.0)
        assert wedged_s - stalled_s >= WAIT_S
        await mesh.world.clock.sleep(0.1)  # Earlier placements arrive.
        seen = len(mesh.world.trace.lines)
        back_s = await until(mesh, worker_id, "", within_s=STALL_S)
        assert STALL_S - 0.1 <= back_s - stalled_s <= STALL_S + 1.5
        # Counts placements instead of legs that the engine took: legs that wait at the worker begin when the stall ends.
        while_wedged, seen = placed(mesh.world.trace.lines[seen:]), len(mesh.world.trace.lines)
        assert while_wedged and worker_id not in while_wedged
        await playing
        assert worker_id in placed(mesh.world.trace.lines[seen:])
        assert {ledger.outcome for ledger in mesh.ledgers.values()} == {"answered"}
        await mesh.idle()
        assert mesh.problems() == []
        await mesh.aclose()

    run_virtual(scenario())


def test_a_busy_worker_is_not_excluded_as_wedged() -> None:
    """With long prompts, queues, transfers and evictions, no worker is excluded while its engine steps."""

    async def scenario() -> None:
        mesh = ScriptedMesh(5, replace(SHAPE, engine=replace(SHAPE.engine, kv_blocks=130, running_requests_max=16)))
        await mesh.start()
        core = mesh.routers["router-0"].core
        seen: set[str] = set()

        async def watch() -> None:
            while True:
                seen.update(worker.excluded_by for worker in core.fleet.workers.values())
                await mesh.world.clock.sleep(0.02)

        watching = asyncio.create_task(watch())
        await play_load(mesh, plan_load(mesh.world.random("load"), 400, LOADS["dense"]))
        await mesh.idle()
        watching.cancel()
        assert seen == {""}
        assert mesh.problems() == []
        await mesh.aclose()

    run_virtual(scenario())
