"""Kills or suspends each process of a mesh in each phase of a request, and checks that all requests get right answers."""

import asyncio
from collections.abc import Sequence

import pytest

from kvmesh.core import SamplingParams
from kvmesh.errors import WORKER_LOST_TWICE
from kvmesh.simulation.faulty_engine import Die
from services.frontend.pipeline.request import Request
from services.router.core_settings import CoreSettings
from services.simulation.frontend import MODEL
from services.simulation.ledger import Ledger, RequestPhase
from services.simulation.mesh import MeshShape, default_engine
from services.simulation.schedule import RequestPlan
from services.simulation.shapes import make_request
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import VirtualLoop, run_virtual

PHASES = (RequestPhase.ASKING, RequestPhase.PREFILLING, RequestPhase.SUBMITTED, RequestPhase.DECODING)
TARGETS = ("router", "prefill", "decode")
KILL, STILL = "kill", "still"
FAULTS = ((KILL, 0.3), (STILL, 0.5), (STILL, 5.0), (STILL, 15.0))
"""The fault, and for how long the process is away: not long enough to miss a heartbeat, longer than heartbeats may be missed, and longer than
a placement may take and than the lease of the KV."""
ENDED_S_MAX = 60.0


def request(name: str, number: int, *, choices: int = 1, logprobs: int | None = None) -> Request:
    prompt = [(number * 31 + i * 7) % 250 for i in range(300)]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, logprobs=logprobs)
    return Request(request_id=name, model=MODEL, prompt=prompt, sampling=sampling, choices=choices)


def target_of(mesh: ScriptedMesh, target: str, ledger: Ledger) -> str:
    """Returns the router that the frontend uses, or the worker that has the request or would get it."""
    if target == "router":
        return mesh.frontend.router_link.router_ids[0]
    placed = ledger.placements[-1] if ledger.placements else ("prefill-0", "decode-0")
    return placed[0] if target == "prefill" else placed[1]


async def inject_fault(mesh: ScriptedMesh, name: str, fault: str, away_s: float) -> None:
    """Injects the fault, waits, and ends it."""
    if fault == STILL:
        mesh.partition(name)
        await mesh.world.clock.sleep(away_s)
        mesh.heal(name)
        return
    role = mesh.workers[name].role if name in mesh.workers else None
    await mesh.kill(name)
    await mesh.world.clock.sleep(away_s)
    await (mesh.restart_router(name) if role is None else mesh.start_worker(name, role))


async def inject_in_each_phase(mesh: ScriptedMesh, target: str, fault: str, away_s: float) -> list[str]:
    """Injects the fault in each phase of a streamed request and of one that is not streamed, with other requests in flight."""
    problems: list[str] = []
    for number, (phase, is_whole) in enumerate((phase, is_whole) for phase in PHASES for is_whole in (False, True)):
        watched = mesh.begin(request(f"w{number}", number), is_whole=is_whole)
        beside = [
            mesh.begin(request(f"b{number}x{i}", 100 + 10 * number + i, choices=1 + i % 2, logprobs=i), is_whole=i < 2)
            for i in range(3)
        ]
        while watched.phase < phase and not watched.outcome:
            await mesh.world.clock.sleep(0.0002)
        await inject_fault(mesh, target_of(mesh, target, watched), fault, away_s)
        asked = [watched, *beside]
        async with asyncio.timeout(ENDED_S_MAX):
            while not all(each.outcome for each in asked):
                await mesh.world.clock.sleep(0.05)
        for each in asked:
            if each.outcome != "answered":
                problems.append(f"{each.request.request_id} in {phase.name}: {each.outcome}")
        await mesh.world.clock.sleep(3.0)
    return problems


