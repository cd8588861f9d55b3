"""Measures the seconds from `kvmesh up` to the first streamed token, from outside the process."""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.mesh import STOP_TIMEOUT_S, up_argv
from bench.noise import calibration_ms
from bench.services import DEMO_MODEL, ROOT

FIRST_TOKEN = b"kvmesh: first token after"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Times of several starts of one engine."""

    engine: str
    seconds: Sequence[float]
    loop_ms: Sequence[float]

    @property
    def median_s(self) -> float:
        """Median of all starts."""
        return median(self.seconds)


async def measure_start_up(engine: str, times: int, engine_argv: Sequence[str] = ()) -> StartUp:
    """Starts a mesh `times` times in sequence. Ends each mesh after its first answer."""
    seconds, loop_ms = [], []
    for _ in range(times):
        loop_ms.append(calibration_ms())
        seconds.append(await _start_once(engine, engine_argv))
    return StartUp(engine=engine, seconds=seconds, loop_ms=loop_ms)


async def _start_once(engine: str, engine_argv: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        started_s = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *up_argv(engine, DEMO_MODEL, engine_argv, run_dir=Path(folder)),
            "--once",
            cwd=ROOT,
            env={**os.environ, "KVMESH_STATE": f"{folder}/mesh.json"},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        lines = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async for line in process.stderr:
                    lines.append(line.decode(errors="replace"))
                    if line.startswith(FIRST_TOKEN):
                        return time.perf_counter() - started_s
        finally:
            await _end(process)
        raise RuntimeError(f"no first token:\n{''.join(lines[-20:])}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Waits for the process to end. Reads its standard error, so that a full pipe does not block it."""
    if process.returncode is None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
