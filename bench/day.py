"""Replays a day of recorded traffic, faster than real time, on a mesh of processes with simulated engines.

python -m bench.day --traces DIR                     a day in eight minutes: every fifth request, lengths divided by 16
python -m bench.day --traces DIR --hours 1 --speed 12 --share 1 --tokens-scale 0.25

The trace is Azure's conversation trace of 2023, about an hour long, repeated until the day is full. Three things are scaled: time (`--speed`),
the share of requests that are sent (`--share`, chosen by a seed), and their lengths (`--tokens-scale`). Engine steps take no time. The load is
an open loop with at most `--in-flight` requests: a slow machine takes longer for its day, which the last line shows. Exits with 1 if a request
failed or a process's memory still grew in the second half of the day.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from bench.figures import percentiles
from bench.http_target import HttpTarget
from bench.loops import arrive, open_loop
from bench.mesh import Served, running_mesh
from bench.processes import own_rss_mib, process_use
from bench.prompts import one_token_words, trace_prompt
from bench.scenarios import FLAT_OUT
from bench.services import DEMO_MODEL
from bench.side_parts import roomy_model
from bench.table import render
from bench.target import LoadRequest, LoadResult, Target
from kvmesh.core.whatif import RecordedRequest
from kvmesh.lifecycle import run
from services.whatif.traces import load_trace

TRACE = "AzureLLMInferenceTrace_conv.csv.gz"
GENERATED_REQUESTS, GENERATED_RATE_PER_S = 20_000, 5.4
PROMPT_TOKENS_MEDIAN, OUTPUT_TOKENS_MEDIAN = 1000, 130
HOUR_S = 3600.0
ERRORS_SHOWN = 5
GROWTH_MIB_MAX, GROWTH_SHARE_MAX = 8.0, 0.05
"""Allowed growth in the second half, the larger of the two. Allows for allocator noise."""
HOUR_COLUMNS = ("hour", "requests", "errors", "in flight", "TTFT p50 ms", "p99", "resident MiB")
MEMORY_COLUMNS = ("process", "MiB at 25%", "at 50%", "at 75%", "at the end", "second half", "")


@dataclass(slots=True, kw_only=True)
class Hour:
    """One hour of trace time; a run replays it faster."""

    requests: int = 0
    errors: int = 0
    in_flight_max: int = 0
    ttft_s: list[float] = field(default_factory=list)
    rss_mib: Mapping[str, float] = field(default_factory=dict)

    def row(self, number: int) -> list[str]:
        ttft_ms = percentiles(self.ttft_s)
        used = f"{sum(self.rss_mib.values()):.0f}"
        times = (f"{ttft_ms.get(name, 0):.1f}" for name in ("p50", "p99"))
        return [str(number), str(self.requests), str(self.errors), str(self.in_flight_max), *times, used]


class Day(Target):
    """A target that counts requests per hour and sends them to another target."""

    def __init__(self, inner: Target, hours: int) -> None:
        self._inner = inner
        self._in_flight = 0
        self._nothing = LoadResult()
        self.hours = [Hour() for _ in range(hours)]
        self.now = 0
        self.took_s = 0.0
        self.error_samples: list[str] = []

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        """Sends a request and counts it in the hour in which it ends. Does not keep the results, because a day has too many."""
        self._in_flight += 1
        hour = self.hours[self.now]
        hour.in_flight_max = max(hour.in_flight_max, self._in_flight)
        try:
            # Measured from now on: time in the client's own queue does not count.
            result = await self._inner.send(request, time.perf_counter())
        finally:
            self._in_flight -= 1
        hour = self.hours[self.now]
        hour.requests += 1
        if result.error:
            hour.errors += 1
            if len(self.error_samples) < ERRORS_SHOWN:
                self.error_samples.append(result.error)
        else:
            hour.ttft_s.append(result.ttft_s)
        return self._nothing

    async def aclose(self) -> None:
        await self._inner.aclose()


def day_requests(
    trace: Sequence[RecordedRequest], *, day_s: float, share: float, seed: int
) -> Iterator[RecordedRequest]:
    """Repeats a share of the trace until the day is full. Yields requests with times in trace time."""
    rng = random.Random(seed)
    # The mean gap follows the last request before the trace repeats.
    round_s = trace[-1].at_s * (1 + 1 / len(trace))
    for number in count():
        for request in trace:
            at_s = number * round_s + request.at_s
            if at_s >= day_s:
                return
            if rng.random() < share:
                yield replace(request, at_s=at_s)


async def replay(served: Served, trace: Sequence[RecordedRequest], options: argparse.Namespace) -> Day:
    words = one_token_words(served.model_dir)
    day_s = options.hours * HOUR_S
    requests = day_requests(trace, day_s=day_s, share=options.share, seed=options.seed)
    arrivals = (
        (
            LoadRequest(
                prompt=trace_prompt(request, tokens_scale=options.tokens_scale, words=words),
                output_tokens=max(1, round(request.output_tokens * options.tokens_scale)),
            ),
            request.at_s / options.speed,
        )
        for request in requests
    )
    day = Day(HttpTarget(served.url, served.model, timeout_s=60.0), options.samples)
    try:
        began_s = time.perf_counter()
        await open_loop(
            day, _watched(arrive(arrivals), day, served, seconds=day_s / options.speed), in_flight_max=options.in_flight
        )
        day.took_s = time.perf_counter() - began_s
        day.hours[day.now].rss_mib = resident(served)
    finally:
        await day.aclose()
    return day


async def _watched(
    arrivals: AsyncIterator[tuple[LoadRequest, float]], day: Day, served: Served, *, seconds: float
) -> AsyncIterator[tuple[LoadRequest, float]]:
    """Yields the load. Changes the hour by trace time, and records memory at the end of each hour."""
    begin_s: float | None = None
    async for request, at_s in arrivals:
        begin_s = at_s if begin_s is None else begin_s
        while day.now < min(len(day.hours) - 1, int((at_s - begin_s) / seconds * len(day.hours))):
            hour = day.hours[day.now]
            hour.rss_mib = resident(served)
            day.now += 1
            _print_progress(f"{day.now} of {len(day.hours)}: {hour.requests} requests, {hour.errors} errors")
        yield request, at_s


def resident(served: Served) -> Mapping[str, float]:
    """Returns the resident memory of each process."""
    found = {name: process_use(pid).rss_mib for name, pid in served.watch.items()}
    return found | {name: own_rss_mib(pid) for name, pid in served.beside.items()}


def memory_rows(hours: Sequence[Hour]) -> list[list[str]]:
    """Returns one row per process; the last cell says whether memory stayed flat in the second half."""
    quarters = [hours[max(0, round(share * len(hours)) - 1)].rss_mib for share in (0.25, 0.5, 0.75, 1.0)]
    rows = []
    for name in quarters[-1]:
        sizes = [quarter.get(name, 0.0) for quarter in quarters]
        growth = sizes[3] - sizes[1]
        is_flat = growth <= max(GROWTH_MIB_MAX, GROWTH_SHARE_MAX * sizes[1])
        verdict = "flat" if is_flat else "grows"
        rows.append([name, *(f"{size:.0f}" for size in sizes), f"{growth:+.1f}", verdict])
    return rows


async def _main(options: argparse.Namespace) -> int:
    trace = _trace(options.traces)
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-model-") as folder:
        kind = replace(FLAT_OUT, model_dir=roomy_model(DEMO_MODEL, Path(folder)))
        async with running_mesh(kind) as served:
            day = await replay(served, trace, options)
    memory = memory_rows(day.hours)
    errors = sum(hour.errors for hour in day.hours)
    requests = sum(hour.requests for hour in day.hours)
    print(
        f"{requests} requests of {options.hours:g} hours, {errors} errors; time / {options.speed:g}, "
        f"{options.share:.0%} of the requests, lengths x {options.tokens_scale:g}\n"
    )
    print(render(HOUR_COLUMNS, [hour.row(number + 1) for number, hour in enumerate(day.hours)]), "\n")
    print(render(MEMORY_COLUMNS, memory))
    print(f"\nTook {day.took_s:.0f} s; {options.hours * HOUR_S / options.speed:.0f} s were planned.")
    for sample in day.error_samples:
        _print_progress(f"error: {sample}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        body = {"requests": requests, "errors": errors, "rss_mib": [dict(hour.rss_mib) for hour in day.hours]}
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    grows = any(row[-1] == "grows" for row in memory)
    return 1 if errors or not requests or (grows and not options.memory_may_grow) else 0


def _trace(folder: Path | None) -> list[RecordedRequest]:
    path = folder / TRACE if folder else None
    if path is not None and path.exists():
        return load_trace(path)
    _print_progress(f"no {TRACE}: uses a generated trace")
    return generated(GENERATED_REQUESTS, seed=1)


def generated(requests: int, *, seed: int) -> list[RecordedRequest]:
    """Generates an hour at Azure's rate with about its length quartiles, for machines without the file."""
    rng = random.Random(seed)
    at_s, made = 0.0, []
    for _ in range(requests):
        at_s += rng.expovariate(GENERATED_RATE_PER_S)
        prompt, answer = (
            rng.lognormvariate(math.log(PROMPT_TOKENS_MEDIAN), 0.9),
            rng.lognormvariate(math.log(OUTPUT_TOKENS_MEDIAN), 0.8),
        )
        made.append(
            RecordedRequest(
                at_s=at_s, prompt_tokens=min(8192, round(prompt) + 1), output_tokens=min(1000, round(answer) + 1)
            )
        )
    return made


def _print_progress(text: str) -> None:
    print(f"day: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder of {TRACE}; default: a generated trace")
    parser.add_argument("--hours", type=float, default=24.0, help="hours of traffic")
    parser.add_argument("--speed", type=float, default=180.0, help="factor by which the day runs faster")
    parser.add_argument("--share", type=float, default=0.2, help="share of the requests that are sent")
    parser.add_argument("--tokens-scale", type=float, default=1 / 16, help="factor for lengths of prompts and answers")
    parser.add_argument(
        "--in-flight", type=int, default=128, help="limit of requests in flight; further ones wait in the client"
    )
    parser.add_argument("--samples", type=int, default=24, help="rows of the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--memory-may-grow",
        action="store_true",
        help="ignore memory growth, for runs that are too short to fill bounded caches",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(_main(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
