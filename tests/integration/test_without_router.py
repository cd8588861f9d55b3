"""A mesh of real processes whose only router hangs: requests are answered all the same."""

import os
import signal
from pathlib import Path

from tests.integration.mesh import argv_simulated, chat, running_mesh


async def test_requests_are_answered_while_the_router_hangs(tmp_path: Path) -> None:
    """The frontend gives the router up and places requests itself, with the answers that the router's placements give."""
    argv = argv_simulated("--no-gateway", "--prefill", "2", "--decode", "2")
    async with running_mesh(tmp_path, *argv) as mesh:
        text = "a prompt of some length " * 20
        expected = (await chat(mesh.url, text, max_tokens=12, temperature=0))["choices"]
        (router,) = mesh.pids("router")
        os.kill(router, signal.SIGSTOP)
        try:
            for _ in range(4):
                assert (await chat(mesh.url, text, max_tokens=12, temperature=0))["choices"] == expected
            log = (mesh.directory / "frontend-0.log").read_text()
            assert log.count("placing_without_router") == 1, log
        finally:
            os.kill(router, signal.SIGCONT)
        assert (await chat(mesh.url, text, max_tokens=12, temperature=0))["choices"] == expected
