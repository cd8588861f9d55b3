"""Measures what a long prompt costs the frontend before its placement, in one process.

python -m bench.prompt_cost --tokens 8000

Prints microseconds per prompt token of each step, and how long each step blocks the event loop, measured by a task that wakes every millisecond.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.figures import percentiles
from bench.prompts import one_token_words
from bench.services import DEMO_MODEL
from bench.table import render
from kvmesh.clock import SystemClock
from kvmesh.core import SamplingParams
from kvmesh.kv.blocks import block_hashes
from kvmesh.lifecycle import run
from services.frontend.access.caller import ANYBODY
from services.frontend.models import ServedModel
from services.frontend.pipeline.prepare import hashes_of, prepare, tokens_of
from services.frontend.pipeline.request import Conversation, Request
from services.frontend.text.text_model import TextModel, load_text_model

ROUNDS = 15
TICK_S = 0.001
BLOCK_TOKENS = 16
TURN_WORDS = 200
CONVERSATIONS = 32
REMEMBERED_CHARACTERS = 2_000_000


def best_us(function: Callable[[], object]) -> float:
    """Returns the time of the fastest of a few calls, because the machine is shared."""
    found = float("inf")
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        function()
        found = min(found, time.perf_counter() - begin_s)
    return 1e6 * found


def conversation(words: Sequence[str], tokens: int, seed: int) -> Conversation:
    """Returns turns of equal length with about `tokens` tokens in total."""
    rng = random.Random(seed)
    turns = max(1, tokens // TURN_WORDS)
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": " ".join(rng.choices(words, k=TURN_WORDS))} for i in range(turns)]
    return Conversation(messages=messages)


def steps(asked: Conversation, model: TextModel, reference: TextModel) -> list[list[str]]:
    """Returns one row per step."""
    assert model.template is not None
    text, template = model.template.render(asked), model.template
    token_ids = model.tokenise(text, adds_special_tokens=False)
    model.tokenise_prompt(text)
    found = {
        "template": lambda: template.render(asked),
        "tokenise, reference library": lambda: reference.tokenise(text, adds_special_tokens=False),
        "tokenise, fastokens": lambda: model.tokenise(text, adds_special_tokens=False),
        "tokenise, all turns but the last cached": lambda: model.tokenise_prompt(text),
        "tokenise, reference library, all turns but the last cached": lambda: reference.tokenise_prompt(text),
        "hash blocks": lambda: block_hashes(token_ids, BLOCK_TOKENS),
    }
    reference.tokenise_prompt(text)
    return [
        [name, f"{(cost := best_us(function)) / 1000:.3f}", f"{cost / len(token_ids):.4f}"]
        for name, function in found.items()
    ]


async def loop_delays(model: TextModel, words: Sequence[str], tokens: int, *, seconds: float) -> list[str]:
    """Prepares prompts one after the other. Returns how late a task runs that wakes every millisecond."""
    served = ServedModel(
        name="demo", text=model, context_tokens_max=10**6, vocabulary_size=10**6, block_size_tokens=BLOCK_TOKENS,
        eos_token_ids=frozenset(), features=frozenset(),
    )  # fmt: skip
    asked = [conversation(words, tokens, seed) for seed in range(CONVERSATIONS)]
    late_s: list[float] = []
    end_s = time.perf_counter() + seconds
    prompts = 0

    async def tick() -> None:
        while (now_s := time.perf_counter()) < end_s:
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - now_s - TICK_S)

    ticking = asyncio.create_task(tick())
    while time.perf_counter() < end_s:
        # The event-loop iteration between two requests, which the socket causes in production.
        await asyncio.sleep(0)
        request = Request(
            request_id=str(prompts), model="demo", prompt=asked[prompts % len(asked)], sampling=SamplingParams(max_tokens=1)
        )  # fmt: skip
        token_ids = await tokens_of(request, served)
        hashes = await hashes_of(token_ids, request, served)
        prepare(request, served, token_ids, hashes=hashes, features=(), caller=ANYBODY, attempt_timeout_s=1.0)
        prompts += 1
    await ticking
    found = percentiles(late_s)
    return [str(tokens), str(prompts), *(f"{found[name]:.2f}" for name in ("p50", "p99")), f"{1000 * max(late_s):.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    options = parser.parse_args(argv)
    words = one_token_words(options.model)
    clock = SystemClock()
    model, reference = (
        load_text_model(options.model, clock, is_fast=is_fast, cached_characters_max=REMEMBERED_CHARACTERS)
        for is_fast in (True, False)
    )
    asked = conversation(words, options.tokens, 1)
    print(render(("step", "ms", "us per token"), steps(asked, model, reference)), "\n")
    lines = []
    for name, kind in (("fastokens", True), ("reference library", False)):
        unremembering = load_text_model(options.model, clock, is_fast=kind)
        lines += [
            [name, *run(loop_delays(unremembering, words, tokens, seconds=options.seconds))]
            for tokens in (512, options.tokens)
        ]
    print(render(("tokenizer", "tokens", "prompts", "loop late by ms p50", "p99", "most"), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
