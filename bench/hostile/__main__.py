"""Attacks a simulated mesh in all known ways at once and measures the latency of a well-behaved tenant.

    python -m bench.hostile                                60 s of attacks
    python -m bench.hostile --seconds 3600 --rounds 20     an hour, with quiet phases between the attacks

Starts a mesh with API keys on this machine. One tenant sends ten requests a second (`--rate`). Each round has a phase without attacks and one
with attacks. At the end, another phase runs a process that uses as much CPU as the attackers did but sends nothing. The attackers have a CPU
budget (`--cores`). Exits with status 1 if a request fails, or if the 99th percentile of the tenant's latencies under attack exceeds `--limit`
times that of the quiet phases, each over all rounds.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from bench.hostile.attacks import Target
from bench.hostile.generator import AttackReport, attack_process, neutral_process, prepare_process
from bench.hostile.slow import explaining
from bench.hostile.tenant import TenantReport, combined, run_tenant
from bench.mesh import MeshKind, Served, running_mesh
from bench.processes import process_use
from services.frontend.access.keys import hash_of

KEYS = {"well-behaved": "kvmesh-bench-good", "hostile": "kvmesh-bench-hostile"}


async def measure(served: Served, arguments: argparse.Namespace) -> int:
    """Runs the phases and prints the table. Returns the exit status."""
    key, seconds = KEYS["well-behaved"], arguments.seconds / arguments.rounds
    quiet_seconds = arguments.quiet_seconds or max(10.0, min(60.0, seconds / 2))
    target = Target(url=served.url, grpc_address=served.grpc_address, model=served.model, key=KEYS["hostile"])
    loop = asyncio.get_running_loop()
    quiet, attacked, reports = [], [], []
    async with explaining(served) as explain:
        ask = partial(run_tenant, served, key, explain=explain, period_s=1 / arguments.rate)
        await ask(2.0)  # Warms up caches and code paths.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare_process) as pool:
            await loop.run_in_executor(pool, neutral_process, 0.0, 1.0)
            print(f"{'':10} {'requests':>8} {'p50 ms':>9} {'p90 ms':>9} {'p99 ms':>9}")
            for number in range(arguments.rounds):
                quiet.append(await ask(quiet_seconds))
                attack = partial(attack_process, target, seconds, arguments.only, cores=arguments.cores)
                attacking = loop.run_in_executor(pool, attack)
                attacked.append(await ask(seconds))
                reports.append(await attacking)
                print(quiet[-1].lines(f"quiet {number + 1}"), attacked[-1].lines(f"attacked {number + 1}"), sep="\n")
                print("  slowest:", *(line for _, line in attacked[-1].slow), sep="\n    ")
                print(
                    "  MiB: "
                    + ", ".join(f"{name} {process_use(pid).rss_mib:.0f}" for name, pid in served.watch.items())
                )
                print(f"  attackers' cores: {reports[-1].cores:.2f}", flush=True)
            cores = sum(each.cores for each in reports) / len(reports)
            wasting = loop.run_in_executor(pool, neutral_process, quiet_seconds, cores)
            neutral = await ask(quiet_seconds)
            neutral_cores = await wasting
    print(neutral.lines("neutral"))
    print(f"attackers' cores: {cores:.2f} of {arguments.cores:g}; neutral {neutral_cores:.2f}")
    return _print_totals(combined(quiet), combined(attacked), neutral, reports=reports, limit=arguments.limit)


def _print_totals(
    quiet: TenantReport, attacked: TenantReport, neutral: TenantReport, *, reports: Sequence[AttackReport], limit: float
) -> int:
    ended = sum((each.ended for each in reports), Counter[str]())
    for what, count in sorted(ended.items()):
        print(f"  {count:7}  {what}")
    rates = {name: sum(each.per_s[name] for each in reports) / len(reports) for name in reports[0].per_s}
    print("requests/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    for name, each in (("quiet", quiet), ("attacked", attacked), ("neutral", neutral)):
        failures = ", ".join(f"{count} x {what}" for what, count in each.failures.items()) or "none"
        print(
            f"{name}: {len(each.times_s)} requests, p50 {each.p50_ms:.1f} ms, p99 {each.p99_ms:.1f} ms; failures: {failures}"
        )
    ratio = attacked.p99_ms / quiet.p99_ms
    is_good = ratio <= limit and not attacked.failures
    print(f"p99 attacked / neutral: {attacked.p99_ms / neutral.p99_ms:.2f}")
    print(f"p99 attacked / quiet: {ratio:.2f}, limit {limit:g}: {'within' if is_good else 'NOT WITHIN'}")
    return 0 if is_good else 1


async def run(arguments: argparse.Namespace) -> int:
    """Starts the mesh with the keys of both tenants."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-hostile-") as folder:
        keys = Path(folder) / "keys.json"
        rows = [{"tenant": tenant, "key_sha256": hash_of(key)} for tenant, key in KEYS.items()]
        keys.write_text(json.dumps({"keys": rows}))
        os.environ["KVMESH_ACCESS_KEYS_FILE"] = str(keys)
        kind = MeshKind(name="hostile", engine_argv=(), prefills=arguments.prefill)
        async with running_mesh(kind) as served:
            return await measure(served, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the attacks")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second of the well-behaved tenant")
    parser.add_argument("--rounds", type=int, default=1, help="parts of the attacks, each after a quiet phase")
    parser.add_argument(
        "--quiet-seconds", type=float, default=0.0, help="duration of each other phase; 0: half of a part, 10 to 60 s"
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers of the mesh")
    parser.add_argument("--cores", type=float, default=0.25, help="CPU budget of the attackers")
    parser.add_argument("--limit", type=float, default=3.0, help="largest ratio of the 99th percentiles")
    parser.add_argument("--only", default="", help="only the attacks whose names contain this text")
    with suppress(KeyboardInterrupt):
        return asyncio.run(run(parser.parse_args(argv)))
    return 130


if __name__ == "__main__":
    sys.exit(main())
