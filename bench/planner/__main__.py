"""`python -m bench.planner --traces DIR`: compares goodput and worker-hours of policies that size pools, in simulations.

Every policy gets the same requests, workers and router.
* `oracle` knows all arrivals: the cheapest plan that dynamic programming finds for 95 % of the requests (`optimal.py`), verified in the
  simulation. Its workers take as long to start as those of other policies, and its pools have at least one worker.
* `best constant`: the cheapest pools that never change and keep the targets.
* `true load`: pools that the planner's formulas want for the true load of each 20 s, ready when the load arrives.
* `present` knows the load of the present 20 s exactly, and nothing of later ones: an upper bound for policies that do not know the future.
* `static peak` and `static mean`: pools that the formulas want for the highest and for the mean load.

Policies that know the load also know its hit rate, which is measured in a run of the same load (`with_hit_rate`).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from bench.planner.dynamo import DynamoFormulas
from bench.planner.loads import scaled, shapes
from bench.planner.optimal import Planned, cheapest, cheapest_constant, decode_pool, least_missed, prefill_pool
from bench.planner.others import Present, Thresholds, TrueLoad, demand_of_requests
from bench.planner.reversals import reversals
from bench.table import render
from kvmesh.core.planning import Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.decide.settings import DecideSettings
from services.planner.sizing.size import Sizer
from services.planner.sizing.speed import Speed
from services.whatif.fleet import FleetTimes
from services.whatif.placers import MODEL
from services.whatif.planning import PlannerPolicy
from services.whatif.result import WhatIfResult, percentile
from services.whatif.simulation import PoolPolicy, Simulation, SimulationSettings, Static
from services.whatif.traces import load_trace, make_load

SHAPES = ("constant", "step", "ramp", "spike", "diurnal")
RECORDED = {"azure-conv": "AzureLLMInferenceTrace_conv.csv.gz", "azure-code": "AzureLLMInferenceTrace_code.csv.gz",
            "mooncake": "conversation_trace.jsonl.gz"}  # fmt: skip
LOADS = (*SHAPES, *RECORDED)
POLICIES = (
    "oracle",
    "best constant",
    "true load",
    "present",
    "planner",
    "thresholds",
    "dynamo formulas",
    "static peak",
    "static mean",
)
COLUMNS = ("load", "policy", "within targets", "after 300 s", "worker-hours", "of oracle", "TTFT p95 s", "ITL p95 ms", "flips", "starts",
           "reversals")  # fmt: skip
START_S = 30.0
SPEED = Speed()
DECIDE = DecideSettings(start_s=START_S, calm_s=START_S)
ATTAINMENT = 0.95
SHARES = (0.94, 0.952, 0.96, 0.97, 0.98, 0.99)
"""Shares of requests that plans of the oracle aim at, until the simulation reaches ATTAINMENT."""
DECODE_MISSES = 0.1
"""Share of the oracle's missed requests that the decode pool may cause."""
WORKERS_MAX = 20
SURGE = 2.0
"""`present` multiplies the load by this for some time after the load has grown, to clear the backlog."""
INTERVAL_S = 10.0
"""The interval of the loads in plots."""
LEARNING_S = 300.0
"""Policies start without a history. Requests after this time are also counted separately."""
HIT_RATE_RUNS, HIT_RATE_ERROR = 5, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A load and its targets. `hit_rate` is the one that policies with knowledge of the load assume."""

    name: str
    trace: Sequence[RecordedRequest]
    targets: Targets
    hit_rate: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and prints a table."""
    options = _options(arguments)
    figures = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for name in options.load:
        case = make_case(name, options)
        if case is None:
            print(f"{name}: no such trace in {options.traces}", file=sys.stderr)
            continue
        if options.policy or options.bounds:
            case = with_hit_rate(case)
        if options.bounds:
            print(f"{name}: least share missed", *_bounds(case), sep="\n  ")
            continue
        for policy in options.policy:
            found = _figures(name, policy, run_policy(case, policy))
            known = [each for each in figures if (each["load"], each["policy"]) != (name, policy)]
            figures = sorted([*known, found], key=_order)
            if options.json:
                options.json.write_text(json.dumps(figures))
    if options.bounds:
        return 0
    print(render(COLUMNS, [_line(each, figures) for each in figures]))
    if options.plot:
        from bench.planner.plots import plot

        plot(figures, options.plot)
    return 0


