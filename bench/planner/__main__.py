"""`python -m bench.planner --traces DIR`: goodput and worker-hours of ways to size pools, in simulations.

Every policy gets the same requests, workers and router. `oracle` knows all arrivals, and is the cheapest of a family of plans that keeps the
targets for 95 % of the requests. `static peak` and `static mean` are pools for the highest and for the mean load.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from bench.planner.dynamo import DynamoFormulas
from bench.planner.others import Oracle, Thresholds, demand_of_requests
from bench.table import render
from kvmesh.core.planning import Shape, Targets
from services.planner.decide.settings import DecideSettings
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from services.whatif.fleet import FleetTimes
from services.whatif.loads import make_load, scaled, shapes
from services.whatif.placers import MODEL
from services.whatif.planning import PlannerPolicy
from services.whatif.result import Result, percentile
from services.whatif.simulation import PoolPolicy, Simulation, SimulationSettings, Static
from services.whatif.traces import TraceRequest, load_trace

SHAPES = ("constant", "step", "ramp", "spike", "diurnal")
RECORDED = {"azure-conv": "AzureLLMInferenceTrace_conv.csv.gz", "azure-code": "AzureLLMInferenceTrace_code.csv.gz",
            "mooncake": "conversation_trace.jsonl.gz"}  # fmt: skip
POLICIES = ("oracle", "planner", "planner, no flips", "thresholds", "dynamo formulas", "static peak", "static mean")
COLUMNS = ("load", "policy", "within targets", "worker-hours", "of oracle", "TTFT p95 s", "ITL p95 ms", "flips", "starts",
           "reversals")  # fmt: skip
START_S = 30.0
SPEED = Speed()
DECIDE = DecideSettings(start_s=START_S)
ATTAINMENT = 0.95
FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load and its targets. `hit_rate` is what the oracle expects."""

    name: str
    trace: Sequence[TraceRequest]
    targets: Targets
    hit_rate: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and prints a table."""
    options = _options(arguments)
    lines: list[Sequence[str]] = []
    figures: list[Mapping[str, Any]] = []
    for name in options.load:
        case = make_case(name, options)
        if case is None:
            print(f"{name}: no such trace in {options.traces}", file=sys.stderr)
            continue
        results = run_case(case, options.policy)
        hours = results["oracle"].worker_hours_total if "oracle" in results else 0.0
        for policy, result in results.items():
            lines.append(_line(case.name, policy, result, hours))
            figures.append(_figures(case.name, policy, result))
    print(render(COLUMNS, lines))
    if options.json:
        options.json.write_text(json.dumps(figures))
    if options.plot:
        from bench.planner.plots import plot

        plot(figures, options.plot)
    return 0


def make_case(name: str, options: argparse.Namespace) -> Case | None:
    targets = Targets(model=MODEL, ttft_s=2.0, itl_s=0.05, percentile=ATTAINMENT)
    if name in SHAPES:
        rate = shapes(options.duration, 8.0, 24.0)[name]
        trace = make_load(rate, peak=24.0, duration_s=options.duration, prompt_tokens=1200, output_tokens=200)
        return Case(name=name, trace=trace, targets=targets)
    path = options.traces / RECORDED[name] if options.traces else None
    if path is None or not path.exists():
        return None
    if name == "mooncake":
        # Its prompts have 12 000 tokens on average, and take more than a second each.
        targets = replace(targets, ttft_s=15.0)
        return Case(name=name, trace=scaled(load_trace(path), 1.0, options.duration), targets=targets, hit_rate=0.3)
    return Case(name=name, trace=scaled(load_trace(path), 4.0, options.duration), targets=targets)


def run_case(case: Case, policies: Sequence[str]) -> Mapping[str, Result]:
    oracle, oracle_result = find_oracle(case)
    first = oracle.first
    mean = demand_of_requests(case.trace, case.trace[-1].at_s, case.hit_rate)
    static = Sizer(speed=SPEED, targets=case.targets).size(mean).shape
    makers: Mapping[str, Callable[[], tuple[Shape, PoolPolicy]]] = {
        "planner": lambda: (first, PlannerPolicy(case.targets, SPEED, DECIDE)),
        "planner, no flips": lambda: (first, PlannerPolicy(case.targets, SPEED, replace(DECIDE, flips=False))),
        "thresholds": lambda: (first, Thresholds(case.targets, SPEED)),
        "dynamo formulas": lambda: (first, DynamoFormulas(case.targets, SPEED)),
        "static peak": lambda: (oracle.peak(), Static()),
        "static mean": lambda: (static, Static()),
    }
    results = {"oracle": oracle_result} if "oracle" in policies else {}
    for name in policies:
        if name in makers:
            began = process_time()
            shape, policy = makers[name]()
            results[name] = _run(case, shape, policy)
            print(_short(case.name, name, results[name], process_time() - began), file=sys.stderr, flush=True)
    return results


def find_oracle(case: Case) -> tuple[Oracle, Result]:
    """The smallest factor that keeps the targets."""
    result: Result | None = None
    oracle: Oracle | None = None
    for factor in FACTORS:
        oracle = Oracle(case.trace, case.targets, SPEED, factor=factor, start_s=START_S, hit_rate=case.hit_rate)
        began = process_time()
        result = _run(case, oracle.first, oracle)
        print(_short(case.name, f"oracle {factor:g}", result, process_time() - began), file=sys.stderr, flush=True)
        if result.attainment >= ATTAINMENT:
            break
    assert result is not None
    assert oracle is not None
    return oracle, result


def _run(case: Case, shape: Shape, policy: PoolPolicy) -> Result:
    settings = SimulationSettings(shape=shape, targets=case.targets, times=FleetTimes(start_s=START_S))
    return Simulation(settings, policy).run(case.trace)


def _short(load: str, policy: str, result: Result, cpu_s: float) -> str:
    return (
        f"{load} {policy}: {result.attainment:.4f} of {result.requests} within targets, "
        f"{result.worker_hours_total:.2f} worker-hours, hit rate {result.hit_rate:.2f} ({cpu_s:.0f} s CPU)"
    )


def _line(load: str, policy: str, result: Result, oracle_hours: float) -> Sequence[str]:
    return (
        load,
        policy,
        f"{result.attainment:.3f}",
        f"{result.worker_hours_total:.2f}",
        f"{result.worker_hours_total / oracle_hours:.2f}" if oracle_hours else "",
        f"{percentile(result.ttft_s, 0.95):.2f}",
        f"{1000 * percentile(result.itl_s, 0.95):.1f}",
        str(result.flips),
        str(result.starts),
        str(result.reversals),
    )


def _figures(load: str, policy: str, result: Result) -> Mapping[str, Any]:
    return {
        "load": load,
        "policy": policy,
        "attainment": result.attainment,
        "worker_hours": result.worker_hours_total,
        "shapes": [(at_s, shape.prefill_workers, shape.decode_workers) for at_s, shape in result.shapes],
        "duration_s": result.within[-1][0],
        "requests": result.requests,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with the traces of Azure (2023) and Mooncake")
    parser.add_argument("--load", nargs="+", default=[*SHAPES, *RECORDED], choices=[*SHAPES, *RECORDED])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--duration", type=float, default=1200.0, help="seconds of each load")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="folder for plots (needs matplotlib)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
