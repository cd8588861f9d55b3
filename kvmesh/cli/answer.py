"""Asks a mesh over its HTTP API and prints the answer as it comes."""

import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from kvmesh.errors import UnavailableError

TOTAL_S = 300.0


async def answer_pieces(
    url: str, model: str, messages: Sequence[Mapping[str, Any]], **options: Any
) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of one streamed chat completion, usage included. UnavailableError tells what the server said."""
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    timeout = aiohttp.ClientTimeout(total=TOTAL_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise UnavailableError(f"the mesh answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise UnavailableError(f"the answer broke off: {chunk['error']['message']}")
                yield chunk


async def stream_answer(
    url: str, model: str, messages: Sequence[Mapping[str, Any]], since_s: float | None = None, **options: Any
) -> str:
    """Prints an answer as it comes and gives it back. With `since_s` it tells on stderr when the first token came."""
    parts: list[str] = []
    async for chunk in answer_pieces(url, model, messages, **options):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and since_s is not None and not any(parts):
                print(f"kvmesh: first token after {time.monotonic() - since_s:.2f} s", file=sys.stderr, flush=True)
            parts.append(text)
            print(text, end="", flush=True)
    print(flush=True)
    return "".join(parts)
