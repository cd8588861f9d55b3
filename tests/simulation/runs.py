"""Plays runs from a seed, for `python -m tests.simulation` and the tests."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass

from services.simulation.ledger import Ledger
from tests.simulation.faults import SCRIPTS, Script
from tests.simulation.load import LOADS, plan_load, play_load
from tests.simulation.meshes import MESHES
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

ENDED_WELL = frozenset({"answered", "cancelled", "deadline_exceeded"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a run. `wall_s` and `cpu_s` are its costs on this machine; all other fields are equal for equal seeds."""

    seed: int
    requests: int
    faults: str
    mesh: str
    load: str
    hash: str
    virtual_s: float
    wall_s: float
    cpu_s: float
    iterations: int
    """Of the event loop: the work of the run, the same on every machine."""
    crossings: int
    tokens: int
    outcomes: Counter[str]
    cancelled_in: Counter[str]
    """Requests whose client cancelled, by their phase."""
    ledgers: dict[str, Ledger]
    killed_at_s: dict[str, float]
    lines: list[str]
    problems: list[str]

    @property
    def command(self) -> str:
        """The command that replays the run."""
        names = (("faults", self.faults, "none"), ("mesh", self.mesh, "small"), ("load", self.load, "calm"))
        options = "".join(f" --{option} {name}" for option, name, default in names if name != default)
        return f"python -m tests.simulation --seed {self.seed} --requests {self.requests}{options}"

    @property
    def failed(self) -> dict[str, int]:
        """Requests that were neither answered nor cancelled by their client nor out of time, by reason."""
        return {word: count for word, count in self.outcomes.items() if word not in ENDED_WELL}

    def check(self) -> "Report":
        """Raises AssertionError with the problems and the command that replays the run."""
        if self.problems:
            more = f"\n... {len(self.problems) - 10} more" if len(self.problems) > 10 else ""
            raise AssertionError("\n".join(self.problems[:10]) + more + f"\nreplay: {self.command}")
        return self


def run(
    seed: int,
    requests: int,
    *,
    faults: str = "none",
    mesh: str = "small",
    load: str = "calm",
    script: Script | None = None,
) -> Report:
    """Plays one run on a loop of its own. `script` replaces that of `faults`."""
    return run_virtual(_play(seed, requests, faults, mesh, load, script or SCRIPTS[faults]))


async def _play(seed: int, requests: int, faults: str, shape: str, load: str, script: Script) -> Report:
    began_s = (time.perf_counter(), time.process_time())
    mesh = ScriptedMesh(seed, MESHES[shape])
    try:
        await mesh.start()
        planned = plan_load(mesh.world.random("load"), requests, LOADS[load])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(play_load(mesh, planned))
            tasks.create_task(_awaited(script(mesh)))
        await mesh.idle()
        problems = mesh.problems()
        virtual_s = mesh.now_s
    finally:
        await mesh.aclose()
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if left:
        problems.append(f"tasks left: {sorted(left)}")
    ledgers, lines = mesh.ledgers, mesh.world.trace.lines
    return Report(
        seed=seed,
        requests=requests,
        faults=faults,
        mesh=shape,
        load=load,
        hash=mesh.world.trace.hash,
        virtual_s=virtual_s,
        wall_s=time.perf_counter() - began_s[0],
        cpu_s=time.process_time() - began_s[1],
        iterations=asyncio.get_running_loop()._selector._selects,  # type: ignore[attr-defined]
        crossings=mesh.world.trace.crossings,
        tokens=sum(ledger.tokens for ledger in ledgers.values()),
        outcomes=Counter(ledger.outcome for ledger in ledgers.values()),
        cancelled_in=Counter(words[-1] for words in map(str.split, lines) if words[2] == "cancel"),
        ledgers=ledgers,
        killed_at_s=mesh.killed_at_s,
        lines=lines,
        problems=problems,
    )


async def _awaited(work: Awaitable[None]) -> None:
    await work
