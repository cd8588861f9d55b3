"""Sends chat requests to a mesh over HTTP and prints the answers while they stream."""

import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from kvmesh.errors import UnauthenticatedError, UnavailableError

TOTAL_S = 300.0


def key_headers(api_key: str) -> dict[str, str]:
    """Returns the Authorization header; no header for an empty key."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


async def check_answered(response: aiohttp.ClientResponse) -> None:
    """Raises UnauthenticatedError if the key is missing or wrong, and UnavailableError with the server's message for other errors."""
    if response.status == 401:
        raise UnauthenticatedError("the mesh requires an API key: set KVMESH_API_KEY")
    if response.status != 200:
        raise UnavailableError(f"the mesh answered {response.status}: {await response.text()}")


async def answer_pieces(
    url: str, model: str, messages: Sequence[Mapping[str, Any]], *, api_key: str = "", **options: Any
) -> AsyncIterator[Mapping[str, Any]]:
    """Yields the chunks of one streamed chat completion, including the one with its usage. Raises as `check_answered` does."""
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    timeout = aiohttp.ClientTimeout(total=TOTAL_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=key_headers(api_key)) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        await check_answered(response)
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise UnavailableError(f"the answer was interrupted: {chunk['error']['message']}")
                yield chunk


async def stream_answer(
    url: str, *, model: str, messages: Sequence[Mapping[str, Any]], since_s: float | None = None, **options: Any
) -> str:
    """Prints an answer while it streams, and returns it. With `since_s` prints the time to first token on stderr."""
    parts: list[str] = []
    async for chunk in answer_pieces(url, model=model, messages=messages, **options):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and since_s is not None and not any(parts):
                print(f"kvmesh: first token after {time.monotonic() - since_s:.2f} s", file=sys.stderr, flush=True)
            parts.append(text)
            print(text, end="", flush=True)
    print(flush=True)
    return "".join(parts)
