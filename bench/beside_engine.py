"""Compares one engine worker under kvmesh with the engine's own server, in alternation, with the same load and flags.

python -m bench.beside_engine --engine vllm                       one worker and `vllm serve`
python -m bench.beside_engine --engine sglang                     one worker and `sglang.launch_server`
python -m bench.beside_engine --shape split                       one prefill and one decode worker, and the engine's own pair of servers;
                                                                  the load generator sends each request to both servers, as a router would
python -m bench.beside_engine --shape split --beside-single       one prefill and one decode worker, and one server of the engine

Both systems start once and are loaded in alternation for a few seconds, so that a slow phase of the machine affects both. The engine's own
servers are stopped (SIGSTOP) while kvmesh is loaded, because SGLang's servers and vLLM's NIXL agents poll without a pause.

Each point is written to the file of `--json` at once. `--append` keeps the points already in the file, so that a measurement can be split into
several runs by `--streams` or by rounds.

The load is a closed loop of 1, 8 or 32 streams, with 128 tokens in and 64 out. CPU and memory are those of all processes of a system, without
the load generator. `kvmesh / own = ratio`: the medians over the rounds, and the median of the ratios per round.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine_servers import OWN, running_pair, running_server, target_of
from bench.loops import closed_loop, for_seconds, measure
from bench.mesh import MeshKind, Served, running_mesh
from bench.prompts import PromptShape, make_prompts, one_token_words
from bench.services import DEMO_MODEL
from bench.table import render
from bench.target import LoadRequest
from kvmesh.lifecycle import run

STREAMS = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
OURS, THEIRS = "kvmesh", OWN
FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "tokens/s": lambda summary: float(summary["tokens_per_s"]),
    "TTFT p50 ms": lambda summary: float(summary["ttft_ms"].get("p50", 0.0)),
    "ITL p50 ms": lambda summary: float(summary["gap_ms"].get("p50", 0.0)),
    "CPU-s per 1k tokens": lambda summary: float(summary["server_cpu_s_per_1k_tokens"]),
    "memory MiB": lambda summary: float(sum(summary["rss_mib"].values())),
}
SHAPES = {"single": 0, "split": 1}
"""The number of prefill workers of each shape's mesh."""


def kv_bytes_per_token(model: Path) -> int:
    """Returns the KV size of one token in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def servers(options: argparse.Namespace) -> list[AbstractAsyncContextManager[Served]]:
    """Returns the context managers of both systems. Entering one starts the system."""
    kind = MeshKind(
        name=options.shape,
        engine=options.engine,
        engine_argv=(),
        model_dir=options.model,
        prefills=SHAPES[options.shape],
        up_flags=("--no-planner",),
    )
    kv_bytes = kv_bytes_per_token(options.model)
    if options.shape == "split" and not options.beside_single:
        return [running_mesh(kind), running_pair(options.engine, options.model, kv_bytes)]
    return [running_mesh(kind), running_server(options.engine, options.model, kv_bytes)]


async def measure_streams(served: Served, streams: int, seconds: float, *, seed: int) -> dict[str, Any]:
    """Runs a few uncounted requests, then `seconds` of load."""
    words = one_token_words(served.model_dir)
    prompts = make_prompts(PromptShape(tokens=PROMPT_TOKENS), seed=seed, words=words)
    requests = (LoadRequest(prompt=prompt, output_tokens=OUTPUT_TOKENS) for prompt in prompts)
    target = target_of(served, 240.0)
    try:
        await closed_loop(target, islice(requests, streams + 1), streams)
        report = await measure(closed_loop(target, for_seconds(requests, seconds), streams), served.watch)
    finally:
        await target.aclose()
    return report.summary()


async def measure_all(options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """Measures both systems. Appends each point to `points` and writes all points to the file."""
    first = 1 + max((point["round"] for point in points), default=-1)
    ours, theirs = servers(options)
    async with ours as mesh, theirs as own:
        for number in range(first, first + options.rounds):
            for streams in options.streams:
                for served in (mesh, own) if number % 2 else (own, mesh):
                    with nullcontext() if served is own else stopped(own):
                        seed = 1000 * number + streams
                        summary = await measure_streams(served, streams, options.seconds, seed=seed)
                    points.append({"system": served.system, "streams": streams, "round": number, **summary})
                    options.json.write_text(json.dumps(points, indent=1) + "\n")
                    rate, errors = summary["tokens_per_s"], summary["errors"]
                    print(
                        f"bench: {served.system}, {streams} streams: {rate:.0f} tokens/s, {errors} errors",
                        file=sys.stderr,
                    )


@contextmanager
def stopped(served: Served) -> Iterator[None]:
    """Suspends the processes of an engine's own servers while the context is entered. Each server leads a process group."""
    for pid in served.watch.values():
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in served.watch.values():
            os.killpg(pid, signal.SIGCONT)


def figures_of(
    points: Sequence[Mapping[str, Any]], system: str, streams: int, *, read: Callable[[Mapping[str, Any]], float]
) -> Mapping[int, float]:
    """Returns the figure of one system by round."""
    here = [point for point in points if point["system"] == system and point["streams"] == streams]
    return {point["round"]: read(point) for point in here}


def compared(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Returns the medians, and the median of the rounds' ratios; a dash for a system without a point."""
    shown = " / ".join(f"{median(each.values()):.3g}" if each else "-" for each in (ours, theirs))
    ratios = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys() if theirs[number]]
    return f"{shown} = {median(ratios):.2f}" if ratios else shown


def table(points: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for streams in sorted({point["streams"] for point in points}):
        row = [str(streams)]
        for read in FIGURES.values():
            ours, theirs = (figures_of(points, system, streams, read=read) for system in (OURS, THEIRS))
            row.append(compared(ours, theirs))
        here = [point for point in points if point["streams"] == streams]
        row += [str(sum(point["errors"] for point in here)), f"{max(point['others_cores'] for point in here):.1f}"]
        lines.append(row)
    return render(("streams", *FIGURES, "errors", "others"), lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.beside_engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="single")
    parser.add_argument(
        "--beside-single", action="store_true", help="compare the split shape with one server of the engine's own"
    )
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of load per point")
    parser.add_argument("--json", type=Path, default=Path("run/beside_engine.json"), metavar="FILE")
    parser.add_argument("--append", action="store_true", help="keep the points that the file has")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    points = json.loads(options.json.read_text()) if options.append and options.json.exists() else []
    run(measure_all(options, points))
    print(table(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
