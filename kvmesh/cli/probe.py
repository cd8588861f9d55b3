"""Requests of `kvmesh doctor` over OpenAI's HTTP API: token counts, greedy answers, output tokens per second."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from kvmesh.errors import UnavailableError

REQUEST_TIMEOUT_S = 300.0
MEASUREMENT_LIMIT_S = 60.0
"""Time limit of a measurement. The default one takes some seconds; a slow machine completes fewer requests."""
WORDS = (
    "the quick brown fox jumps over a lazy dog while seven engines compute and nobody waits for them to end ".split()
)


def sentences(number: int, words: int) -> str:
    """Returns a text. Texts of different numbers have no common prefix."""
    return " ".join([f"Text {number}:", *(WORDS[(number + 7 * at) % len(WORDS)] for at in range(words))])


async def call(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request. Raises UnavailableError with the server's message."""
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise UnavailableError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        answer: dict[str, Any] = await response.json()
        return answer


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S))


async def tokenise(url: str, model: str, texts: Sequence[str]) -> list[list[int]]:
    async with session() as client:
        return [(await call(client, f"{url}/tokenize", {"model": model, "prompt": text}))["tokens"] for text in texts]


async def greedy(*, url: str, model: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Returns the greedy tokens after each prompt, one prompt at a time."""
    answers = []
    async with session() as client:
        for prompt in prompts:
            body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            answer = await call(client, f"{url}/v1/completions", {**body, "return_token_ids": True})
            answers.append(list(answer["choices"][0]["token_ids"]))
    return answers


async def tokens_per_s(
    url: str,
    model: str,
    *,
    requests: int,
    concurrency: int,
    prompt_words: int,
    tokens: int,
    first: int,
    limit_s: float = MEASUREMENT_LIMIT_S,
) -> float:
    """Output tokens per second of requests of one size, `concurrency` at a time, after a round that warms up.

    Prompts are numbered from `first`, so that no two runs share one. After `limit_s` no further request is sent.
    """
    numbers = iter(range(first + concurrency, first + concurrency + requests))
    async with session() as client:

        async def ask(number: int) -> int:
            body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            prompt = sentences(number, words=prompt_words)
            answer = await call(client, f"{url}/v1/completions", {**body, "prompt": prompt})
            return int(answer["usage"]["completion_tokens"])

        async def ask_in_turn() -> int:
            total = 0
            for number in numbers:
                total += await ask(number)
                if time.monotonic() - began_s >= limit_s:
                    break
            return total

        await asyncio.gather(*(ask(first + number) for number in range(concurrency)))
        began_s = time.monotonic()
        counts = await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
        return sum(counts) / (time.monotonic() - began_s)
