"""Compares kvmesh with Dynamo and its mocker in alternation, with the same load generator, tokenizer, prompts and shapes.

python -m bench.side_by_side --dynamo ~/dynamo-venv                           all parts; about 15 minutes for each round
python -m bench.side_by_side --dynamo ~/dynamo-venv --parts stream --shapes split --rounds 1 --seconds 2

Parts: `stream` (128 tokens in and out, 32 and 128 in flight, without step time and at 6 ms a step), `arrivals` (the same at 6 ms a step, 36
requests a second at random times), `prompt` (2000+16 and 8000+1, 32 in flight), `first` (512+64, one in flight), `memory` (100 000 short
requests, once). Shapes: `split` is a prefill and a decode worker, `single` one worker with both roles. Rounds alternate (kvmesh, Dynamo, kvmesh,
...), so that a slow phase of the machine affects both. Without Dynamo, the benchmark measures kvmesh alone.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.dynamo import missing, running_dynamo
from bench.mesh import Served, running_mesh
from bench.points import Bench, Point
from bench.scenarios import FLAT_OUT
from bench.services import DEMO_MODEL
from bench.side_memory import MemoryResult, measure_memory
from bench.side_parts import MEMORY, PARTS, SHAPES, Setup, roomy_model, setup, setups
from bench.side_tables import tables
from bench.table import COLUMNS as ROUND_COLUMNS
from bench.table import render, rows
from kvmesh.lifecycle import run


@dataclass(slots=True, kw_only=True)
class Record:
    """All measurements in order. The file is written after each step, so that an interrupted run keeps its results."""

    path: Path
    points: list[tuple[str, Point]] = field(default_factory=list)
    memory: list[MemoryResult] = field(default_factory=list)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        body = {"points": self.as_json(), "memory": [asdict(result) for result in self.memory]}
        self.path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the points with their parts."""
        return [{"part": part, **point.as_json()} for part, point in self.points]


class SideBySide:
    """Runs the benchmark."""

    def __init__(self, options: argparse.Namespace, model_dir: Path, *, has_dynamo: bool) -> None:
        self._options = options
        self._model_dir = model_dir
        self._has_dynamo = has_dynamo
        self.record = Record(path=options.json)

    async def measure(self) -> None:
        """Measures all rounds, then memory once."""
        options = self._options
        for number in range(options.rounds):
            for each in setups(options.parts, options.shapes, self._model_dir, tokenizer=options.dynamo_tokenizer):
                for server in self._servers(each):
                    _print_progress(f"round {number + 1} of {options.rounds}: {each.name}")
                    await self._measure_scenarios(server, each, seed=1000 * (number + 1))
                    self.record.write()
        if MEMORY in options.parts:
            for shape in options.shapes:
                each = setup(FLAT_OUT, shape, self._model_dir, tokenizer=options.dynamo_tokenizer)
                for server in self._servers(each):
                    await self._measure_memory(server, each)
                    self.record.write()

    def _servers(self, each: Setup) -> list[AbstractAsyncContextManager[Served]]:
        """Returns the context managers of both systems. Entering one starts the system."""
        ours = running_mesh(replace(each.mesh, up_flags=shlex.split(self._options.up_flags)))
        return [ours, running_dynamo(self._options.dynamo, each.dynamo)] if self._has_dynamo else [ours]

    async def _measure_scenarios(self, server: AbstractAsyncContextManager[Served], each: Setup, *, seed: int) -> None:
        """Measures all scenarios on a new server. Both systems get the same prompts in a round."""
        async with server as served:
            bench = Bench(served, each.name, seed)
            await bench.warm_up()
            for part, scenario in each.scenarios:
                point = await bench.measure(scenario, self._options.seconds)
                self.record.points.append((part, point))
                rate, errors = point.summary["tokens_per_s"], point.summary["errors"]
                _print_progress(f"{served.system}, {each.name}: {scenario.name}: {rate:.0f} tokens/s, {errors} errors")

    async def _measure_memory(self, server: AbstractAsyncContextManager[Served], each: Setup) -> None:
        async with server as served:
            requests = self._options.memory_requests
            _print_progress(f"{served.system}, {each.name}: memory over {requests} requests")
            self.record.memory.append(await measure_memory(served, each.name, requests=requests, seed=1))


async def _main(options: argparse.Namespace) -> int:
    problem = await missing(options.dynamo)
    if problem:
        _print_progress(problem)
        if options.dynamo is not None:
            return 1
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-") as folder:
        side_by_side = SideBySide(options, roomy_model(options.model.resolve(), Path(folder)), has_dynamo=not problem)
        await side_by_side.measure()
    record = side_by_side.record
    if options.all_rounds:
        points = [point for _, point in record.points]
        print(render(("system", *ROUND_COLUMNS), rows(points, with_system=True)), "\n")
    _show(record.as_json(), record.memory)
    _print_progress(f"all figures are in {options.json}")
    return 0


def _show(points: Sequence[Mapping[str, Any]], memory: Sequence[MemoryResult]) -> None:
    print("\n\n".join(tables(points, memory)))


def _print_progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _words(known: Sequence[str], text: str) -> list[str]:
    words = text.split(",")
    wrong = [word for word in words if word not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(known)}")
    return [word for word in known if word in words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.side_by_side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dynamo", type=Path, metavar="DIR", help="virtual environment with Dynamo and its mocker")
    parser.add_argument(
        "--dynamo-tokenizer",
        choices=("default", "fastokens"),
        default="fastokens",
        help="tokenizer of Dynamo; `default` is its own default",
    )
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="model directory for tokenizer and template of both"
    )
    parser.add_argument(
        "--parts", type=lambda text: _words(PARTS, text), default=list(PARTS), help=f"of {','.join(PARTS)}"
    )
    parser.add_argument(
        "--shapes", type=lambda text: _words(SHAPES, text), default=list(SHAPES), help=f"of {','.join(SHAPES)}"
    )
    parser.add_argument(
        "--up-flags",
        default="--no-planner",
        help="flags of `kvmesh up`, as one string; default: no planner, because Dynamo runs none",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of load per point")
    parser.add_argument("--memory-requests", type=int, default=100_000)
    parser.add_argument("--all-rounds", action="store_true", help="also print every point of every round")
    parser.add_argument("--show", type=Path, metavar="FILE", help="only print the tables of an earlier run's file")
    parser.add_argument("--json", type=Path, default=Path("run/side_by_side.json"), metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.show is not None:
        body = json.loads(options.show.read_text(encoding="utf-8"))
        _show(body["points"], [MemoryResult(**result) for result in body["memory"]])
        return 0
    return run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
