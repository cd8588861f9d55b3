"""kvmesh beside Dynamo with its mocker: the same load generator, tokenizer, prompts and shapes, in alternation.

python -m bench.side_by_side --dynamo ~/dynamo-venv --rounds 3

Both are one prefill and one decode worker with KV routing; engines take no time, or about 6 ms a step. Rounds alternate
(kvmesh, Dynamo, kvmesh, ...), so that a slow phase of the machine hits both. Without Dynamo kvmesh is measured alone.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from bench.dynamo import DynamoKind, missing, running_dynamo
from bench.medians import COLUMNS, compare
from bench.mesh import MeshKind, Served, running_mesh
from bench.points import Bench, Point
from bench.scenarios import FLAT_OUT, PACED, SIDE_BY_SIDE_FLAT_OUT, SIDE_BY_SIDE_PACED, Scenario
from bench.services import DEMO_MODEL
from bench.table import COLUMNS as ROUND_COLUMNS
from bench.table import MEMORY_COLUMNS, NOTE, memory_rows, render, rows
from kvmesh.lifecycle import run

FLAT_OUT_SPEEDUP = 1_000_000
PACED_SPEEDUP = 1


def _kinds(model_dir: Path) -> Sequence[tuple[MeshKind, DynamoKind, Sequence[Scenario]]]:
    return [
        (
            MeshKind(name=mesh.name, engine_argv=mesh.engine_argv, model_dir=model_dir),
            DynamoKind(name=mesh.name, speedup_ratio=speedup, model_dir=model_dir),
            scenarios,
        )
        for mesh, speedup, scenarios in (
            (FLAT_OUT, FLAT_OUT_SPEEDUP, SIDE_BY_SIDE_FLAT_OUT),
            (PACED, PACED_SPEEDUP, SIDE_BY_SIDE_PACED),
        )
    ]


async def _measure(
    server: AbstractAsyncContextManager[Served],
    kind: str,
    scenarios: Sequence[Scenario],
    seed: int,
    options: argparse.Namespace,
) -> list[Point]:
    """All scenarios on a fresh server; both systems get the same prompts of a round."""
    points = []
    async with server as served:
        bench = Bench(served, kind, seed)
        await bench.warm_up()
        for scenario in scenarios:
            _tell(f"{served.system}, {kind}: {scenario.name}")
            points.append(await bench.measure(scenario, options.seconds))
    return points


async def measure_rounds(options: argparse.Namespace, *, has_dynamo: bool) -> list[Point]:
    """Every kind of engine, both systems in turn, round after round."""
    points: list[Point] = []
    for round_number in range(options.rounds):
        _tell(f"round {round_number + 1} of {options.rounds}")
        seed = 1000 * (round_number + 1)
        for mesh_kind, dynamo_kind, scenarios in _kinds(options.model.resolve()):
            points += await _measure(running_mesh(mesh_kind), mesh_kind.name, scenarios, seed, options)
            if has_dynamo:
                server = running_dynamo(options.dynamo, dynamo_kind)
                points += await _measure(server, dynamo_kind.name, scenarios, seed, options)
            # After each step, so that a run that is cut short leaves what it has.
            _write(options.json, points)
    return points


def _write(path: Path, points: Sequence[Point]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([point.as_json() for point in points], indent=1) + "\n", encoding="utf-8")


async def _main(options: argparse.Namespace) -> int:
    problem = await missing(options.dynamo)
    if problem:
        _tell(problem)
        if options.dynamo is not None:
            return 1
    points = await measure_rounds(options, has_dynamo=not problem)
    print(render(("system", *ROUND_COLUMNS), rows(points, with_system=True)), f"\n{NOTE}\n")
    print(render(MEMORY_COLUMNS, memory_rows(points)), "\n")
    if not problem:
        print("Medians over the rounds, kvmesh / Dynamo = ratio; above 1 is better in rates, below 1 in the others.\n")
        print(render(COLUMNS, compare(points)))
    _tell(f"all figures are in {options.json}")
    return 0


def _tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.side_by_side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dynamo", type=Path, metavar="DIR", help="virtual environment with Dynamo and its mocker")
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="model directory whose tokenizer and template both serve"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load per point")
    parser.add_argument("--json", type=Path, default=Path("run/side_by_side.json"), metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> Any:
    """The command."""
    return run(_main(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
