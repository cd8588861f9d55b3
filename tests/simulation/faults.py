"""Faults that occur during the load, by name: the scripts of `python -m tests.simulation --faults NAME`."""

from collections.abc import Awaitable, Callable
from random import Random

from kvmesh.simulation.faulty_engine import Die, LoseKv, Refuse, Stall
from services.simulation.ledger import RequestPhase
from tests.simulation.load import PLAYING
from tests.simulation.scripted_mesh import ScriptedMesh

Script = Callable[[ScriptedMesh], Awaitable[None]]
FAULT_AT_S = 3.0
HELD_AT_S = 1.0
MIXED_FAULTS = 12
ROUTER_FAULTS = 4
KILL_PAUSE_S = 2.0
MIXED_PAUSE_S = (0.1, 0.6)


async def no_faults(mesh: ScriptedMesh) -> None:
    """Injects no fault."""


def _check_load_goes_on(mesh: ScriptedMesh) -> None:
    """Fails once the load has ended, because the state that the script waits for cannot occur any more."""
    assert mesh in PLAYING, "the load ended before the mesh reached the state that the script waits for"


async def _until_busy(mesh: ScriptedMesh, worker_id: str, legs: int) -> None:
    """Waits until some seconds of load have passed and the worker has at least `legs` legs."""
    await mesh.world.clock.sleep(FAULT_AT_S)
    while mesh.workers[worker_id].worker.statistics().legs < legs:
        _check_load_goes_on(mesh)
        await mesh.world.clock.sleep(0.001)


async def kill_decode(mesh: ScriptedMesh) -> None:
    """Kills a decode worker in the middle of several streams, while another request waits for its first token from it."""
    await mesh.world.clock.sleep(FAULT_AT_S)
    while True:
        phases = [
            each.phase for each in mesh.ledgers.values() if each.placements and each.placements[-1][1] == "decode-0"
        ]
        if phases.count(RequestPhase.DECODING) >= 3 and RequestPhase.SUBMITTED in phases:
            break
        _check_load_goes_on(mesh)
        await mesh.world.clock.sleep(0.001)
    await mesh.kill("decode-0")


async def kill_decode_held(mesh: ScriptedMesh) -> None:
    """Kills a decode worker after a request received only one token from it that makes no text yet: the first byte of a character."""
    await mesh.world.clock.sleep(HELD_AT_S)
    seen = len(mesh.world.trace.lines)
    while True:
        lines, seen = mesh.world.trace.lines[seen:], len(mesh.world.trace.lines)
        firsts = [mesh.ledgers[line.split()[-2]] for line in lines if line.endswith(" first_token")]
        if any(each.phase is RequestPhase.SUBMITTED and each.placements[-1][1] == "decode-0" for each in firsts):
            break
        _check_load_goes_on(mesh)
        await mesh.world.clock.sleep(0.001)
    await mesh.kill("decode-0")


async def kill_prefill(mesh: ScriptedMesh) -> None:
    """Kills a prefill worker while it computes."""
    await _until_busy(mesh, "prefill-0", 1)
    await mesh.kill("prefill-0")


async def drain(mesh: ScriptedMesh) -> None:
    """Drains a decode worker that has streams, and a prefill worker a second later."""
    await _until_busy(mesh, "decode-0", 6)
    await mesh.drain("decode-0")
    await mesh.world.clock.sleep(1.0)
    await mesh.drain("prefill-1")


async def partition(mesh: ScriptedMesh) -> None:
    """Partitions a decode worker for longer than a frontend waits for its heartbeats, then heals the partition."""
    await _until_busy(mesh, "decode-0", 6)
    await _partition_for(mesh, "decode-0", 20.0)


async def mixed(mesh: ScriptedMesh) -> None:
    """Injects one fault after the other on workers drawn from the seed. Killed workers restart, and other faults end."""
    generator = mesh.world.random("faults")
    kinds = list(_KINDS)
    for _ in range(MIXED_FAULTS):
        await mesh.world.clock.sleep(generator.uniform(*MIXED_PAUSE_S))
        kind, worker_id = generator.choice(kinds), generator.choice(sorted(mesh.workers))
        mesh.world.trace.note("fault", kind, worker_id)
        await _KINDS[kind](mesh, worker_id, generator)


