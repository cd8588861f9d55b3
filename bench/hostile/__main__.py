"""Attacks a simulated mesh in all known ways at once, and prints what a well-behaved tenant notices.

    python -m bench.hostile                   60 s of attacks
    python -m bench.hostile --seconds 3600    an hour

Starts a mesh with API keys on this machine. One tenant asks ten times a second, first alone, then beside the attacks, which run in a process
of their own. Ends with status 1 if the 99th percentile of its answer times is more than `--limit` times the quiet one, or a request fails.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import aiohttp

from bench.figures import percentiles
from bench.hostile.attacks import CHAT, Target, attack_process, prepare_process
from bench.mesh import MeshKind, Served, running_mesh
from services.frontend.access.keys import hash_of

KEYS = {"well-behaved": "kvmesh-bench-good", "hostile": "kvmesh-bench-hostile"}
PERIOD_S = 0.1
TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class Experience:
    """What the well-behaved tenant notices."""

    times_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def line(self, name: str) -> str:
        """One line of the table."""
        found = percentiles(self.times_s)
        cells = (f"{found[each]:9.1f}" for each in ("p50", "p90", "p99"))
        failures = ", ".join(f"{count} x {what}" for what, count in self.failures.items()) or "none"
        return f"{name:10} {len(self.times_s):8} {' '.join(cells)}   failures: {failures}"

    @property
    def p99_ms(self) -> float:
        return percentiles(self.times_s)["p99"]


async def behave(served: Served, seconds: float) -> Experience:
    """Asks every PERIOD_S, whether or not the earlier answers have come."""
    experience = Experience()
    headers = {"Authorization": f"Bearer {KEYS['well-behaved']}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        ends_s = time.monotonic() + seconds
        number = 0
        while time.monotonic() < ends_s:
            number += 1
            tasks.create_task(_ask(session, served, number, experience))
            await asyncio.sleep(PERIOD_S)
    return experience


async def _ask(session: aiohttp.ClientSession, served: Served, number: int, experience: Experience) -> None:
    messages = [{"role": "user", "content": f"Question {number}: what is the sum of {number} and 7?"}]
    body = {"model": served.model, "messages": messages, "max_tokens": 16}
    began_s = time.perf_counter()
    try:
        async with session.post(served.url + CHAT, json=body) as response:
            await response.read()
            if response.status != 200:
                experience.failures[str(response.status)] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        experience.failures[type(error).__name__] += 1
    experience.times_s.append(time.perf_counter() - began_s)


async def measure(served: Served, *, seconds: float, quiet_seconds: float, limit: float, only: str) -> int:
    """Runs both phases and prints the table. Returns the exit status."""
    await behave(served, 2.0)  # Caches and code paths are warm in both phases.
    quiet = await behave(served, quiet_seconds)
    target = Target(
        url=served.url,
        grpc_address=served.grpc_address,
        model=served.model,
        key=KEYS["hostile"],
        seconds=seconds,
        only=only,
    )
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        await loop.run_in_executor(pool, prepare_process)
        attacking = loop.run_in_executor(pool, attack_process, target)
        hostile = await behave(served, seconds)
        done = await attacking
    print(f"{'':10} {'requests':>8} {'p50 ms':>9} {'p90 ms':>9} {'p99 ms':>9}")
    print(quiet.line("quiet"))
    print(hostile.line("attacked"))
    for what, count in sorted(done.items()):
        print(f"  {count:7}  {what}")
    ratio = hostile.p99_ms / quiet.p99_ms
    is_good = ratio <= limit and not hostile.failures
    print(f"p99 attacked / quiet: {ratio:.2f}, limit {limit:g}: {'within' if is_good else 'NOT WITHIN'}")
    return 0 if is_good else 1


async def run(arguments: argparse.Namespace) -> int:
    """Starts the mesh with the keys of both tenants."""
    quiet_seconds = arguments.quiet_seconds or max(10.0, min(60.0, arguments.seconds / 2))
    with tempfile.TemporaryDirectory(prefix="kvmesh-hostile-") as folder:
        keys = Path(folder) / "keys.json"
        rows = [{"tenant": tenant, "key_sha256": hash_of(key)} for tenant, key in KEYS.items()]
        keys.write_text(json.dumps({"keys": rows}))
        os.environ["KVMESH_ACCESS_KEYS_FILE"] = str(keys)
        kind = MeshKind(name="hostile", engine_argv=(), prefills=arguments.prefill)
        async with running_mesh(kind) as served:
            return await measure(
                served,
                seconds=arguments.seconds,
                quiet_seconds=quiet_seconds,
                limit=arguments.limit,
                only=arguments.only,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the attacks")
    parser.add_argument(
        "--quiet-seconds", type=float, default=0.0, help="duration before them; 0: half of it, 10 to 60 s"
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers of the mesh")
    parser.add_argument("--limit", type=float, default=3.0, help="largest ratio of the 99th percentiles")
    parser.add_argument("--only", default="", help="only the attacks whose names have this part")
    with suppress(KeyboardInterrupt):
        return asyncio.run(run(parser.parse_args(argv)))
    return 130


if __name__ == "__main__":
    sys.exit(main())
