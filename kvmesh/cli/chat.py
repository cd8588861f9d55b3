"""`kvmesh chat`: a conversation in the terminal. `/help` lists its commands."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvmesh.cli.answer import check_answered, key_headers, stream_answer
from kvmesh.cli.state import find_mesh
from kvmesh.errors import MeshError
from kvmesh.network.causes import connection_cause
from kvmesh.settings import SettingsError, load, setting

HISTORY_MESSAGES_MAX = 200
HELP = """/new       start over: the model forgets the conversation
/help      show this list
Ctrl-C     stop an answer
an empty line or Ctrl-D ends the chat"""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The mesh, the model and the key of a conversation."""

    mesh: str = setting("", "name of a mesh that `kvmesh up` runs here; needed where there are several")
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
    """Reads lines in the main thread, so that Ctrl-C interrupts them. An event loop runs only during an answer."""
    model, api_key = settings.model, settings.api_key
    if not model:
        models = asyncio.run(_models(url, api_key=api_key))
        if not models:
            print("kvmesh: the mesh serves no model yet", file=sys.stderr)
            return 1
        model = models[0]
    start = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = list(start)
    print(f"talking to {model} at {url}; /help lists commands", file=sys.stderr)
    while line := _read_line():
        if line == "/help":
            print(HELP, file=sys.stderr)
            continue
        if line.startswith("/") and line != "/new":
            print(f"kvmesh: no such command: {line}; /help lists commands", file=sys.stderr)
            continue
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
    """Reads a line from the terminal. Returns an empty string at the end of input."""
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
    url = settings.url
    try:
        url = url or find_mesh(settings.mesh, otherwise="--url").url
        url = url if "://" in url else f"http://{url}"
        return _chat(settings, url.rstrip("/"))
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"kvmesh: {url} cannot be reached: {connection_cause(error)}", file=sys.stderr)
    except MeshError as error:
        print(f"kvmesh: {error.message}", file=sys.stderr)
    return 1
