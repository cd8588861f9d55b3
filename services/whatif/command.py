"""`kvmesh simulate`: what a mesh would do under a load, in virtual time.

    kvmesh simulate --trace AzureLLMInferenceTrace_conv.csv.gz --prefill 4 --decode 2 --targets ttft=2,itl=0.05 --planner
    kvmesh simulate --rate 20 --prompt-tokens 1200 --output-tokens 200 --targets ttft=2,itl=0.05

Requests run through the router's own code and simulated workers. With --planner the planner's own code changes the pools, and a second line
shows the result. Pools that are not given are sized for the mean load. `kvmesh simulate faults --help`: a mesh with faults from seeds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvmesh.cli.output import Row, render_table
from kvmesh.core import PerformanceProfile
from kvmesh.core.engine_profile import read_engine_profile
from kvmesh.core.planning import Decision, Targets
from kvmesh.core.whatif import RecordedLoad, SimulationOutcome, SimulationRequest, SteadyLoad
from kvmesh.errors import InvalidRequestError, MeshError
from services.planner.decide.settings import DecideSettings
from services.whatif.placers import MODEL
from services.whatif.report import Run, report
from services.whatif.run import run_request
from services.whatif.traces import load_trace

COLUMNS = ("POOLS", "WITHIN", "GOODPUT/S", "TTFT P50", "P95", "P99", "ITL P50", "P95", "P99", "HITS", "HOURS", "COST")
TARGETS = ("ttft", "itl", "percentile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for invalid arguments."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["faults"]:
        # Imported here: the whole mesh takes as long to load as a simulation of a small load runs.
        from services.simulation.command import main as simulate_faults

        return simulate_faults(given[1:])
    options = _parser().parse_args(given)
    try:
        if options.request:
            return _answer_request()
        request = _request(options)
        outcomes = [_run(request, options)]
        if options.planner:
            outcomes.append(_run(replace(request, has_planner=True), options))
        if options.html:
            options.html.write_text(report("Simulation of a mesh", request.targets or Targets(model=MODEL), outcomes))
    except (MeshError, OSError, ValueError) as error:
        print(f"kvmesh simulate: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.encode([run.outcome for run in outcomes]).decode())
        return 0
    rows = [_row(run.name, run.outcome) for run in outcomes]
    print(render_table(COLUMNS, rows))
    print(_summary(outcomes[0].outcome))
    return 0


def _answer_request() -> int:
    """Reads a SimulationRequest as JSON from standard input; prints the outcome, or the error with its field."""
    try:
        outcome, _ = run_request(msgspec.json.decode(sys.stdin.buffer.read(), type=SimulationRequest))
    except InvalidRequestError as error:
        print(msgspec.json.encode({"error": error.message, "field": error.field}).decode())
        return 1
    print(msgspec.json.encode(outcome).decode())
    return 0


def _run(request: SimulationRequest, options: argparse.Namespace) -> Run:
    decide = DecideSettings(start_s=options.start, calm_s=options.start)
    decisions: list[Decision] = []

    def on_decision(decision: Decision) -> None:
        decisions.append(decision)
        if options.decisions:
            _print_decision(decision)

    outcome, result = run_request(request, decide=decide, on_decision=on_decision)
    name = outcome.shape.text
    changes = (
        f", planner ({result.starts} starts, {result.stops} stops, {result.flips} flips)" if request.has_planner else ""
    )
    return Run(name=name + changes, outcome=outcome, result=result, decisions=decisions)


def _request(options: argparse.Namespace) -> SimulationRequest:
    steady, recorded = None, None
    if options.trace is not None:
        trace = [each for each in load_trace(options.trace) if each.at_s / options.speed <= options.duration]
        if not trace:
            raise ValueError(f"{options.trace} has no request within {options.duration:g} s")
        recorded = RecordedLoad(requests=[replace(each, at_s=each.at_s / options.speed) for each in trace])
    elif options.rate is not None:
        steady = SteadyLoad(
            requests_per_s=options.rate,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            duration_s=min(options.duration, 3600.0),
        )
    else:
        raise ValueError("--trace or --rate is required")
    return SimulationRequest(
        model=MODEL,
        steady=steady,
        recorded=recorded,
        targets=parse_targets(options.targets),
        prefill_workers=options.prefill,
        decode_workers=options.decode,
        profile=_profile(options.profile),
    )


def parse_targets(text: str) -> Targets:
    """`ttft=2,itl=0.05,percentile=0.95`; times in seconds. Raises ValueError."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in TARGETS:
            raise ValueError(f"--targets: {name!r} is not one of {', '.join(TARGETS)}")
        values[name] = float(value)
        if values[name] <= 0 or (name == "percentile" and values[name] >= 1):
            raise ValueError(f"--targets: {name} is out of range: {value}")
    return Targets(
        model=MODEL,
        ttft_s=values.get("ttft"),
        itl_s=values.get("itl"),
        percentile=values.get("percentile", 0.95),
    )


