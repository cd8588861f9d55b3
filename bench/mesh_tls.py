"""What authentication between services costs: meshes with mesh TLS and in plain text in alternation, under the same load.

python -m bench.mesh_tls                        four rounds, about five minutes
python -m bench.mesh_tls --rounds 2 --seconds 3

Both kinds have the registry's token and sealed registrations and handles; only TLS differs.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.medians import FIGURES
from bench.mesh import MeshKind, running_mesh
from bench.points import Bench, Point
from bench.scenarios import FLAT_OUT, PACED, Scenario
from bench.table import render
from kvmesh.lifecycle import run

MODES: Mapping[str, Sequence[str]] = {"mesh TLS": (), "plain text": ("--no-mesh-tls",)}
SHOWN = ("tokens per CPU-s", "TTFT p50 ms", "TTFT p99 ms", "tokens/s", "others")


def scenarios(kind: MeshKind) -> Sequence[Scenario]:
    """Streams, and alone on an idle mesh the first token."""
    streams = [
        Scenario(protocol="http", prompt_tokens=128, output_tokens=128, concurrency=each, quick_acks=True)
        for each in (32, 128)
    ]
    alone = Scenario(protocol="http", prompt_tokens=512, output_tokens=64, concurrency=1, quick_acks=True)
    return [*streams, alone] if kind is FLAT_OUT else streams


async def measure(rounds: int, seconds: float) -> list[tuple[str, Point]]:
    """All points with their mode. Modes alternate, so that a slow phase of the machine hits both."""
    found: list[tuple[str, Point]] = []
    for number in range(rounds):
        for kind in (PACED, FLAT_OUT):
            # Neither mode is always the first one.
            for mode in list(MODES)[:: 1 if number % 2 == 0 else -1]:
                flags = ("--no-planner", *MODES[mode])
                async with running_mesh(replace(kind, up_flags=flags)) as served:
                    bench = Bench(served, kind.name, seed=1000 * (number + 1))
                    await bench.warm_up()
                    for scenario in scenarios(kind):
                        found.append((mode, await bench.measure(scenario, seconds)))
                        print(f"round {number + 1}: {kind.name}, {scenario.name}, {mode}", file=sys.stderr)
    return found


def table(points: Sequence[tuple[str, Point]]) -> str:
    """Medians over the rounds, one line per scenario and mode."""
    rows: dict[tuple[str, str, str], list[Point]] = {}
    for mode, point in points:
        rows.setdefault((point.kind, point.scenario.name, mode), []).append(point)
    lines = [
        (*key, *(f"{statistics.median(FIGURES[name](each.summary) for each in found):.2f}" for name in SHOWN))
        for key, found in rows.items()
    ]
    return render(("engines", "load", "mode", *SHOWN), sorted(lines))


async def _main(options: argparse.Namespace) -> int:
    print(table(await measure(options.rounds, options.seconds)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    return run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
