"""`kvmesh rollout` on meshes of real processes, under load."""

import asyncio
import shlex
from pathlib import Path

from kvmesh.discovery.base import DECODE, PREFILL
from tests.integration.mesh import argv_simulated, running_mesh
from tests.integration.test_worker_commands import answers, command, repeat, workers

SLOW = "--engine-args=--simulated-time-factor 1"


async def test_a_rollout_restarts_every_worker(tmp_path: Path) -> None:
    """No request fails or changes its answer, and all worker processes are new."""
    argv = argv_simulated("--prefill", "2", "--decode", "2", SLOW)
    async with running_mesh(tmp_path, *argv) as mesh:
        expected = await answers(mesh)
        before = {*await workers(mesh, PREFILL), *await workers(mesh, DECODE)}
        running = asyncio.create_task(repeat(mesh, expected))
        status, output = await command(mesh, "rollout", "--observe-s", "0.5")
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled(), running.exception()
        assert status == 0, f"{output}\n{mesh.logs()}"
        assert output.endswith("kvmesh: 4 workers were restarted\n")
        after = {*await workers(mesh, PREFILL), *await workers(mesh, DECODE)}
        assert len(after) == 4 and not after & before
        assert await answers(mesh) == expected


async def test_a_rollout_stops_if_a_worker_does_not_return(tmp_path: Path) -> None:
    """The other workers continue to serve. The only worker of a pool is not restarted."""
    argv = argv_simulated("--prefill", "1", "--decode", "2", "--restarts-max", "0", SLOW)
    async with running_mesh(tmp_path, *argv) as mesh:
        status, output = await command(mesh, "rollout", "--pool", "prefill")
        assert status == 1 and "--allow-gaps" in output
        status, output = await command(mesh, "rollout", "--pool", "decode", "--ready-timeout-s", "3")
        assert status == 1 and "the rollout stops: no worker replaced" in output, output
        assert len(await workers(mesh, DECODE)) == 1
        assert len(await answers(mesh)) > 0


async def test_a_rollout_to_a_broken_release_is_rolled_back(tmp_path: Path) -> None:
    """The new release's decode worker cannot start. The rollback restores the former release, and no request fails meanwhile."""
    release, broken, failed = tmp_path / "release", tmp_path / "broken", tmp_path / "failed"
    release.mkdir()
    # Python imports this file before anything else, so that workers behave like those of another installed release.
    (release / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        f"if 'services.decode' in sys.orig_argv and pathlib.Path({str(broken)!r}).exists():\n"
        f"    pathlib.Path({str(failed)!r}).touch()\n"
        "    sys.exit('this release is broken')\n"
    )
    argv = argv_simulated("--prefill", "1", "--decode", "2", "--restarts-max", "10", SLOW)
    async with running_mesh(tmp_path, *argv, env={"PYTHONPATH": str(release)}) as mesh:
        expected = await answers(mesh)
        before = {*await workers(mesh, PREFILL), *await workers(mesh, DECODE)}
        running = asyncio.create_task(repeat(mesh, expected))
        broken.touch()
        flags = (
            "--observe-s",
            "0.5",
            # After 14 s the next of the supervisor's increasing delays is about to end.
            "--ready-timeout-s",
            "14",
            "--allow-gaps",
            "--rollback-command",
            f"rm {shlex.quote(str(broken))}",
        )
        status, output = await command(mesh, "rollout", *flags)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled(), running.exception()
        assert status == 1 and "the rollout was rolled back" in output, f"{output}\n{mesh.logs()}"
        assert failed.exists() and not broken.exists()
        after = {*await workers(mesh, PREFILL), *await workers(mesh, DECODE)}
        assert len(after) == 3
        assert len(after & before) == 1, "only the decode worker whose turn had not come is the same process"
        assert await answers(mesh) == expected
