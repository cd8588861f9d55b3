"""Cuts between one frontend and workers, in a whole mesh on virtual time: the others do not notice, and it ends soon after the cut."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.simulation.ledger import Ledger
from services.simulation.mesh import MeshShape
from tests.simulation.load import LOADS, plan_load
from tests.simulation.scripted_mesh import ScriptedMesh
from tests.virtual_loop import run_virtual

SHAPE = MeshShape(frontends=2)
CUT_AT_S, CUT_S = 4.0, 10.0
NOTICED_S = 2.0
"""From the cut until the frontend knows of it."""
GIVEN_UP_S = 6.5
"""Ten heartbeats without one, and some time to notice: then answers that have begun continue elsewhere."""
HEALED_S = 5.0
"""From the end of the cut until everything is as before."""
REQUESTS = 900
USUAL_S = 1.0
"""No request of this load takes longer without a cut."""


class Story:
    """One run: two frontends with half of the load each, and a cut. Times are those of the cut."""

    def __init__(self, cut: Callable[[ScriptedMesh], None], mend: Callable[[ScriptedMesh], None]) -> None:
        self.mesh = ScriptedMesh(23, SHAPE)
        self.of: dict[str, list[Ledger]] = {name: [] for name in self.mesh.frontends}
        self._cut, self._mend = cut, mend

    async def play(self) -> None:
        mesh = self.mesh
        await mesh.start()
        load = plan_load(mesh.world.random("load"), REQUESTS, replace(LOADS["calm"], cancelled_fraction=0.0))
        began_s = self.began_s = mesh.now_s
        loop = asyncio.get_running_loop()
        loop.call_at(began_s + CUT_AT_S, self._cut, mesh)
        loop.call_at(began_s + CUT_AT_S + CUT_S, self._mend, mesh)
        for number, planned in enumerate(load):
            await mesh.world.clock.sleep(began_s + planned.at_s - mesh.now_s)
            name = f"frontend-{number % 2}"
            self.of[name].append(mesh.begin(planned.request, frontend=name))
        await mesh.idle()
        assert mesh.problems() == []
        await mesh.aclose()

    def arrived(self, frontend: str, after_s: float, before_s: float = 1e9) -> list[Ledger]:
        """Requests of a frontend by the time from the cut to their arrival."""
        times = ((each, each.arrived_s - self.began_s - CUT_AT_S) for each in self.of[frontend])
        return [each for each, at_s in times if after_s <= at_s < before_s]


def slowest_s(ledgers: list[Ledger]) -> float:
    return max(each.ended_s - each.arrived_s for each in ledgers)


def test_a_frontend_that_is_cut_from_all_decode_workers_harms_no_other() -> None:
    """All requests of the other frontend are answered in their usual time. The cut one refuses with the reason, and recovers."""

    def cut(mesh: ScriptedMesh) -> None:
        mesh.cut("frontend-0", "decode-0")
        mesh.cut("frontend-0", "decode-1")

    def mend(mesh: ScriptedMesh) -> None:
        mesh.mend("frontend-0", "decode-0")
        mesh.mend("frontend-0", "decode-1")

    async def main() -> None:
        story = Story(cut, mend)
        await story.play()
        assert {each.outcome for each in story.of["frontend-1"]} == {"answered"}
        assert slowest_s(story.of["frontend-1"]) < USUAL_S
        during = story.arrived("frontend-0", NOTICED_S, CUT_S - 1)
        refused = [each for each in during if each.outcome == "paths_open"]
        assert len(refused) > 0.9 * len(during) and slowest_s(refused) < USUAL_S
        assert {each.outcome for each in during} <= {"paths_open", "answered"}  # Probes wait until the cut ends.
        after = story.arrived("frontend-0", CUT_S + HEALED_S)
        assert after and {each.outcome for each in after} == {"answered"}
        assert slowest_s(after) < USUAL_S

    run_virtual(main())


def test_a_cut_from_one_worker_costs_two_seconds_once() -> None:
    """All requests are answered; those whose tokens were already streamed from the worker continue once it is given up. Those that arrive
    after the cut was noticed are not late; the worker is used soon after it heals."""

    async def main() -> None:
        story = Story(lambda mesh: mesh.cut("frontend-0", "decode-0"), lambda mesh: mesh.mend("frontend-0", "decode-0"))
        await story.play()
        assert {each.outcome for ledgers in story.of.values() for each in ledgers} == {"answered"}
        assert slowest_s(story.of["frontend-1"]) < USUAL_S
        assert slowest_s(story.arrived("frontend-0", -USUAL_S, 0.0)) < GIVEN_UP_S + 2 * USUAL_S
        assert slowest_s(story.arrived("frontend-0", 0.0, NOTICED_S)) < NOTICED_S + USUAL_S
        assert slowest_s(story.arrived("frontend-0", NOTICED_S)) < USUAL_S
        first_s = min(
            each.arrived_s - story.began_s - CUT_AT_S - CUT_S
            for each in story.arrived("frontend-0", CUT_S)
            if [worker for _, worker in each.placements] == ["decode-0"]
        )
        assert first_s < HEALED_S

    run_virtual(main())
