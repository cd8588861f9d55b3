"""Load generator for any server: closed loop (a fixed number of requests in flight) or open loop (arrivals by rate or trace).

python -m bench.load --url http://127.0.0.1:8000 --model demo --concurrency 32 --requests 500 --isl 128 --osl 128
python -m bench.load --grpc 127.0.0.1:9000 --model demo --rate 50 --duration 20
python -m bench.load --url ... --model demo --trace conversation_trace.jsonl.gz --requests 500 --speed 10 --tokens-scale 0.05
"""

import argparse
import json
from collections.abc import Awaitable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from bench.figures import LoadReport
from bench.generated_trace import generate_trace
from bench.grpc_target import GrpcTarget
from bench.http_target import HttpTarget
from bench.loops import arrive, closed_loop, for_seconds, measure, open_loop, poisson
from bench.prompts import WORDS, PromptShape, make_prompts, one_token_words, trace_prompt
from bench.target import LoadRequest, LoadResult, Target
from kvmesh.core.whatif import RecordedRequest
from kvmesh.lifecycle import run
from services.whatif.traces import load_trace

GENERATED = "generated"
GENERATED_RATE_PER_S = 3.0


def shaped_requests(options: argparse.Namespace, words: Sequence[str]) -> Iterator[LoadRequest]:
    """Returns requests of one shape, limited by number or time."""
    shape = PromptShape(tokens=options.isl, prefix_groups=options.prefix_groups, prefix_share=options.prefix_share)
    prompts = make_prompts(shape, seed=options.seed, words=words)
    requests = (LoadRequest(prompt=prompt, output_tokens=options.osl) for prompt in prompts)
    return for_seconds(requests, options.duration) if options.duration else islice(requests, options.requests)


def trace_requests(options: argparse.Namespace, words: Sequence[str]) -> Iterator[tuple[LoadRequest, float]]:
    """Returns a trace's requests with their due times."""
    for request in _trace(options):
        load_request = LoadRequest(
            prompt=trace_prompt(request, tokens_scale=options.tokens_scale, words=words),
            output_tokens=max(1, round(request.output_tokens * options.tokens_scale)),
        )
        yield load_request, request.at_s / options.speed


def _trace(options: argparse.Namespace) -> Sequence[RecordedRequest]:
    if options.trace == GENERATED:
        return generate_trace(options.requests, rate_per_s=GENERATED_RATE_PER_S, seed=options.seed)
    return load_trace(Path(options.trace))[: options.requests]


def _loop(options: argparse.Namespace, target: Target) -> Awaitable[list[LoadResult]]:
    words = one_token_words(Path(options.tokenizer)) if options.tokenizer else WORDS
    if options.trace:
        return open_loop(target, arrive(trace_requests(options, words)))
    requests = shaped_requests(options, words)
    if options.rate:
        return open_loop(target, arrive(poisson(requests, options.rate, options.seed)))
    return closed_loop(target, requests, options.concurrency)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="OpenAI HTTP server, http://host:port")
    where.add_argument("--grpc", help="InferenceService, host:port")
    made.add_argument("--model", required=True)
    made.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    made.add_argument("--isl", type=int, default=128, help="words per prompt")
    made.add_argument("--osl", type=int, default=128, help="tokens per answer, exactly")
    made.add_argument("--tokenizer", help="model directory: use words that are one token each in its tokenizer")
    made.add_argument("--requests", type=int, default=100)
    made.add_argument("--duration", type=float, default=0.0, help="seconds; replaces --requests")
    made.add_argument("--concurrency", type=int, default=1, help="closed loop: requests in flight")
    made.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second, Poisson")
    made.add_argument("--trace", help=f"open loop: a Mooncake .jsonl or Azure .csv file, .gz or not, or '{GENERATED}'")
    made.add_argument("--speed", type=float, default=1.0, help="factor by which the trace runs faster")
    made.add_argument("--tokens-scale", type=float, default=1.0, help="factor for the trace's lengths")
    made.add_argument("--prefix-groups", type=int, default=0, help="number of common prefixes")
    made.add_argument("--prefix-share", type=float, default=0.5, help="share of a prompt that is a common prefix")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--timeout-s", type=float, default=120.0)
    made.add_argument(
        "--quick-acks",
        action="store_true",
        help="HTTP: acknowledge at once, which hides a server's Nagle delay",
    )
    made.add_argument(
        "--watch", action="append", default=[], metavar="NAME=PID", help="measure CPU and memory of a process tree"
    )
    return made


async def load(options: argparse.Namespace) -> LoadReport:
    is_chat = options.endpoint == "chat"
    target: Target
    if options.url:
        target = HttpTarget(
            options.url, options.model, is_chat=is_chat, timeout_s=options.timeout_s, quick_acks=options.quick_acks
        )
    else:
        target = GrpcTarget(options.grpc, options.model, is_chat=is_chat, timeout_s=options.timeout_s)
    watch = {name: int(pid) for name, _, pid in (entry.partition("=") for entry in options.watch)}
    try:
        return await measure(_loop(options, target), watch)
    finally:
        await target.aclose()


def main() -> None:
    """Prints the summary as JSON."""
    print(json.dumps(run(load(parser().parse_args())).summary(), indent=1))


if __name__ == "__main__":
    main()
