"""`kvmesh role` and `kvmesh drain` on a mesh of real processes with simulated engines, under load.

Real engines change roles in test_api_vllm.py and test_mesh_mixed.py.
"""

import asyncio
import os
import sys
from pathlib import Path

from kvmesh.discovery.base import DECODE, PREFILL
from tests.integration.mesh import ROOT, RunningMesh, argv_simulated, chat, running_mesh, wait_until
from tests.patience import PATIENCE_S

DECODE_WORKERS = 3
"""Without one of them, requests still have another worker if the machine pauses one for seconds."""
PROMPTS = [f"the prompt number {number}, which is neither long nor short " * 8 for number in range(12)]


async def command(mesh: RunningMesh, *words: str) -> tuple[int, str]:
    """Runs a kvmesh command on the mesh. Returns its status and its whole output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", *words),
        cwd=ROOT,
        env={**os.environ, "KVMESH_STATE": str(mesh.directory / "mesh.json")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def workers(mesh: RunningMesh, service: str) -> list[str]:
    """Ids of the workers that the registry lists in a pool and that accept requests."""
    registry = mesh.target.registry()
    try:
        return sorted(each.instance_id for each in (await registry.instances(service)).instances if each.takes_requests)
    finally:
        await registry.aclose()


async def decode_workers(mesh: RunningMesh, count: int) -> list[str]:
    """Waits for so many decode workers. One that is late with a heartbeat accepts no requests for a while."""
    found: list[str] = []

    async def are_all() -> bool:
        found[:] = await workers(mesh, DECODE)
        return len(found) == count

    await wait_until(are_all, PATIENCE_S, lambda: f"decode workers: {found}")
    return found


async def answers(mesh: RunningMesh) -> list[object]:
    """Returns the greedy answers to all prompts, sent concurrently."""
    asked = [chat(mesh.url, prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
    return [answer["choices"][0]["message"]["content"] for answer in await asyncio.gather(*asked)]  # type: ignore[index]


async def check_roles(mesh: RunningMesh, *, count: int = 2) -> None:
    """One of `count` decode workers moves to the prefill pool and back while requests run. No request fails or changes its answer."""
    expected = await answers(mesh)
    name = (await decode_workers(mesh, count))[0]
    running = asyncio.create_task(repeat(mesh, expected))
    for role, service in (("prefill", PREFILL), ("decode", DECODE)):
        status, output = await command(mesh, "role", name, role)
        assert (status, output) == (0, f"{name} is a {role} worker\n")

        async def has_moved(service: str = service) -> bool:
            return name in await workers(mesh, service)

        await wait_until(has_moved, PATIENCE_S, f"{name} is ready as {role}")
        assert await answers(mesh) == expected
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled(), running.exception()


async def repeat(mesh: RunningMesh, expected: list[object]) -> None:
    while True:
        assert await answers(mesh) == expected
        await asyncio.sleep(0.1)  # Starting workers need the CPU.


async def test_simulated_workers_change_roles_and_drain(tmp_path: Path) -> None:
    """Both commands work under load. Errors name unknown workers and the known ones."""
    argv = argv_simulated("--prefill", "1", "--decode", str(DECODE_WORKERS), "--engine-args=--simulated-time-factor 1")
    async with running_mesh(tmp_path, *argv) as mesh:
        await check_roles(mesh, count=DECODE_WORKERS)
        first = (await decode_workers(mesh, DECODE_WORKERS))[0]
        assert await command(mesh, "drain", first) == (0, f"{first} is drained\n")
        assert first not in await workers(mesh, DECODE)
        assert len(set(map(str, await answers(mesh)))) == len(PROMPTS)
        assert await command(mesh, "drain", first, "--undo") == (0, f"{first} accepts requests again\n")
        status, output = await command(mesh, "drain", "nobody")
        assert status == 1 and first in output and "nobody" in output
        assert (await command(mesh, "role", first, "encode"))[0] == 2
