"""`kvmesh up` restarts dead processes, ends when no worker can serve, and leaves no process behind. Real processes."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from kvmesh.cli.connection import MeshTarget
from kvmesh.discovery.base import DECODE, PLANNER, PREFILL, ROUTER
from tests.integration.mesh import (
    ROOT,
    RunningMesh,
    argv_simulated,
    chat,
    descendants,
    metrics_text,
    process_state,
    running_mesh,
    wait_until,
    worker_metric,
)

PATIENCE_S = 120.0
"""A restart imports the service again, on a machine that may be busy."""


async def passing(target: MeshTarget, service: str) -> dict[str, str]:
    """Returns id and epoch of the instances that take requests."""
    client = target.registry()
    try:
        view = await client.instances(service)
    finally:
        await client.aclose()
    return {each.instance_id: each.meta.get("epoch", "") for each in view.instances if each.takes_requests}


async def answers(mesh: RunningMesh) -> bool:
    """Returns whether a chat is answered."""
    try:
        await chat(mesh.url, "still there?", max_tokens=3)
    except (AssertionError, aiohttp.ClientError):
        return False
    return True


async def restarted(mesh: RunningMesh, service: str, number: int = 0) -> int:
    """Kills a child as the kernel would when memory is short. Returns the pid of the process that replaces it."""
    before = mesh.pids(service)
    os.kill(before[number], signal.SIGKILL)
    name = f"{service}-{number}"
    await wait_until(
        lambda: any(line.startswith(f"kvmesh: {name} started again") for line in mesh.output), PATIENCE_S, name
    )
    # A forked child has its parent's command line until it is ready to change it.
    await wait_until(lambda: bool(set(mesh.pids(service)) - set(before)), PATIENCE_S, f"{name} among the processes")
    (new,) = set(mesh.pids(service)) - set(before)
    (line,) = [line for line in mesh.output if line.startswith(f"kvmesh: {name} (pid {before[number]})")]
    log = mesh.directory / f"{name}.log"
    assert re.search(rf"was killed by SIGKILL; starting it again in .* \(restart 1 of 5\); log: {log}$", line), line
    return new


async def test_each_killed_child_is_restarted(tmp_path: Path) -> None:
    """After any child was killed, the mesh answers at the same address, and a restarted worker has a new epoch.

    All children are separate programs. When the mesh is killed, no child survives it, restarted ones included.
    """
    async with running_mesh(tmp_path, *argv_simulated("--no-fork", "--no-gateway")) as mesh:
        for service, registered in (("prefill", PREFILL), ("decode", DECODE), ("planner", PLANNER), ("router", ROUTER)):
            before = await passing(mesh.target, registered)
            pid = await restarted(mesh, service)

            async def is_back(registered: str = registered, pid: int = pid, before: dict[str, str] = before) -> bool:
                now = await passing(mesh.target, registered)
                back = [name for name in now if name.endswith(f"-{pid}")]
                return bool(back) and (not now[back[0]] or now[back[0]] not in before.values())

            await wait_until(is_back, PATIENCE_S, f"{service} registers again")
            await wait_until(lambda: answers(mesh), PATIENCE_S, f"an answer after {service} died")
        await restarted(mesh, "frontend")
        await wait_until(lambda: answers(mesh), PATIENCE_S, "an answer after the frontend died")
        await check_nothing_outlives(mesh)


async def test_a_worker_whose_engine_ignores_a_cancel_is_restarted(tmp_path: Path) -> None:
    """The engine's first step takes an hour. The worker notices that a cancelled request does not end, and exits with an error."""
    engine = "--engine-args=--simulated-profile-base-s 3600 --no-worker-warm-up --worker-cancel-timeout-s 1"
    async with running_mesh(tmp_path, *argv_simulated("--prefill", "0", "--greeting", "", engine)) as mesh:
        (before,) = mesh.pids("decode")
        registry = mesh.target.registry()
        (worker,) = (await registry.instances(DECODE)).instances
        await registry.aclose()

        async def has_leg() -> bool:
            text = await metrics_text(worker.host, int(worker.meta["metrics_port"]))
            return worker_metric(text, "kvmesh_worker_legs_requests") == 1

        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": "one", "max_tokens": 3}
            request = asyncio.create_task(session.post(f"{mesh.url}/v1/completions", json=body))
            await wait_until(has_leg, PATIENCE_S, "the worker has the request")
            request.cancel()
            await asyncio.wait([request])
            assert request.cancelled()
        died = f"kvmesh: decode-0 (pid {before}) exited with status 1 (Worker failed while running: the engine did not end 1 cancelled legs"
        await wait_until(lambda: any(line.startswith(died) for line in mesh.output), PATIENCE_S, "it exits")
        await wait_until(
            lambda: any(line.startswith("kvmesh: decode-0 started again") for line in mesh.output),
            PATIENCE_S,
            "restart",
        )
        assert '"event":"engine_wedged"' in (tmp_path / "decode-0.log").read_text()


