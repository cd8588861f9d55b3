"""`kvmesh doctor` leaves no process behind, however it ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.mesh import ROOT
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def children(pid: int) -> list[int]:
    """Returns the direct children of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for each in found:
        found.extend(children(each))
    return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def running(pids: Sequence[int]) -> list[int]:
    """Returns the processes of the mesh that still run. Zombies, and other programs that reuse a pid, do not count."""
    return [pid for pid in pids if "kvmesh" in (line := command(pid)) or "services." in line]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
async def test_no_process_outlives_the_doctor(tmp_path: Path, number: int, status: int) -> None:
    """When the doctor is killed or interrupted while its mesh starts, its guard, mesh, services and fork server end too."""
    doctor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "doctor"),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    family: list[int] = []
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            while not any("services.gateway" in command(pid) for pid in family):
                assert doctor.returncode is None
                await asyncio.sleep(0.05)
                family = descendants(doctor.pid)
            doctor.send_signal(number)
            assert await doctor.wait() == status
            while running(family):
                await asyncio.sleep(0.05)
    finally:
        for pid in (doctor.pid, *running(family)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await doctor.wait()


SIMULATED = """
import sys
from kvmesh.cli import doctor
from kvmesh.cli.verdicts import Finding, Status

async def skip(self):
    return Finding(check="NIXL", status=Status.OK, found="")

doctor.installed_build, doctor.Doctor._check_nixl = lambda gpu: "", skip
sys.exit(doctor.main(["--requests", "2", "--concurrency", "1", "--up-args=--decode 2"]))
"""
"""With two decode workers: if a busy machine delays one, the other one answers."""


async def test_the_doctor_leaves_no_open_resources(tmp_path: Path) -> None:
    """With a mesh of simulated engines, the doctor causes no ResourceWarning (sockets, processes, event loops), and the mesh's processes have
    ended when it exits."""
    doctor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "always::ResourceWarning", "-c", SIMULATED),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(doctor.communicate(), 2 * PATIENCE_S)
    assert (doctor.returncode, err.decode()) == (0, "")
    assert b"6 mesh           ok" in out and b"8 KV moved       ok" in out
    assert not with_environment(str(tmp_path))


def with_environment(word: str) -> list[Path]:
    """Returns the processes that have this word in their environment."""
    return [path for path in Path("/proc").glob("[0-9]*/environ") if word.encode() in _bytes(path)]


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
