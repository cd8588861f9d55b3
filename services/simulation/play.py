"""Plays a schedule and checks everything."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from kvmesh.errors import WORKER_LOST_TWICE
from kvmesh.simulation.virtual_loop import DeadlockError, run_virtual
from services.frontend.pipeline.placements import SILENT_WORKER_RETURNS_S
from services.simulation.inject import Injector
from services.simulation.ledger import Ledger, PlannedCancel
from services.simulation.mesh import SimulatedMesh
from services.simulation.schedule import RequestPlan, Schedule
from services.simulation.settling import LAST, PROBE, settle
from services.simulation.shapes import make_cancel, make_request, shape_of
from services.simulation.watching import Watcher

ENDED_S_MAX = 90.0
"""In this time after the last fault every request has ended."""
FREE_OUTCOMES = frozenset({"answered", "cancelled", "frontend_lost"})
EARLY_S = 0.001
"""Deadlines are sent as whole milliseconds."""
START_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went. `problems` is empty if nothing is wrong. `cpu_s` is what it cost here; all else is equal for equal schedules."""

    seed: int
    problems: tuple[str, ...]
    requests: int = 0
    faults: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    continued: int = 0
    tokens: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    hash: str = ""
    lines: tuple[str, ...] = ()


def play(schedule: Schedule) -> Outcome:
    """Runs the schedule on a loop of its own."""
    began_s = time.process_time()
    run = _Run(schedule)
    try:
        run_virtual(run.play())
    except (DeadlockError, TimeoutError) as error:
        run.problems.append(f"the run did not end: {type(error).__name__} {error}")
    except Exception as error:  # noqa: BLE001  # Whatever fails in a process of the mesh is what the run is for.
        run.problems.append(f"the run failed: {error!r}")
    return run.outcome(cpu_s=time.process_time() - began_s)


def _has_too_little_time(ledger: Ledger) -> bool:
    """Returns whether the client's own timeout has passed, or the router's queue refused the request immediately because it could not be
    served in that time (docs/operate/admission.md).
    """
    timeout_s = ledger.request.timeout_s
    if timeout_s is None:
        return False
    return ledger.outcome == "deadline_too_near" or ledger.ended_s - ledger.arrived_s >= timeout_s - EARLY_S


def _was_hit_twice(ledger: Ledger, mesh: SimulatedMesh, injector: Injector) -> bool:
    """Returns whether faults broke two of the workers that the request was placed on.

    With a constraint one worker is enough, if it ended or was unreachable for so long that the constraint might be the cause:
    docs/use/access.md, "What a constraint may cost".
    """
    involved = mesh.involved(ledger.request.request_id)
    breaks = [each for each in injector.breaks if each.name in involved]
    if ledger.request.sampling.constraint is None:
        return len(breaks) > 1
    return len(breaks) > 1 or any(
        each.is_end or each.ended_s - each.began_s >= SILENT_WORKER_RETURNS_S for each in breaks
    )


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.problems: list[str] = []
        self._mesh: SimulatedMesh | None = None
        self._virtual_s = 0.0

    async def play(self) -> None:
        mesh = self._mesh = SimulatedMesh(self.schedule.seed, shape_of(self.schedule.topology))
        injector, watcher = Injector(mesh), Watcher(mesh)
        try:
            async with asyncio.timeout(START_S_MAX):
                await mesh.start()
            watching = asyncio.create_task(watcher.run(), name="watcher")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(injector.run(self.schedule.faults))
                for plan in self.schedule.requests:
                    tasks.create_task(self._begin(mesh, plan))
            if await self._wait_ended(mesh):
                self.problems += await settle(mesh, injector)
            watching.cancel()
            self.problems += mesh.world.violations + watcher.problems + self._failed(mesh, injector)
            self._virtual_s = mesh.now_s
        finally:
            await mesh.aclose()
        left = [task.get_name() for task in asyncio.all_tasks() if task not in (asyncio.current_task(), watching)]
        if left:
            self.problems.append(f"tasks left: {sorted(left)}")

    async def _begin(self, mesh: SimulatedMesh, plan: RequestPlan) -> None:
        await mesh.world.clock.sleep(plan.at_s)
        frontends = [mesh.frontends[f"frontend-{i}"] for i in range(self.schedule.topology.frontends)]
        # Like a load balancer, which skips an unreachable frontend.
        order = frontends[plan.frontend :] + frontends[: plan.frontend]
        frontend = next((each for each in order if each.takes_requests), None)
        if frontend is None:
            mesh.world.trace.note("no_frontend", plan.request_id)
            if self.schedule.is_survivable:
                self.problems.append(f"{plan.request_id}: no frontend takes requests")
            return
        cancel: PlannedCancel | None = make_cancel(plan)
        request = make_request(plan, self.schedule.seed)
        mesh.begin(request, cancel, is_whole=plan.is_whole, frontend=frontend.frontend_id)

    async def _wait_ended(self, mesh: SimulatedMesh) -> bool:
        """Returns False, and a problem for each request, if some have not ended in time."""
        ends_s = mesh.now_s + ENDED_S_MAX
        while (left := [each for each in mesh.ledgers.values() if not each.outcome]) and mesh.now_s < ends_s:
            await mesh.world.clock.sleep(0.25)
        self.problems += [
            f"{each.request.request_id}: has not ended {ENDED_S_MAX:g} s after the last fault, in {each.phase.name}"
            for each in left
        ]
        return not left

    def _failed(self, mesh: SimulatedMesh, injector: Injector) -> list[str]:
        """Returns the requests that ended with an error although a worker of each pool was there all the time."""
        if not self.schedule.is_survivable:
            return []
        return [
            f"{each.request.request_id}: failed as {each.outcome}: {each.error}"
            for each in mesh.ledgers.values()
            if each.outcome
            and not each.request.request_id.startswith(PROBE)
            and not self._may_fail(each, mesh, injector)
        ]

    @staticmethod
    def _may_fail(ledger: Ledger, mesh: SimulatedMesh, injector: Injector) -> bool:
        if ledger.request.request_id.startswith(LAST):
            return ledger.outcome == "answered"
        if ledger.outcome in ("deadline_exceeded", "deadline_too_near"):
            return _has_too_little_time(ledger)
        if ledger.outcome == WORKER_LOST_TWICE:
            return _was_hit_twice(ledger, mesh, injector)
        return ledger.outcome in FREE_OUTCOMES

    def outcome(self, *, cpu_s: float) -> Outcome:
        mesh = self._mesh
        assert mesh is not None
        ledgers = [each for name, each in mesh.ledgers.items() if not name.startswith((PROBE, LAST))]
        trace = mesh.world.trace
        return Outcome(
            seed=self.schedule.seed,
            problems=tuple(dict.fromkeys(self.problems)),
            requests=len(ledgers),
            faults=len(self.schedule.faults),
            outcomes=dict(Counter(each.outcome or "never ended" for each in ledgers)),
            continued=sum(bool(each.continued_after) for each in ledgers),
            tokens=sum(each.tokens for each in ledgers),
            messages=trace.crossings,
            virtual_s=self._virtual_s,
            cpu_s=cpu_s,
            hash=trace.hash,
            lines=tuple(trace.lines),
        )