@pytest.mark.parametrize(("fault", "away_s"), FAULTS, ids=[f"{fault}-{away_s:g}s" for fault, away_s in FAULTS])
@pytest.mark.parametrize("target", TARGETS)
def test_every_process_fails_at_every_step(target: str, fault: str, away_s: float) -> None:
    """All answers are right, streamed or not. Afterwards no block, leg, lease or reservation is left."""

    async def main() -> list[str]:
        mesh = ScriptedMesh(11, MeshShape(routers=2, engine=default_engine(lease_s=5.0)))
        try:
            await mesh.start()
            problems = await inject_in_each_phase(mesh, target, fault, away_s)
            await mesh.idle()
            problems += mesh.problems()
        finally:
            await mesh.aclose()
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return problems + [f"task left: {name}" for name in left]

    assert not run_virtual(main())


@pytest.mark.parametrize("phase", PHASES, ids=[phase.name.lower() for phase in PHASES])
def test_a_killed_frontend_leaves_no_state(phase: RequestPhase) -> None:
    """When the frontend's connections break, workers stop its legs and free its KV, and routers end its reservations."""

    async def main() -> list[str]:
        mesh = ScriptedMesh(12, MeshShape(routers=2, engine=default_engine(lease_s=5.0)))
        try:
            await mesh.start()
            ledgers = [mesh.begin(request(f"r{i}", i, choices=1 + i % 2)) for i in range(8)]
            while all(each.phase < phase for each in ledgers):
                await mesh.world.clock.sleep(0.0002)
            mesh.frontend.is_alive = False
            await mesh.frontend._channels.aclose()
            for task in mesh._requests.values():
                task.cancel()
            await mesh.idle()
            await mesh.world.clock.sleep(2 * CoreSettings().reservation_grace_s)
            # The answers of the killed frontend's clients do not matter here, only the state that other processes keep.
            mesh.ledgers.clear()
            return mesh.problems()
        finally:
            await mesh.aclose()

    assert not run_virtual(main())


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("phase", [RequestPhase.SUBMITTED, RequestPhase.DECODING])
def test_a_request_that_kills_engines_kills_at_most_two(phase: RequestPhase, is_whole: bool) -> None:
    """The request is placed again after the first death and ends with the second one. The third worker serves all requests that were not on
    both dead workers."""

    async def main() -> tuple[Ledger, list[Ledger], int, list[str]]:
        mesh = ScriptedMesh(13, MeshShape(prefill=1, decode=3, routers=2, engine=default_engine(lease_s=5.0)))
        try:
            await mesh.start()
            beside = [mesh.begin(request(f"b{i}", i), is_whole=True) for i in range(6)]
            poison = mesh.begin(request("poison", 99), is_whole=is_whole)
            deaths = 0
            while not poison.outcome:
                if len(poison.placements) > deaths and poison.phase >= phase:
                    worker_id = poison.placements[deaths][1]
                    mesh.workers[worker_id].engine.inject(Die())
                    deaths += 1
                    await mesh.world.clock.sleep(0.05)
                    await mesh.kill(worker_id)  # The host ends a process whose engine died.
                await mesh.world.clock.sleep(0.0002)
            late = [mesh.begin(request(f"l{i}", 20 + i), is_whole=True) for i in range(6)]
            await mesh.idle()
            return poison, [*beside, *late], len(mesh.workers), mesh.problems()
        finally:
            await mesh.aclose()

    poison, others, left, problems = run_virtual(main())
    assert not problems
    assert (poison.outcome, len(poison.placements), left) == (WORKER_LOST_TWICE, 2, 2)
    for each in others:
        shared = {decode for _, decode in each.placements} >= {decode for _, decode in poison.placements}
        assert each.outcome == "answered" or (shared and each.outcome == WORKER_LOST_TWICE)


async def kill_after_tokens(mesh: ScriptedMesh, ledger: Ledger, tokens: Sequence[int]) -> None:
    """Kills the decode worker of each placement of a request, once its leg was submitted and the answer has that many tokens."""
    name = f" submit {ledger.request.request_id}-0"
    for number, count in enumerate(tokens, 1):
        while not ledger.outcome:
            await mesh.world.clock.sleep(0.0002)
            if sum(name in line for line in mesh.world.trace.lines) == number and ledger.tokens >= count:
                await mesh.kill(ledger.placements[-1][1])
                break


