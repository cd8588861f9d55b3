"""Compares a mesh of this tree with a mesh of an earlier commit, in alternation, on the scenarios of `bench.side_by_side`.

python -m bench.beside_commit                          all scenarios, compared with the commit before the work to simplify the code
python -m bench.beside_commit --parts stream --shapes split --rounds 10 --seconds 1
python -m bench.beside_commit --up-flags="--no-planner --no-mesh-tls"    without features that the earlier commit lacks
python -m bench.beside_commit --now c008a119           compares two earlier commits

Both meshes of a shape run at the same time and are loaded in alternation for a second or two, so that a slow phase of the machine affects both.
The benchmark restarts them after some rounds, because two starts of the same mesh differ by up to 15 % of CPU. CPU is that of all services of a
mesh. `now / before = ratio [quartiles]`: the medians over the rounds, then the median and the quartiles of the ratios per round.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.earlier import BEFORE, earlier_tree
from bench.mesh import running_mesh
from bench.points import Bench
from bench.scenarios import SIDE_BY_SIDE, Scenario
from bench.services import DEMO_MODEL, ROOT
from bench.side_parts import SHAPES, Setup, roomy_model, setups
from bench.table import render
from kvmesh.lifecycle import run

FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "CPU-s per 1k tokens": lambda summary: float(summary["server_cpu_s_per_1k_tokens"]),
    "tokens/s": lambda summary: float(summary["tokens_per_s"]),
    "TTFT p50 ms": lambda summary: float(summary["ttft_ms"]["p50"]),
}
NOW, THEN = "now", "before"
"""Names of the two systems."""
QUIET_CORES_MAX = 0.3
"""Rounds in which other processes used more cores than this are excluded from the comparison."""


class BesideCommit:
    """Runs the benchmark."""

    def __init__(self, options: argparse.Namespace, roots: Mapping[str, Path], model_dir: Path) -> None:
        self._options = options
        self._roots = roots
        self._model_dir = model_dir
        self.points: list[dict[str, Any]] = []

    async def measure(self) -> None:
        for each in setups(self._options.parts, self._options.shapes, self._model_dir, tokenizer="default"):
            for start in range(self._options.starts):
                await self._measure_start(each, start)

    async def _measure_start(self, each: Setup, start: int) -> None:
        rounds = self._options.rounds
        async with AsyncExitStack() as stack:
            benches = {}
            for system in sorted(self._roots, reverse=bool(start % 2)):
                flags = shlex.split(self._options.up_flags if system == NOW else self._options.before_flags)
                mesh = replace(each.mesh, up_flags=flags, root=self._roots[system])
                served = await stack.enter_async_context(running_mesh(mesh))
                benches[system] = Bench(replace(served, system=system), each.name, seed=1 + start * rounds)
                await benches[system].warm_up()
            for number in range(start * rounds, (start + 1) * rounds):
                for _, scenario in each.scenarios:
                    await self._round(benches, each, scenario, number=number)

    async def _round(self, benches: Mapping[str, Bench], each: Setup, scenario: Scenario, *, number: int) -> None:
        """Loads each mesh once. The order alternates from round to round."""
        for system in sorted(benches, reverse=bool(number % 2)):
            point = await benches[system].measure(scenario, self._options.seconds)
            self.points.append({**point.as_json(), "round": number})
            self._options.json.write_text(json.dumps(self.points, indent=1) + "\n")
        print(f"bench: {each.name}, {scenario.name}, round {number + 1}", file=sys.stderr, flush=True)


def compared(points: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], float]) -> str:
    """Returns a cell of the table."""
    now, before = (
        {point["round"]: read(point) for point in points if point["system"] == system} for system in (NOW, THEN)
    )
    ratios = [now[number] / before[number] for number in now.keys() & before.keys()]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return (
        f"{median(now.values()):.3g} / {median(before.values()):.3g} = {median(ratios):.2f} [{low:.2f} to {high:.2f}]"
    )


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each scenario of each pair of meshes."""
    rows = []
    for key in dict.fromkeys((point["kind"], point["scenario"]) for point in points):
        here = [point for point in points if (point["kind"], point["scenario"]) == key]
        noisy = {point["round"] for point in here if point["others_cores"] > QUIET_CORES_MAX}
        quiet = [point for point in here if point["round"] not in noisy] or here
        errors = sum(point["errors"] for point in here)
        rounds = len({point["round"] for point in quiet})
        rows.append([*key, *(compared(quiet, read) for read in FIGURES.values()), str(rounds), str(errors)])
    return render(("engines", "load", *FIGURES, "rounds", "errors"), rows)


def _decode_single_tokens(tree: Path) -> None:
    """Changes the old simulated engine to decode one token per output. When steps took no time, it decoded eight, which no real engine does."""
    engine = tree / "kvmesh" / "engines" / "simulated" / "engine.py"
    engine.write_text(engine.read_text().replace("\nSTEPS_PER_TURN = 8\n", "\nSTEPS_PER_TURN = 1\n"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.beside_commit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default=BEFORE, help="the earlier commit")
    parser.add_argument("--now", default="", metavar="COMMIT", help="the later commit; default: this tree")
    parser.add_argument("--parts", nargs="+", choices=tuple(SIDE_BY_SIDE), default=list(SIDE_BY_SIDE))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--up-flags", default="--no-planner", help="flags for `kvmesh up` of the later commit, as one string"
    )
    parser.add_argument("--before-flags", default="--no-planner", help="flags for `kvmesh up` of the earlier commit")
    parser.add_argument("--starts", type=int, default=4, help="number of starts of both meshes")
    parser.add_argument("--rounds", type=int, default=3, help="load phases of each mesh per start")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per load phase")
    parser.add_argument("--json", type=Path, default=Path("run/beside_commit.json"), metavar="FILE")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print the table of an earlier run's file")
    return parser


def main() -> int:
    """Prints the table."""
    options = _parser().parse_args()
    if options.show is not None:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        roots = {THEN: stack.enter_context(earlier_tree(options.before)), NOW: ROOT}
        _decode_single_tokens(roots[THEN])
        if options.now:
            roots[NOW] = stack.enter_context(earlier_tree(options.now))
            _decode_single_tokens(roots[NOW])
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-"))
        bench = BesideCommit(options, roots, roomy_model(DEMO_MODEL.resolve(), Path(folder)))
        run(bench.measure())
    print(table(bench.points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
