"""A mesh of real processes whose planner stands still, or dies: no client sees it."""

import os
import signal
from pathlib import Path

from tests.integration.mesh import argv_simulated, chat, process_state, running_mesh


async def test_requests_are_answered_while_the_planner_is_away(tmp_path: Path) -> None:
    """The planner acts here, so it watches the mesh. The answers are those from before, and are not late."""
    argv = argv_simulated("--prefill", "2", "--decode", "2", "--plan", "--restarts-max", "0")
    async with running_mesh(tmp_path, *argv) as mesh:
        text = "a prompt of some length " * 20
        expected = (await chat(mesh.url, text, max_tokens=12, temperature=0))["choices"]
        (planner,) = mesh.pids("planner")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(planner, number)
            for _ in range(8):
                assert (await chat(mesh.url, text, max_tokens=12, temperature=0))["choices"] == expected
        assert process_state(planner) == "Z" and mesh.process.returncode is None