def _bounds(case: Case) -> Sequence[str]:
    """Returns the least share that a policy misses, by the number of prefill workers that it has when the worst overload begins."""
    return [
        f"{workers} prefill workers: {share:.1%}"
        for workers in range(1, WORKERS_MAX + 1)
        if (
            share := least_missed(
                case.trace, case.targets, SPEED, hit_rate=case.hit_rate, workers=workers, start_s=START_S
            )
        )
    ]


def _order(figures: Mapping[str, Any]) -> tuple[int, int]:
    return LOADS.index(figures["load"]), POLICIES.index(figures["policy"])


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
        # Its prompts have 12 000 tokens on average and take more than a second each.
        targets = replace(targets, ttft_s=15.0)
        return Case(name=name, trace=scaled(load_trace(path), 1.0, options.duration), targets=targets)
    return Case(name=name, trace=scaled(load_trace(path), 4.0, options.duration), targets=targets)


def with_hit_rate(case: Case) -> Case:
    """Returns the case with the hit rate that the simulation measures with the pools of `true load`.

    These pools depend on the hit rate, so runs repeat until both agree.
    """
    if not any(request.block_ids for request in case.trace):
        return case
    for _ in range(HIT_RATE_RUNS):
        found = run_policy(case, "true load").hit_rate
        is_same = abs(found - case.hit_rate) < HIT_RATE_ERROR
        case = replace(case, hit_rate=found)
        if is_same:
            break
    return case


def run_policy(case: Case, name: str) -> WhatIfResult:
    if name == "oracle":
        return find_oracle(case)
    if name == "best constant":
        return find_constant(case)
    true_load = TrueLoad(case.trace, case.targets, SPEED, start_s=START_S, hit_rate=case.hit_rate)
    shape = true_load.first
    policy: PoolPolicy = Static()
    if name == "true load":
        policy = true_load
    elif name == "present":
        policy = Present(case.trace, case.targets, SPEED, surge=SURGE, start_s=START_S, hit_rate=case.hit_rate)
    elif name == "planner":
        policy = PlannerPolicy(targets=case.targets, speed=SPEED, settings=DECIDE)
    elif name == "thresholds":
        policy = Thresholds(case.targets, SPEED)
    elif name == "dynamo formulas":
        policy = DynamoFormulas(case.targets, SPEED)
    elif name == "static peak":
        shape = true_load.peak()
    else:
        mean = demand_of_requests(case.trace, case.trace[-1].at_s, case.hit_rate)
        shape = Sizer(speed=SPEED, targets=case.targets).size(mean).shape
    return _run(case, name, shape, policy=policy)


def find_oracle(case: Case) -> WhatIfResult:
    """Returns the first plan that keeps the targets in the simulation, of the plans that keep them in the model; if none does, the last one."""
    requests = len(case.trace)
    prefill = prefill_pool(case.trace, case.targets, SPEED, hit_rate=case.hit_rate, workers_max=WORKERS_MAX)
    decode = decode_pool(case.trace, case.targets, SPEED, workers_max=WORKERS_MAX)
    for share in SHARES:
        for_decode = 1 - DECODE_MISSES * (1 - share)
        plan = Planned(
            prefill=cheapest(prefill, share=share / for_decode, requests=requests, start_s=START_S),
            decode=cheapest(decode, share=for_decode, requests=requests, start_s=START_S),
            start_s=START_S,
        )
        result = _run(case, f"oracle {share:g}", plan.first, policy=plan)
        if result.attainment >= ATTAINMENT:
            break
    return result