async def kills(mesh: ScriptedMesh) -> None:
    """Kills a worker every two seconds while requests run, never the last of its role. It restarts within one second."""
    generator = mesh.world.random("faults")
    down_s = 0.0
    while True:
        await mesh.world.clock.sleep(KILL_PAUSE_S - down_s)
        if mesh not in PLAYING:
            return
        worker_id = generator.choice(sorted(mesh.workers))
        role = mesh.workers[worker_id].role
        assert sum(each.role is role for each in mesh.workers.values()) > 1
        await mesh.kill(worker_id)
        down_s = generator.uniform(0.3, 1.0)
        await mesh.world.clock.sleep(down_s)
        await mesh.start_worker(worker_id, role)


async def routers(mesh: ScriptedMesh) -> None:
    """Kills and restarts routers, one at a time, or partitions them. Now and then a worker dies meanwhile."""
    generator = mesh.world.random("faults")
    for _ in range(ROUTER_FAULTS):
        await mesh.world.clock.sleep(generator.uniform(0.2, 1.5))
        name = generator.choice(sorted(mesh.routers))
        kind = generator.choice(("die", "die", "part", "worker"))
        mesh.world.trace.note("fault", kind, name)
        if kind == "part":
            await _partition_for(mesh, name, generator.uniform(0.1, 6.0))
        elif kind == "worker":
            await _die(mesh, generator.choice(sorted(mesh.workers)), generator)
        else:
            await mesh.kill(name)
            await mesh.world.clock.sleep(generator.uniform(0.0, 3.0))
            await mesh.restart_router(name)


async def _die(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    role = mesh.workers[worker_id].role
    await mesh.kill(worker_id)
    await mesh.world.clock.sleep(generator.uniform(0.05, 1.0))
    await mesh.start_worker(worker_id, role)


async def _lose_engine(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    """The engine dies while its process lives on for a moment, until the host ends it."""
    mesh.workers[worker_id].engine.inject(Die())
    await mesh.world.clock.sleep(0.2)
    await _die(mesh, worker_id, generator)


async def _stall(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    mesh.workers[worker_id].engine.inject(Stall(duration_s=generator.uniform(0.1, 3.0)))


async def _refuse(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    engine = mesh.workers[worker_id].engine
    engine.inject(Refuse(fraction=0.5))
    await mesh.world.clock.sleep(0.5)
    engine.inject(Refuse(fraction=0.0))


async def _lose_kv(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    mesh.workers[worker_id].engine.inject(LoseKv(handles=3))


async def _fail_pulls(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    mesh.world.kv_network.fails_pulls = True
    await mesh.world.clock.sleep(0.3)
    mesh.world.kv_network.fails_pulls = False


async def _hang_pulls(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    mesh.world.kv_network.hangs_pulls = True
    await mesh.world.clock.sleep(0.1)
    mesh.world.kv_network.hangs_pulls = False


async def _part(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    await _partition_for(mesh, worker_id, generator.uniform(0.1, 12.0))


async def _part_router(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    await _partition_for(mesh, generator.choice(sorted(mesh.routers)), generator.uniform(0.1, 3.0))


async def _partition_for(mesh: ScriptedMesh, name: str, duration_s: float) -> None:
    mesh.partition(name)
    await mesh.world.clock.sleep(duration_s)
    mesh.heal(name)


async def _lose_registry(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    """A worker cannot reach the registry, sometimes for longer than its TTL."""
    registry = mesh.workers[worker_id].registry
    registry.set_reachable(False)
    await mesh.world.clock.sleep(generator.uniform(0.1, 12.0))
    registry.set_reachable(True)


async def _drain_and_undo(mesh: ScriptedMesh, worker_id: str, generator: Random) -> None:
    await mesh.drain(worker_id)
    await mesh.world.clock.sleep(0.5)
    await mesh.workers[worker_id].undo_draining()


_KINDS: dict[str, Callable[[ScriptedMesh, str, Random], Awaitable[None]]] = {
    "die": _die,
    "lose-engine": _lose_engine,
    "stall": _stall,
    "refuse": _refuse,
    "lose-kv": _lose_kv,
    "fail-pulls": _fail_pulls,
    "hang-pulls": _hang_pulls,
    "part": _part,
    "part-router": _part_router,
    "lose-registry": _lose_registry,
    "drain-and-undo": _drain_and_undo,
}

SCRIPTS: dict[str, Script] = {
    "none": no_faults,
    "kill-decode": kill_decode,
    "kill-decode-held": kill_decode_held,
    "kill-prefill": kill_prefill,
    "drain": drain,
    "partition": partition,
    "mixed": mixed,
    "routers": routers,
    "kills": kills,
}
