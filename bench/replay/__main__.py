"""`python -m bench.replay --traces DIR`: compares placement policies on recorded traffic, in virtual time.

A load of 70 % means that, with perfect knowledge, the trace keeps the workers that compute prompts busy for 0.7 of the time. The trace's
timestamps are scaled accordingly.

Two oracles know the whole present state: `greedy` takes the worker that would finish the prompt first, `informed` is the router's `kv` policy
without delays. `of oracle` is relative to the hit rate of the better one. `of pooled` is relative to that of one cache as large as all caches
together, an upper bound.
"""

import argparse
import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

from bench.generated_trace import generate_trace
from bench.replay.oracle import OraclePlacer
from bench.replay.routers import make_placer
from bench.table import render
from kvmesh.core.whatif import RecordedRequest
from services.whatif.mesh import Replay, ReplayResult, ReplayShape
from services.whatif.placers import SimulatedPlacer
from services.whatif.traces import load_trace

TRACES = ("conversation", "synthetic")
ORACLES = ("greedy", "informed")
POLICIES = ("greedy", "informed", "kv", "dynamo_cost", "round_robin")
COLUMNS = (
    *(
        "trace",
        "workers",
        "load",
        "policy",
        "hit rate",
        "of oracle",
        "of pooled",
        "TTFT mean s",
        "p50",
        "p99",
        "fairness",
        "decode fairness",
    ),
    *("busy", "us/decision"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all combinations and prints a table."""
    options = _options(arguments)
    lines, figures = [], []
    for name in options.trace:
        trace = _trace(options.traces, name)[: options.requests]
        for workers in options.workers:
            pooled = pooled_hit_rate(trace, workers=workers, shape=options.shape)
            for load in options.load:
                speed = speed_for(trace, workers=workers, load=load, shape=options.shape)
                oracle_hits = 0.0
                for policy in options.policy:
                    began = process_time()
                    result = replay(
                        trace,
                        workers=workers,
                        policy=policy,
                        shape=options.shape,
                        speed=speed,
                        routers=options.routers,
                    )
                    oracle_hits = max(oracle_hits, result.hit_rate) if policy in ORACLES else oracle_hits
                    line = _line(name, workers, load, policy=policy, result=result, best=(oracle_hits, pooled))
                    lines.append(line)
                    figures.append(_figures(line, result))
                    print(f"{' '.join(line)} ({process_time() - began:.0f} s CPU)", file=sys.stderr, flush=True)
    print(render(COLUMNS, lines))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures))
    if options.plot:
        from bench.replay.plots import plot

        plot(figures, options.plot)
    return 0


def replay(
    trace: Sequence[RecordedRequest], *, workers: int, policy: str, shape: str, speed: float, routers: int = 1
) -> ReplayResult:
    mesh = dataclasses.replace(_mesh(workers, shape), routers=routers)
    if policy == "informed":
        policy, mesh = "kv", dataclasses.replace(mesh, event_delay_s=0.0, load_interval_s=0.0)
    return Replay(mesh, _placer(policy)).run(trace, speed=speed)


def _mesh(workers: int, shape: str) -> ReplayShape:
    # With these traces and this profile, four prefill workers keep one decode worker busy.
    decodes = workers if shape == "aggregated" else max(1, workers // 4)
    return ReplayShape(prefills=workers - decodes, decodes=decodes)


def pooled_hit_rate(trace: Sequence[RecordedRequest], *, workers: int, shape: str) -> float:
    """Returns the hit rate of one LRU cache as large as all workers' caches together: an upper bound."""
    mesh = _mesh(workers, shape)
    engine = mesh.engine
    room = engine.kv_blocks * (mesh.prefills or mesh.decodes)
    cache: OrderedDict[int, None] = OrderedDict()
    hits = prompt = 0
    for request in trace:
        blocks = request.block_ids[: request.prompt_tokens // engine.block_tokens]
        held = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        hits += min(
            held * engine.block_tokens, (request.prompt_tokens - 1) // engine.block_tokens * engine.block_tokens
        )
        prompt += request.prompt_tokens
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > room:
            cache.popitem(last=False)
    return hits / prompt


def speed_for(trace: Sequence[RecordedRequest], *, workers: int, load: float, shape: str) -> float:
    """Returns the speed at which the trace keeps the workers that compute prompts busy for `load` of the time.

    Iterates with perfect knowledge, because hit rates and batching change a little with the speed.
    """
    mesh = _mesh(workers, shape)
    prompt_s = sum(request.prompt_tokens for request in trace) * mesh.engine.speed.prefill_s_per_token
    speed = load * (mesh.prefills or mesh.decodes) * trace[-1].at_s / prompt_s
    for _ in range(4):
        speed *= load / Replay(mesh, OraclePlacer).run(trace, speed=speed).utilisation
    return speed


def _placer(policy: str) -> Callable[[Replay], SimulatedPlacer]:
    return OraclePlacer if policy == "greedy" else lambda replay: make_placer(replay, policy)


def _trace(folder: Path | None, name: str) -> list[RecordedRequest]:
    path = folder / f"{name}_trace.jsonl.gz" if folder else None
    if path is not None and path.exists():
        return load_trace(path)
    print(
        f"no {name}_trace.jsonl.gz: uses a generated trace with the conversation trace's marginals",
        file=sys.stderr,
    )
    return generate_trace(4000, rate_per_s=3.4, seed=1)


def _line(
    name: str, workers: int, load: float, *, policy: str, result: ReplayResult, best: tuple[float, float]
) -> list[str]:
    ttft_s = result.ttft_s
    return [
        name,
        str(workers),
        f"{load:.0%}",
        policy,
        f"{result.hit_rate:.4f}",
        *(f"{result.hit_rate / rate:.3f}" if rate else "" for rate in best),
        f"{sum(ttft_s) / len(ttft_s):.3f}",
        f"{ttft_s[len(ttft_s) // 2]:.3f}",
        f"{ttft_s[int(len(ttft_s) * 0.99)]:.3f}",
        f"{result.fairness:.3f}",
        f"{result.decode_fairness:.3f}",
        f"{result.utilisation:.2f}",
        f"{1e6 * result.placing_cpu_s / result.requests:.0f}",
    ]


def _figures(line: Sequence[str], result: ReplayResult) -> dict[str, object]:
    quantiles = [result.ttft_s[int(len(result.ttft_s) * q / 1000)] for q in range(1000)]
    return {**dict(zip(COLUMNS, line, strict=True)), "ttft_s": quantiles, "busy_s": list(result.busy_s)}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with Mooncake's conversation_ and synthetic_trace.jsonl.gz")
    parser.add_argument("--trace", nargs="+", default=list(TRACES), choices=TRACES)
    parser.add_argument("--workers", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--load", nargs="+", type=float, default=[0.7, 0.9])
    parser.add_argument(
        "--policy", nargs="+", default=list(POLICIES), help="policies; oracles must come first, for the ratios"
    )
    parser.add_argument("--requests", type=int, default=1 << 30, help="limit of requests per trace")
    parser.add_argument("--shape", choices=("disaggregated", "aggregated"), default="disaggregated")
    parser.add_argument(
        "--routers", type=int, default=1, help="number of routers; they get requests in rotation and share state"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="folder for plots (needs matplotlib)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
