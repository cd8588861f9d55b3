"""`kvmesh chat`: a conversation in the terminal. An empty line or Ctrl-D ends it, Ctrl-C stops an answer, `/new` starts over."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvmesh.cli.answer import check_answered, key_headers, stream_answer
from kvmesh.cli.state import read_state
from kvmesh.errors import MeshError
from kvmesh.settings import SettingsError, load, setting

HISTORY_MESSAGES_MAX = 200


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Whom to talk to."""

    url: str = setting("", "address of the frontend, http://host:port; empty: the mesh that `kvmesh up` started here")
    model: str = setting("", "model to ask; empty: the first one that is served")
    system: str = setting("", "system message; empty: none")
    api_key: str = setting("", "key to ask with, where the frontend wants one", secret=True)


async def _models(url: str, api_key: str) -> list[str]:
    async with (
        aiohttp.ClientSession(headers=key_headers(api_key)) as session,
        session.get(f"{url}/v1/models") as response,
    ):
        await check_answered(response)
        return [entry["id"] for entry in (await response.json())["data"]]


def _chat(settings: ChatSettings, url: str) -> int:
    """Reads lines in the main thread, where Ctrl-C reaches them; a loop runs only while an answer comes."""
    model, api_key = settings.model, settings.api_key
    if not model:
        models = asyncio.run(_models(url, api_key))
        if not models:
            print("kvmesh: the mesh serves no model yet", file=sys.stderr)
            return 1
        model = models[0]
    start = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = list(start)
    print(f"talking to {model} at {url}; an empty line ends, /new starts over", file=sys.stderr)
    while line := _read_line():
        if line == "/new":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = asyncio.run(stream_answer(url, model=model, messages=messages, api_key=api_key))
            messages.append({"role": "assistant", "content": answer})
        except KeyboardInterrupt:
            print("\nkvmesh: stopped", file=sys.stderr)
            messages.pop()
        except MeshError as error:
            print(f"kvmesh: {error.message}", file=sys.stderr)
            messages.pop()
        messages = messages[-HISTORY_MESSAGES_MAX:]
    return 0


def _read_line() -> str:
    """A line from the person; empty at the end of input."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def main(argv: Sequence[str]) -> int:
    try:
        settings = load(ChatSettings, argv=argv, program="kvmesh chat", description=__doc__ or "")
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    state = read_state()
    url = settings.url or (state.url if state else "")
    if not url:
        print("kvmesh: no mesh runs here; start one with `kvmesh up` or give --url", file=sys.stderr)
        return 1
    try:
        return _chat(settings, url.rstrip("/"))
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"kvmesh: {url} cannot be reached: {error}", file=sys.stderr)
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
    return 1
