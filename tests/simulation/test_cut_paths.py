"""Cuts between one frontend and workers, in a whole mesh on virtual time. Other frontends are not affected, and the effect ends soon after
the cut."""

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
"""Time from the cut until the frontend notices it."""
GIVEN_UP_S = 6.5
"""Ten missed heartbeats, and some time to notice: then answers that have begun continue on another worker."""
HEALED_S = 5.0
"""Time from the end of the cut until the frontend works as before."""
REQUESTS = 900
USUAL_S = 1.0
"""Without a cut, no request of this load takes longer."""


class CutScenario:
    """One run with a cut: two frontends, each with half of the load. Times are relative to the cut."""

    def __init__(self, cut: Callable[[ScriptedMesh], None], reconnect: Callable[[ScriptedMesh], None]) -> None:
        self.mesh = ScriptedMesh(23, SHAPE)
        self.of: dict[str, list[Ledger]] = {name: [] for name in self.mesh.frontends}
        self._cut, self._reconnect = cut, reconnect

    async def play(self) -> None:
        mesh = self.mesh
        await mesh.start()
        load = plan_load(mesh.world.random("load"), REQUESTS, replace(LOADS["calm"], cancelled_fraction=0.0))
        began_s = self.began_s = mesh.now_s
        loop = asyncio.get_running_loop()
        loop.call_at(began_s + CUT_AT_S, self._cut, mesh)
        loop.call_at(began_s + CUT_AT_S + CUT_S, self._reconnect, mesh)
        for number, planned in enumerate(load):
            await mesh.world.clock.sleep(began_s + planned.at_s - mesh.now_s)
            name = f"frontend-{number % 2}"
            self.of[name].append(mesh.begin(planned.request, frontend=name))
        await mesh.idle()
        assert mesh.problems() == []
        await mesh.aclose()

    def arrived(self, frontend: str, after_s: float, before_s: float = 1e9) -> list[Ledger]:
        """Returns the requests of a frontend whose arrival was between these times after the cut."""
        times = ((each, each.arrived_s - self.began_s - CUT_AT_S) for each in self.of[frontend])
        return [each for each, at_s in times if after_s <= at_s < before_s]


def slowest_s(ledgers: list[Ledger]) -> float:
    return max(each.ended_s - each.arrived_s for each in ledgers)


def test_a_frontend_cut_from_all_decode_workers_does_not_affect_others() -> None:
    """The other frontend answers all requests in their usual time. The cut frontend refuses requests with the reason, and recovers after the
    cut."""

    def cut(mesh: ScriptedMesh) -> None:
        mesh.cut("frontend-0", "decode-0")
        mesh.cut("frontend-0", "decode-1")

    def reconnect(mesh: ScriptedMesh) -> None:
        mesh.reconnect("frontend-0", "decode-0")
        mesh.reconnect("frontend-0", "decode-1")

    async def main() -> None:
        scenario = CutScenario(cut, reconnect)
        await scenario.play()
        assert {each.outcome for each in scenario.of["frontend-1"]} == {"answered"}
        assert slowest_s(scenario.of["frontend-1"]) < USUAL_S
        during = scenario.arrived("frontend-0", NOTICED_S, CUT_S - 1)
        refused = [each for each in during if each.outcome == "paths_open"]
        assert len(refused) > 0.9 * len(during) and slowest_s(refused) < USUAL_S
        assert {each.outcome for each in during} <= {
            "paths_open",
            "answered",
        }  # Requests that probe a worker wait until the cut ends.
        after = scenario.arrived("frontend-0", CUT_S + HEALED_S)
        assert after and {each.outcome for each in after} == {"answered"}
        assert slowest_s(after) < USUAL_S

    run_virtual(main())


def test_a_cut_from_one_worker_delays_only_requests_before_it_is_noticed() -> None:
    """All requests are answered. Those with tokens already streamed from the worker continue elsewhere once the frontend gives it up.
    Requests that arrive after the frontend noticed the cut are not late. The frontend uses the worker again soon after the cut ends."""

    async def main() -> None:
        scenario = CutScenario(
            lambda mesh: mesh.cut("frontend-0", "decode-0"), lambda mesh: mesh.reconnect("frontend-0", "decode-0")
        )
        await scenario.play()
        assert {each.outcome for ledgers in scenario.of.values() for each in ledgers} == {"answered"}
        assert slowest_s(scenario.of["frontend-1"]) < USUAL_S
        assert slowest_s(scenario.arrived("frontend-0", -USUAL_S, 0.0)) < GIVEN_UP_S + 2 * USUAL_S
        assert slowest_s(scenario.arrived("frontend-0", 0.0, NOTICED_S)) < NOTICED_S + USUAL_S
        assert slowest_s(scenario.arrived("frontend-0", NOTICED_S)) < USUAL_S
        first_s = min(
            each.arrived_s - scenario.began_s - CUT_AT_S - CUT_S
            for each in scenario.arrived("frontend-0", CUT_S)
            if [worker for _, worker in each.placements] == ["decode-0"]
        )
        assert first_s < HEALED_S

    run_virtual(main())