def find_constant(case: Case) -> WhatIfResult:
    """Returns the cheapest pools that never change and keep the targets. The oracle's model narrows the search."""
    requests = len(case.trace)
    prefill = prefill_pool(case.trace, case.targets, SPEED, hit_rate=case.hit_rate, workers_max=WORKERS_MAX)
    decode = decode_pool(case.trace, case.targets, SPEED, workers_max=WORKERS_MAX)
    shape = Shape(
        prefill_workers=cheapest_constant(prefill, share=ATTAINMENT, requests=requests),
        decode_workers=cheapest_constant(decode, share=1 - DECODE_MISSES * (1 - ATTAINMENT), requests=requests),
    )
    while True:
        result = _run(case, f"constant {shape.prefill_workers} + {shape.decode_workers}", shape, policy=Static())
        if result.attainment >= ATTAINMENT or shape.prefill_workers >= WORKERS_MAX:
            return result
        shape = replace(shape, prefill_workers=shape.prefill_workers + 1)


def _run(case: Case, name: str, shape: Shape, *, policy: PoolPolicy) -> WhatIfResult:
    began = process_time()
    settings = SimulationSettings(shape=shape, targets=case.targets, times=FleetTimes(start_s=START_S))
    result = Simulation(settings, policy).run(case.trace)
    print(_short(load=case.name, policy=name, result=result, cpu_s=process_time() - began), file=sys.stderr, flush=True)
    return result


def _short(*, load: str, policy: str, result: WhatIfResult, cpu_s: float) -> str:
    return (
        f"{load} {policy}: {result.attainment:.4f} of {result.requests} within targets, "
        f"{result.worker_hours_total:.2f} worker-hours, hit rate {result.hit_rate:.2f} ({cpu_s:.0f} s CPU)"
    )


def _line(run: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    hours = next(
        (each["worker_hours"] for each in figures if (each["load"], each["policy"]) == (run["load"], "oracle")), 0
    )
    return (
        run["load"],
        run["policy"],
        f"{run['attainment']:.3f}",
        f"{run['after_learning']:.3f}",
        f"{run['worker_hours']:.2f}",
        f"{run['worker_hours'] / hours:.2f}" if hours else "",
        f"{run['ttft_p95_s']:.2f}",
        f"{1000 * run['itl_p95_s']:.1f}",
        str(run["flips"]),
        str(run["starts"]),
        str(run["reversals"]),
    )


def after(result: WhatIfResult, began_s: float) -> float:
    """Returns the share of requests within the targets among those that arrived after `began_s`."""
    later = [is_good for at_s, is_good in result.within if at_s >= began_s]
    return sum(later) / len(later) if later else 0.0


def _figures(load: str, policy: str, result: WhatIfResult) -> Mapping[str, Any]:
    return {
        "load": load,
        "policy": policy,
        "attainment": result.attainment,
        "after_learning": after(result, LEARNING_S),
        "reversals": reversals(result),
        "flips": result.flips,
        "starts": result.starts,
        "ttft_p95_s": percentile(result.ttft_s, 0.95),
        "itl_p95_s": percentile(result.itl_s, 0.95),
        "worker_hours": result.worker_hours_total,
        "shapes": [(at_s, shape.prefill_workers, shape.decode_workers) for at_s, shape in result.shapes],
        "duration_s": result.within[-1][0],
        "requests": result.requests,
        "arrivals": _per_interval(result),
    }


def _per_interval(result: WhatIfResult) -> Sequence[float]:
    """Returns the requests per second of each interval of INTERVAL_S."""
    counts = [0] * (int(result.within[-1][0] / INTERVAL_S) + 1)
    for at_s, _ in result.within:
        counts[int(at_s / INTERVAL_S)] += 1
    return [count / INTERVAL_S for count in counts]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.planner", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder with the traces of Azure (2023) and Mooncake")
    parser.add_argument("--load", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument(
        "--policy",
        nargs="*",
        default=POLICIES,
        choices=POLICIES,
        help="none: only the table and plots of --json",
    )
    parser.add_argument("--duration", type=float, default=1200.0, help="seconds of each load")
    parser.add_argument(
        "--json",
        type=Path,
        help="file for all figures; keeps figures that this run does not measure",
    )
    parser.add_argument(
        "--bounds",
        action="store_true",
        help="no simulation: print the least share that policies without knowledge of the future miss",
    )
    parser.add_argument("--plot", type=Path, help="folder for plots (needs matplotlib)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
