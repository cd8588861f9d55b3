"""Measures the cost of security features: meshes with all of them and with none in alternation, under the same load.

python -m bench.protection                        four rounds, about six minutes
python -m bench.protection --rounds 2 --seconds 3
python -m bench.protection --modes "everything on" "mesh TLS off"

Everything on: mesh TLS, API keys with quotas and concurrency limits, the tenant in the block hashes, and the tenant's share of queue and stores.
Everything off: plain text between services and no keys, hence no tenants and no quotas. Both modes have what cannot be turned off: the
registry's token, sealed registrations and handles, the checks of requests, and the limits of heads, bodies and connections.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.medians import FIGURES
from bench.mesh import MeshKind, running_mesh
from bench.points import Bench, Point
from bench.scenarios import FLAT_OUT, PACED, Scenario
from bench.table import render
from kvmesh.lifecycle import run
from services.frontend.access.keys import hash_of

ON, OFF = "everything on", "everything off"
KEY = "kvmesh-bench-protection"
QUOTAS = {"requests_per_minute": 10_000_000, "tokens_per_minute": 10**10, "concurrent_requests": 10_000}
"""Too high to be used up, but counted."""
PLAIN = ("--no-mesh-tls",)
SHOWN = ("tokens per CPU-s", "TTFT p50 ms", "TTFT p99 ms", "tokens/s", "others")
COMPARED = SHOWN[:3]


def modes(keys_file: Path) -> Mapping[str, Callable[[MeshKind], MeshKind]]:
    """Returns, for each mode, the function that changes a mesh's configuration."""
    keyed = {"KVMESH_ACCESS_KEYS_FILE": str(keys_file)}
    return {
        ON: lambda kind: replace(kind, environment=keyed, key=KEY),
        OFF: lambda kind: replace(kind, up_flags=(*kind.up_flags, *PLAIN)),
        "mesh TLS off": lambda kind: replace(kind, environment=keyed, key=KEY, up_flags=(*kind.up_flags, *PLAIN)),
        "keys off": lambda kind: kind,
    }


def scenarios(kind: MeshKind) -> Sequence[Scenario]:
    """Returns the streaming scenarios, and one that measures the first token on an idle mesh."""
    streams = [
        Scenario(protocol="http", prompt_tokens=128, output_tokens=128, concurrency=each, quick_acks=True)
        for each in (32, 128)
    ]
    alone = Scenario(protocol="http", prompt_tokens=512, output_tokens=64, concurrency=1, quick_acks=True)
    return [*streams, alone] if kind is FLAT_OUT else streams


async def measure(options: argparse.Namespace, keys_file: Path) -> list[tuple[str, Point]]:
    """Returns all points with their mode. Modes alternate, so that a slow phase of the machine affects all of them."""
    found: list[tuple[str, Point]] = []
    changes = modes(keys_file)
    for number in range(options.rounds):
        for kind in (PACED, FLAT_OUT):
            # The order alternates, so that no mode always runs first.
            for mode in options.modes[:: 1 if number % 2 == 0 else -1]:
                changed = changes[mode](replace(kind, up_flags=("--no-planner",)))
                async with running_mesh(changed) as served:
                    bench = Bench(served, kind.name, seed=1000 * (number + 1))
                    await bench.warm_up()
                    for scenario in scenarios(kind):
                        point = await bench.measure(scenario, options.seconds)
                        found.append((mode, point))
                        figures = " ".join(f"{FIGURES[name](point.summary):.2f}" for name in SHOWN)
                        print(f"round {number + 1}: {kind.name}, {scenario.name}, {mode}: {figures}", file=sys.stderr)
    return found


Rows = Mapping[tuple[str, str], Mapping[str, Sequence[Point]]]


def by_load(points: Sequence[tuple[str, Point]]) -> Rows:
    """Groups the points by engines and load, then by mode."""
    rows: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for mode, point in points:
        rows.setdefault((point.kind, point.scenario.name), {}).setdefault(mode, []).append(point)
    return rows


def median(points: Sequence[Point], name: str) -> float:
    return statistics.median(FIGURES[name](each.summary) for each in points)


def table(rows: Rows) -> str:
    """Returns the medians over the rounds, one line per load and mode."""
    lines = [
        (*load, mode, *(f"{median(points, name):.2f}" for name in SHOWN))
        for load, of_load in rows.items()
        for mode, points in of_load.items()
    ]
    return render(("engines", "load", "mode", *SHOWN), lines)


def ratios(rows: Rows, modes: Sequence[str]) -> str:
    """Returns the first mode's medians divided by those of the last one, and the range of the ratios per round."""
    first, last = modes[0], modes[-1]
    lines = []
    for load, of_load in rows.items():
        cells = []
        for name in COMPARED:
            read = FIGURES[name]
            each = [
                read(one.summary) / max(1e-9, read(other.summary))
                for one, other in zip(of_load[first], of_load[last], strict=True)
            ]
            middle = median(of_load[first], name) / max(1e-9, median(of_load[last], name))
            cells.append(f"{middle:.3f} ({min(each):.2f} to {max(each):.2f})")
        lines.append((*load, *cells))
    return render(("engines", "load", *COMPARED), lines)


async def _main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="kvmesh-protection-") as folder:
        keys_file = Path(folder) / "keys.json"
        keys_file.write_text(json.dumps({"keys": [{"tenant": "bench", "key_sha256": hash_of(KEY), **QUOTAS}]}))
        rows = by_load(await measure(options, keys_file))
    print(table(rows))
    print(f"\n{options.modes[0]} / {options.modes[-1]}")
    print(ratios(rows, options.modes))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--modes", nargs="+", choices=list(modes(Path())), default=[ON, OFF])
    options = parser.parse_args()
    return run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