def _profile(path: Path | None) -> PerformanceProfile | None:
    if path is None:
        return None
    text = path.read_bytes()
    try:
        if "version" in msgspec.json.decode(text, type=dict):
            return read_engine_profile(text, field="profile").fit
        return msgspec.json.decode(text, type=PerformanceProfile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None


def _row(name: str, outcome: SimulationOutcome) -> Row:
    return (
        name,
        f"{outcome.attainment:.1%}",
        f"{outcome.goodput_per_s:.2f}",
        *(f"{value:.3f} s" for value in (outcome.ttft_p50_s, outcome.ttft_p95_s, outcome.ttft_p99_s)),
        *(f"{1000 * value:.1f} ms" for value in (outcome.itl_p50_s, outcome.itl_p95_s, outcome.itl_p99_s)),
        f"{outcome.hit_rate:.1%}",
        f"{outcome.worker_hours:.2f}",
        f"{outcome.cost:.2f}",
    )


def _summary(outcome: SimulationOutcome) -> str:
    expected = outcome.expected
    if expected is None or expected.ttft_s is None or expected.itl_s is None:
        return "The formulas expect that these pools cannot serve the mean load."
    limit = f" The targets cannot be met: {expected.limit}." if expected.limit else ""
    return (
        f"{outcome.requests} requests. At the mean load the formulas expect {expected.attainment:.1%} within the targets, "
        f"TTFT {expected.ttft_s:.3f} s and ITL {1000 * expected.itl_s:.1f} ms at the targets' percentile.{limit}"
    )


def _print_decision(decision: Decision) -> None:
    what = f"{decision.action.value:<8} {decision.reason:<20} {decision.shape.text:<22} {decision.detail}"
    print(f"{decision.decided_at_s:8.0f} s  {what}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvmesh simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="Mooncake .jsonl[.gz] or Azure .csv[.gz]")
    parser.add_argument("--speed", type=_positive, default=1.0, help="replay the trace so many times as fast")
    parser.add_argument(
        "--duration", type=_positive, default=86_400.0, help="seconds of the load; at most 3600 with --rate"
    )
    parser.add_argument("--rate", type=_positive, help="requests per second, without a trace")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="mean prompt length, with --rate")
    parser.add_argument("--output-tokens", type=int, default=256, help="mean answer length, with --rate")
    parser.add_argument("--prefill", type=_count, help="prefill workers; without it sized for the mean load")
    parser.add_argument("--decode", type=_count, help="decode workers; without it sized for the mean load")
    parser.add_argument("--targets", default="ttft=2,itl=0.05", help="ttft=SECONDS,itl=SECONDS,percentile=SHARE")
    parser.add_argument(
        "--profile",
        type=Path,
        help="file of `kvmesh profile`, or JSON with a worker's coefficients; without it, about an H100",
    )
    parser.add_argument("--planner", action="store_true", help="also simulate with the planner")
    parser.add_argument("--start", type=_positive, default=60.0, help="seconds until a new worker serves")
    parser.add_argument("--decisions", action="store_true", help="print the planner's decisions")
    parser.add_argument("--html", type=Path, help="file for a report with plots; it needs nothing else")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--request", action="store_true", help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError("must be 0 to 1000")
    return value