KILLS = {
    "poison at the first token": ((0, 0, 0), WORKER_LOST_TWICE, 2),
    "poison at a later token": ((8, 8, 8, 8), WORKER_LOST_TWICE, 3),
    "chance, between tokens": ((8, 16), "answered", 3),
    "chance, then before a token": ((8, 8), "answered", 3),
    "chance, then between tokens": ((0, 8), "answered", 3),
}


@pytest.mark.parametrize("case", KILLS)
def test_poisonous_requests_are_distinguished_from_random_kills(case: str) -> None:
    """Two worker deaths before the worker generated a token of the request end it. Deaths after a token do not count."""
    tokens, outcome, placements = KILLS[case]

    async def main() -> tuple[Ledger, list[str]]:
        mesh = ScriptedMesh(15, MeshShape(prefill=1, decode=5, routers=2, engine=default_engine(lease_s=5.0)))
        try:
            await mesh.start()
            ledger = mesh.begin(request("killed", 99))
            await kill_after_tokens(mesh, ledger, tokens)
            await mesh.idle()
            return ledger, mesh.problems()
        finally:
            await mesh.aclose()

    ledger, problems = run_virtual(main())
    assert not problems
    assert (ledger.outcome, len(ledger.placements)) == (outcome, placements)


@pytest.mark.parametrize("target", ["prefill", "decode"])
@pytest.mark.parametrize("away_s", [4.0, 9.0])
@pytest.mark.parametrize("is_process", [True, False], ids=["pause", "partition"])
def test_a_request_with_a_constraint_waits_for_a_silent_worker(target: str, away_s: float, is_process: bool) -> None:
    """The request is answered by the silent worker, and no other worker of the role gets it."""

    async def main() -> tuple[Ledger, list[str]]:
        mesh = ScriptedMesh(16, MeshShape(prefill=2, decode=3, routers=2, engine=default_engine(lease_s=5.0)))
        plan = RequestPlan(request_id="constrained", at_s=0.0, tail_tokens=300, max_tokens=60, has_tools=True)
        try:
            await mesh.start()
            ledger = mesh.begin(make_request(plan, 16))
            while ledger.phase < RequestPhase.PREFILLING:
                await mesh.world.clock.sleep(0.0002)
            name = target_of(mesh, target, ledger)
            if is_process:
                mesh.world.pause(name)
            else:
                mesh.partition(name)
            await mesh.world.clock.sleep(away_s)
            if is_process:
                mesh.world.resume(name)
            else:
                mesh.heal(name)
            await mesh.idle()
            return ledger, mesh.problems()
        finally:
            await mesh.aclose()

    ledger, problems = run_virtual(main())
    assert not problems
    assert ledger.outcome == "answered"
    assert len({placement[target == "decode"] for placement in ledger.placements}) == 1


@pytest.mark.parametrize("still_s", [3.0, 20.0])
@pytest.mark.parametrize("phase", PHASES, ids=[phase.name.lower() for phase in PHASES])
def test_a_suspended_machine_resumes(phase: RequestPhase, still_s: float) -> None:
    """All processes are suspended at once, also for longer than a lease. All requests are answered correctly, and none hangs."""

    async def main() -> list[str]:
        mesh = ScriptedMesh(14, MeshShape(routers=2, engine=default_engine(lease_s=5.0)))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        try:
            await mesh.start()
            ledgers = [mesh.begin(request(f"r{i}", i, choices=1 + i % 2), is_whole=i % 3 > 0) for i in range(9)]
            while all(each.phase < phase for each in ledgers):
                await mesh.world.clock.sleep(0.0002)
            loop.stand_still(still_s)
            async with asyncio.timeout(ENDED_S_MAX):
                while not all(each.outcome for each in ledgers):
                    await mesh.world.clock.sleep(0.05)
            await mesh.idle()
            await mesh.world.clock.sleep(2 * CoreSettings().reservation_grace_s)
            problems = [f"{each.request.request_id}: {each.outcome}" for each in ledgers if each.outcome != "answered"]
            return problems + mesh.problems()
        finally:
            await mesh.aclose()

    assert not run_virtual(main())
