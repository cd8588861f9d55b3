"""Load generator: closed loop (a number in flight) or open loop (arrivals by rate or trace), against any Target.

python -m bench.load --url http://127.0.0.1:8000 --model demo --concurrency 32 --requests 500 --isl 128 --osl 128
python -m bench.load --grpc 127.0.0.1:9000 --model demo --rate 50 --duration 20
python -m bench.load --url ... --trace shared/traces/conversation_trace.jsonl.gz --speed 10 --tokens-scale 0.05
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.grpc_target import GrpcTarget
from bench.http_target import HttpTarget
from bench.processes import process_use
from bench.prompts import PromptShape, make_prompts, trace_prompt
from bench.target import LoadRequest, LoadResult, Target
from bench.traces import load_trace

DISTINCT_PROMPTS_MAX = 4000
IN_FLIGHT_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Everything measured in one run."""

    results: Sequence[LoadResult]
    wall_s: float
    client_cpu_s: float
    cpu_s: Mapping[str, float]
    rss_mib: Mapping[str, float]

    def summary(self) -> dict[str, Any]:
        """Rates, percentiles in milliseconds, CPU-seconds per 1 000 streamed tokens and per request."""
        good = [result for result in self.results if not result.error]
        bad = [result for result in self.results if result.error]
        tokens = sum(result.output_tokens for result in good)
        return {
            "requests": len(good),
            "errors": len(bad),
            "error_sample": bad[0].error if bad else "",
            "wall_s": self.wall_s,
            "requests_per_s": len(good) / self.wall_s,
            "tokens_per_s": tokens / self.wall_s,
            "prompt_tokens_mean": _mean([result.prompt_tokens for result in good]),
            "cached_tokens_mean": _mean([result.cached_tokens for result in good]),
            "chunks_per_request": _mean([result.chunks for result in good]),
            "ttft_ms": percentiles([result.ttft_s for result in good]),
            "total_ms": percentiles([result.total_s for result in good]),
            "gap_ms": percentiles([gap for result in good for gap in result.gaps_s]),
            "cpu_s_per_1k_tokens": {name: 1000 * cpu / max(1, tokens) for name, cpu in self.cpu_s.items()},
            "cpu_ms_per_request": {name: 1000 * cpu / max(1, len(good)) for name, cpu in self.cpu_s.items()},
            "rss_mib": dict(self.rss_mib),
            "client_cpu_s_per_1k_tokens": 1000 * self.client_cpu_s / max(1, tokens),
        }


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 (nearest rank) and mean, in milliseconds; empty when there are no values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    picked = {
        name: 1000 * ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] for name, share in ranks.items()
    }
    return {**picked, "mean": 1000 * sum(ordered) / len(ordered)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


async def closed_loop(target: Target, requests: Iterator[LoadRequest], concurrency: int) -> list[LoadResult]:
    """`concurrency` senders, each with one request in flight, until the requests end."""
    results: list[LoadResult] = []

    async def sender() -> None:
        for request in requests:
            results.append(await target.send(request, time.perf_counter()))  # noqa: PERF401 (it grows as they end)

    await asyncio.gather(*(sender() for _ in range(concurrency)))
    return results


async def open_loop(target: Target, arrivals: AsyncIterator[tuple[LoadRequest, float]]) -> list[LoadResult]:
    """One task per arrival, whatever is still in flight, at most IN_FLIGHT_MAX; times count from the intended arrival."""
    results: list[LoadResult] = []
    room = asyncio.Semaphore(IN_FLIGHT_MAX)

    async def send(request: LoadRequest, at_s: float) -> None:
        try:
            results.append(await target.send(request, at_s))
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        async for request, at_s in arrivals:
            await room.acquire()
            group.create_task(send(request, at_s))
    return results


async def arrive(requests: Iterator[tuple[LoadRequest, float]]) -> AsyncIterator[tuple[LoadRequest, float]]:
    """Each request at its offset in seconds from now."""
    start_s = time.perf_counter()
    for request, offset_s in requests:
        await asyncio.sleep(max(0.0, start_s + offset_s - time.perf_counter()))
        yield request, start_s + offset_s


def poisson(requests: Iterator[LoadRequest], rate_per_s: float, seed: int) -> Iterator[tuple[LoadRequest, float]]:
    """Exponential gaps."""
    rng = random.Random(seed)
    offset_s = 0.0
    for request in requests:
        offset_s += rng.expovariate(rate_per_s)
        yield request, offset_s


async def measure(target: Target, run: Any, watch: Mapping[str, int]) -> LoadReport:
    """Runs a loop and takes CPU and memory of the watched process trees around it."""
    before = {name: process_use(pid) for name, pid in watch.items()}
    client_before, start_s = time.process_time(), time.perf_counter()
    results = await run
    wall_s = time.perf_counter() - start_s
    after = {name: process_use(pid) for name, pid in watch.items()}
    return LoadReport(
        results=results,
        wall_s=wall_s,
        client_cpu_s=time.process_time() - client_before,
        cpu_s={name: after[name].cpu_s - before[name].cpu_s for name in watch},
        rss_mib={name: after[name].rss_mib for name in watch},
    )


def _requests(options: argparse.Namespace) -> Iterator[LoadRequest]:
    shape = PromptShape(tokens=options.isl, prefix_groups=options.prefix_groups, prefix_share=options.prefix_share)
    prompts = make_prompts(shape, min(options.requests, DISTINCT_PROMPTS_MAX), seed=options.seed)
    return (LoadRequest(prompt=prompts[i % len(prompts)], output_tokens=options.osl) for i in range(options.requests))


def _loop(options: argparse.Namespace, target: Target) -> Any:
    if options.trace:
        trace = load_trace(Path(options.trace))[: options.requests]
        timed = (
            (
                LoadRequest(
                    prompt=trace_prompt(request, tokens_scale=options.tokens_scale),
                    output_tokens=max(1, round(request.output_tokens * options.tokens_scale)),
                ),
                request.at_s / options.speed,
            )
            for request in trace
        )
        return open_loop(target, arrive(timed))
    if options.rate:
        return open_loop(target, arrive(poisson(_requests(options), options.rate, options.seed)))
    return closed_loop(target, _requests(options), options.concurrency)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="OpenAI HTTP server, http://host:port")
    where.add_argument("--grpc", help="InferenceService, host:port")
    parser.add_argument("--model", required=True)
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--isl", type=int, default=128, help="words per prompt, one token each in most tokenizers")
    parser.add_argument("--osl", type=int, default=128, help="tokens per answer, exactly")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=1, help="closed loop: requests in flight")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second, Poisson")
    parser.add_argument("--trace", help="open loop: a Mooncake .jsonl or Azure .csv file, .gz or not")
    parser.add_argument("--speed", type=float, default=1.0, help="the trace's time runs this much faster")
    parser.add_argument("--tokens-scale", type=float, default=1.0, help="the trace's lengths are multiplied by this")
    parser.add_argument("--prefix-groups", type=int, default=0)
    parser.add_argument("--prefix-share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument(
        "--watch", action="append", default=[], metavar="NAME=PID", help="take CPU and memory of a tree"
    )
    return parser


async def _main(options: argparse.Namespace) -> LoadReport:
    is_chat = options.endpoint == "chat"
    target: Target
    if options.url:
        target = HttpTarget(options.url, options.model, is_chat=is_chat, timeout_s=options.timeout_s)
    else:
        target = GrpcTarget(options.grpc, options.model, is_chat=is_chat, timeout_s=options.timeout_s)
    watch = {name: int(pid) for name, _, pid in (entry.partition("=") for entry in options.watch)}
    try:
        return await measure(target, _loop(options, target), watch)
    finally:
        await target.aclose()


def main() -> None:
    """Prints the summary as JSON."""
    report = asyncio.run(_main(_parser().parse_args()))
    print(json.dumps(report.summary(), indent=1))


if __name__ == "__main__":
    main()