async def test_a_killed_gateway_is_restarted_at_the_same_address(tmp_path: Path) -> None:
    """The gateway was a fork of `kvmesh up`, and restarts as a program with the ports of the first process.

    When the mesh is killed, neither it nor a forked worker survives, restarted ones included.
    """
    async with running_mesh(tmp_path, *argv_simulated("--prefill", "0")) as mesh:
        await restarted(mesh, "gateway")
        await wait_until(lambda: answers(mesh), PATIENCE_S, "an answer after the gateway died")
        await restarted(mesh, "decode")
        await check_nothing_outlives(mesh)


async def check_nothing_outlives(mesh: RunningMesh) -> None:
    """Kills the mesh without a chance to stop its children, and checks that they end."""
    children = descendants(mesh.process.pid)
    assert len(children) >= 3
    mesh.process.kill()
    await wait_until(lambda: all(process_state(pid) == "Z" for pid in children), PATIENCE_S, "all end")


async def test_a_crash_loop_ends_the_mesh_unless_others_serve(tmp_path: Path) -> None:
    """While a decode worker that the mesh did not start is in the registry, the mesh continues. When that worker leaves, the mesh ends with
    the reason."""
    async with running_mesh(tmp_path, *argv_simulated("--prefill", "0", "--restarts-max", "0")) as mesh:
        other = await start_decode(mesh)
        try:

            async def has_joined() -> bool:
                return any(name.endswith(f"-{other.pid}") for name in await passing(mesh.target, DECODE))

            await wait_until(has_joined, PATIENCE_S, "the other worker joins")
            (own,) = mesh.pids("decode")
            os.kill(own, signal.SIGKILL)
            await wait_until(lambda: any("giving up after" in line for line in mesh.output), PATIENCE_S, "given up")
            await wait_until(lambda: answers(mesh), PATIENCE_S, "an answer of the other worker")
            assert mesh.process.returncode is None
        finally:
            other.terminate()
            await other.wait()
        async with asyncio.timeout(PATIENCE_S):
            assert await mesh.process.wait() == 1
        await wait_until(
            lambda: any("no decode worker is left" in line for line in mesh.output), PATIENCE_S, "it says why"
        )


async def start_decode(mesh: RunningMesh) -> asyncio.subprocess.Process:
    """Starts a decode worker that `kvmesh up` does not know."""
    argv = ("--engine", "simulated", "--model", str(ROOT / "models" / "demo"), "--simulated-kv-transport", "none")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.decode", *argv, *mesh.service_flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def test_ctrl_c_while_a_restart_is_due(tmp_path: Path) -> None:
    """The mesh ends normally, and starts no further process."""
    async with running_mesh(tmp_path, *argv_simulated("--prefill", "0")) as mesh:
        for restarts in range(3):
            pids = mesh.pids("decode")
            os.kill(pids[0], signal.SIGKILL)
            await wait_until(
                lambda count=restarts: sum("starting it again" in line for line in mesh.output) > count,
                PATIENCE_S,
                "a death",
            )
            if restarts < 2:
                await wait_until(
                    lambda count=restarts: sum("decode-0 started again" in line for line in mesh.output) > count,
                    PATIENCE_S,
                    "a restart",
                )
        mesh.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            assert await mesh.process.wait() == 0
        # At its end the reader may still have lines to read.
        await wait_until(lambda: any(line == "kvmesh: stopping" for line in mesh.output), PATIENCE_S, mesh.logs)
        ending = mesh.output[mesh.output.index("kvmesh: stopping") :]
        assert not any("started again" in line for line in ending), ending


async def test_a_worker_that_cannot_start_ends_the_mesh_at_once(tmp_path: Path) -> None:
    """The mesh reports the cause and does not restart the worker, because the next attempt would fail in the same way."""
    with pytest.raises(AssertionError) as caught:
        async with running_mesh(tmp_path, *argv_simulated("--prefill-args=--simulated-kv-transport nonsense")):
            pass
    text = str(caught.value)
    assert "the mesh cannot start: prefill-0 (pid" in text
    assert "kv-transport must be" in text
    assert "starting it again" not in text
