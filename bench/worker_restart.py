"""Measures the throughput of a mesh while one of its four workers restarts: `python -m bench.worker_restart`.

Four simulated decode workers run at most eight requests each, at 20 ms a step, and 32 clients keep them busy. The benchmark kills one worker and
later drains another one (SIGTERM); `kvmesh up` restarts both. It compares a window after each signal with the window before it, so that the
ratio comes from one run. While the worker is down, a quarter of the capacity is missing, so 0.75 is the least ratio to expect.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import aiohttp

from bench.mesh import MeshKind, running_mesh
from bench.noise import calibration_ms
from bench.processes import descendants
from bench.table import render
from kvmesh.lifecycle import run

WORKERS, PER_WORKER = 4, 8
OUTPUT_TOKENS = 40
WARM_UP_S = 4.0
KIND = MeshKind(
    name="four workers",
    engine_argv=(
        *("--simulated-time-factor", "1", "--simulated-profile-base-s", "0.02", "--simulated-eos-after-tokens", "0"),
        *("--simulated-profile-per-prefill-token-s", "0", "--simulated-profile-per-decode-request-s", "0"),
        *("--simulated-running-requests-max", str(PER_WORKER)),
    ),
    prefills=0,
    up_flags=("--decode", str(WORKERS), "--no-planner"),
)
COLUMNS = ("restart", "tokens/s before", "while it restarts", "ratio", "requests", "failed", "longest answer s")


@dataclass(slots=True)
class Load:
    """Closed-loop clients and their results."""

    url: str
    ends: list[tuple[float, float]] = field(default_factory=list)
    """Completion time and duration of each answer."""
    failures: list[str] = field(default_factory=list)

    async def client(self, number: int) -> None:
        random = Random(number)
        async with aiohttp.ClientSession() as session:
            while True:
                prompt = [random.randrange(300, 2000) for _ in range(64)]
                body = {"model": "bench", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
                began_s = time.perf_counter()
                try:
                    async with session.post(f"{self.url}/v1/completions", json=body) as response:
                        await response.read()
                        if response.status != 200:
                            self.failures.append(str(response.status))
                            continue
                except aiohttp.ClientError as error:
                    self.failures.append(type(error).__name__)
                    continue
                now_s = time.perf_counter()
                self.ends.append((now_s, now_s - began_s))

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        count = sum(begin_s <= at_s < end_s for at_s, _ in self.ends)
        return count * OUTPUT_TOKENS / (end_s - begin_s)


async def measure(seconds: float) -> list[Sequence[str]]:
    """Returns a row for each kind of restart. 32 clients run throughout."""
    rows: list[Sequence[str]] = []
    async with running_mesh(KIND) as served:
        load = Load(served.url)
        clients = [asyncio.create_task(load.client(number)) for number in range(WORKERS * PER_WORKER)]
        try:
            for name, number in (("killed", signal.SIGKILL), ("drained", signal.SIGTERM)):
                await asyncio.sleep(WARM_UP_S + seconds)
                at_s = time.perf_counter()
                os.kill(decode_pids(served.beside["up"])[0], number)
                await asyncio.sleep(seconds)
                before, during = load.tokens_per_s(at_s - seconds, at_s), load.tokens_per_s(at_s, at_s + seconds)
                answers = [took_s for ended_s, took_s in load.ends if ended_s >= at_s]
                numbers = (f"{before:.0f}", f"{during:.0f}", f"{during / max(1.0, before):.2f}", str(len(answers)))
                rows.append((name, *numbers, str(len(load.failures)), f"{max(answers, default=0.0):.2f}"))
                load.failures.clear()
        finally:
            for client in clients:
                client.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*clients, return_exceptions=True)
    return rows


def decode_pids(pid: int) -> list[int]:
    """Returns the process ids of the decode workers below a process."""
    found = []
    for child in descendants(pid):
        with suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if b"services.decode" in file.read():
                found.append(child)
    return found


def main() -> int:
    """Returns 0 if no request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.worker_restart", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each window")
    options = parser.parse_args()
    before_ms = calibration_ms()
    rows = run(measure(options.seconds))
    print(render(COLUMNS, rows))
    print(f"a fixed loop took {before_ms:.1f} ms before and {calibration_ms():.1f} ms after the run")
    return 1 if any(row[5] != "0" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
