"""Runs the scenario file against meshes that it starts: `python -m bench`. Prints tables to standard output and writes JSON to a file.

python -m bench                          all parts, about five minutes
python -m bench --quick                  one row of each kind, in seconds; the figures mean nothing
python -m bench --parts load link        only some parts
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cancel import COLUMNS as CANCEL_COLUMNS
from bench.cancel import CancelTimes, measure_cancels
from bench.link import measure_link
from bench.mesh import running_mesh
from bench.points import Bench, Point
from bench.scenarios import FLAT_OUT, QUICK, SCENARIOS
from bench.startup import StartUp, measure_start_up
from bench.table import COLUMNS, MEMORY_COLUMNS, NOTE, memory_rows, render, rows
from kvmesh.lifecycle import run

PARTS = ("load", "link", "start", "cancel")
CANCELS = 40
LINK_CONCURRENCY = 256
SEED = 1


async def measure_load(options: argparse.Namespace) -> list[Point]:
    """Runs all scenarios, with one mesh per kind of engine."""
    points: list[Point] = []
    for kind, scenarios in QUICK if options.quick else SCENARIOS:
        async with running_mesh(kind) as served:
            bench = Bench(served, kind.name, options.seed)
            await bench.warm_up()
            for scenario in scenarios:
                _print_progress(f"{kind.name}: {scenario.name}")
                points.append(await bench.measure(scenario, options.seconds))
    return points


async def measure_starts(options: argparse.Namespace) -> list[StartUp]:
    """Measures start-up on simulated engines, and on vLLM unless `--without-vllm` is set."""
    _print_progress("start-up: simulated")
    found = [await measure_start_up("simulated", 1 if options.quick else 5, FLAT_OUT.engine_argv)]
    if not options.quick and not options.without_vllm:
        _print_progress("start-up: vllm")
        found.append(await measure_start_up("vllm", 3))
    return found


async def measure_all_cancels(options: argparse.Namespace) -> list[CancelTimes]:
    """Measures cancels on simulated engines, and on vLLM unless `--without-vllm` is set."""
    cancels, found = 2 if options.quick else options.cancels, []
    for engine in ("simulated",) if options.quick or options.without_vllm else ("simulated", "vllm"):
        _print_progress(f"cancels: {engine}")
        found += await measure_cancels(engine, cancels, options.seed)
    return found


async def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the selected parts, prints each, and returns all figures for the file."""
    found: dict[str, Any] = {"seconds_per_point": options.seconds}
    if "load" in options.parts:
        points = await measure_load(options)
        print(render(COLUMNS, rows(points)), f"\n{NOTE}\n")
        print(render(MEMORY_COLUMNS, memory_rows(points)), "\n", flush=True)
        found["load"] = [point.as_json() for point in points]
    if "link" in options.parts:
        _print_progress("step-frame link")
        found["link"] = link = await measure_link(LINK_CONCURRENCY, options.seconds)
        print(render(list(link), [[_text(value) for value in link.values()]]), "\n", flush=True)
    if "start" in options.parts:
        starts = await measure_starts(options)
        print(render(("seconds from `kvmesh up` to the first token", "median", "all", "loop ms"), _start_rows(starts)))
        found["start"] = [{"engine": each.engine, "seconds": each.seconds, "loop_ms": each.loop_ms} for each in starts]
    if "cancel" in options.parts:
        times = await measure_all_cancels(options)
        print(render(CANCEL_COLUMNS, [each.row() for each in times]), "\n", flush=True)
        found["cancel"] = [asdict(each) for each in times]
    return found


def _start_rows(starts: Sequence[StartUp]) -> list[list[str]]:
    return [[each.engine, f"{each.median_s:.2f}", _list(each.seconds), _list(each.loop_ms)] for each in starts]


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def _text(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _print_progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cancels", type=int, default=CANCELS, help="cancels per phase; with --quick 2")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="seconds of load per point; default 5, with --quick 0.3"
    )
    parser.add_argument("--without-vllm", action="store_true", help="skip measurements with vLLM")
    parser.add_argument(
        "--json", type=Path, default=Path("run/bench.json"), metavar="FILE", help="file for all figures"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    options.seconds = options.seconds or (0.3 if options.quick else 5.0)
    found = run(measure_all(options))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _print_progress(f"all figures are in {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
