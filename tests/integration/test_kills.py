"""A short run of `python -m tests.chaos.kills`, and processes that are stopped for longer than other processes wait."""

import asyncio
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.chaos.kills import Account, Requests, Shape, run_vllm
from tests.chaos.processes import ROOT, ProcessMesh, process_mesh
from tests.parts import require_part

STOPPED = (
    (("router-0",), 12.0),
    (("router-0", "router-1"), 5.0),
    (("frontend-0", "prefill-0"), 12.0),
)
"""The processes that are stopped, and for how long: the frontend for longer than a placement may take, all routers for less."""


@pytest.mark.timeout(600)
@pytest.mark.proves("migration", engine="simulated")
async def test_a_worker_is_killed_every_second() -> None:
    """Every answer is right, streamed or not, and some continued on another worker."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.chaos.kills", "--requests", "100", "--in-flight", "16", "--tokens", "120"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-8000:]
    assert "continued 0 times" not in output.decode()


@pytest.mark.vllm
@pytest.mark.timeout(420)
@pytest.mark.proves("migration", engine="vllm")
async def test_vllm_workers_are_killed(tmp_path: Path) -> None:
    """A short run of `python -m tests.chaos.kills --engine vllm`: answers of every kind continue token for token on another worker."""
    require_part("vllm")
    require_part("nixl")
    shape = Shape(requests=36, in_flight=6, tokens=120, pause_s=0.0, seed=5, questions=9)
    account = await run_vllm(shape, tmp_path, is_short=True)
    assert not account.problems, account.problems
    assert account.kills == ["decode-0", "prefill-0"] and account.continued > 0


@pytest.mark.timeout(600)
async def test_stopped_processes_resume(tmp_path: Path) -> None:
    """Processes are stopped with requests in every phase, and continue: every request gets the right answer.

    The frontend is stopped while requests wait for the routers. It continues after longer than a placement may take, with the routers' responses
    in its sockets, and returns no 503.
    """
    shape = Shape(requests=60, in_flight=60, tokens=100, pause_s=0.0, seed=3)
    random = Random(4)
    async with process_mesh(tmp_path, engine_argv=("--simulated-time-factor", "1")) as mesh:
        calm = Requests(mesh.url, shape, Account())
        await calm.learn()
        for names, stopped_s in STOPPED:
            account = Account()
            requests = Requests(mesh.url, shape, account, answers=calm.answers)
            asking = asyncio.create_task(requests.run())
            await asyncio.sleep(random.uniform(0.05, 0.5))
            unread = await _stop_before_answers(mesh) if "frontend-0" in names else []
            for name in names:
                if name != "frontend-0":
                    await mesh.stop(name)
            late = asyncio.create_task(_chat(mesh.url))
            await asyncio.sleep(stopped_s)
            for name in names:
                mesh.go_on(name)
            await asking
            for each in await asyncio.gather(late, *unread):
                assert each["usage"]["completion_tokens"] == 3
            assert not account.problems, (names, account.problems, mesh.logs())
            assert account.whole + account.streams == {"right": 60}


async def _stop_before_answers(mesh: ProcessMesh) -> list[asyncio.Task[Any]]:
    """Sends requests, and stops the frontend before the routers respond with their placements. Returns the requests."""
    routers = ("router-0", "router-1")
    for name in routers:
        await mesh.stop(name)
    asking = [asyncio.create_task(_chat(mesh.url)) for _ in range(4)]
    await asyncio.sleep(0.5)
    await mesh.stop("frontend-0")
    for name in routers:
        mesh.go_on(name)
    return asking


async def _chat(url: str) -> Any:
    body = {"model": "demo", "messages": [{"role": "user", "content": "late"}], "max_tokens": 3}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = json.loads(await response.text())
        assert response.status == 200, answer
        return answer
