"""The attacks, each a loop at a bounded rate against a mesh on this machine. They run in a process of their own."""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc.aio
import orjson

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HALF_HEADS = 100
FLOOD_WIDTH = 40
FLOOD_TOKENS = 64
TOKENISE_WIDTH = 2
TIMEOUT_S = 15.0
EXPECTED = (aiohttp.ClientError, grpc.aio.AioRpcError, OSError, TimeoutError, EOFError)
"""What happens to a client that is refused or cut off."""


def bomb() -> bytes:
    """64 kB that decompress to 64 MB."""
    encoder = zlib.compressobj(9, wbits=31)
    return b"".join([*(encoder.compress(bytes(1 << 20)) for _ in range(64)), encoder.flush()])


def expensive_schema() -> dict[str, Any]:
    """3 000 integers with a range."""
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i} for i in range(3000)}
    return {"type": "object", "properties": fields, "required": list(fields)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The mesh under attack. `key`: of the hostile tenant. `only`: runs only attacks whose names have this part."""

    url: str
    grpc_address: str
    model: str
    key: str
    seconds: float
    only: str = ""
    done: Counter[str] = field(default_factory=Counter)

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **more}


Step = Callable[[Target, aiohttp.ClientSession], Awaitable[str]]


async def post(
    target: Target, session: aiohttp.ClientSession, data: bytes, *, path: str = CHAT, key: str = "", **headers: str
) -> str:
    """Returns the status."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {**JSON, "Authorization": f"Bearer {key or 'wrong'}", **names}
    async with session.post(target.url + path, data=BytesIO(data), headers=sent) as response:
        await response.read()
        return str(response.status)


async def half_head(target: Target, _: aiohttp.ClientSession) -> str:
    """Holds a connection with half a head until the server closes it."""
    address = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        async with asyncio.timeout(TIMEOUT_S):
            return "closed" if await reader.read() is not None else ""
    finally:
        writer.close()


async def grpc_message(target: Target, _: aiohttp.ClientSession) -> str:
    """8 MB without a key."""
    options = [("grpc.max_send_message_length", 1 << 30)]
    async with grpc.aio.insecure_channel(target.grpc_address, options=options) as channel:
        call: Any = channel.unary_unary("/kvmesh.inference.v1.InferenceService/Tokenize")
        try:
            await call(bytes(8 << 20), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return "answered"


@cache
def attacks() -> Mapping[str, tuple[Step, int, float]]:
    """Name: what is done, by how many at a time, and the pause after each."""
    packed, long = bomb(), b"x" * (2 << 20)
    lists = b'{"model":"bench","messages":[' + b"[]," * 2_600_000 + b"[]]}"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": expensive_schema()}}
    text = "one two three four five six seven eight " * 5000

    def dumped(target: Target, **more: Any) -> bytes:
        return orjson.dumps(target.body(**more))

    return {
        "half-sent heads": (half_head, HALF_HEADS, 0.1),
        "gzip bombs, wrong key": (lambda t, s: post(t, s, packed, Content_Encoding="gzip"), 2, 0.5),
        "gzip bombs, key": (lambda t, s: post(t, s, packed, key=t.key, Content_Encoding="gzip"), 1, 0.5),
        "2 MB bodies, wrong key": (lambda t, s: post(t, s, long), 2, 0.5),
        "8 MB of []": (lambda t, s: post(t, s, lists, key=t.key), 2, 0.5),
        "expensive schemas": (lambda t, s: post(t, s, dumped(t, response_format=schema), key=t.key), 1, 0.5),
        "tokenise 200 kB": (
            lambda t, s: post(t, s, orjson.dumps({"model": t.model, "prompt": text}), path="/tokenize", key=t.key),
            TOKENISE_WIDTH,
            0.1,
        ),
        "flood of one tenant": (
            lambda t, s: post(t, s, dumped(t, max_tokens=FLOOD_TOKENS), key=t.key),
            FLOOD_WIDTH,
            0.0,
        ),
        "foreign host": (lambda t, s: post(t, s, dumped(t), key=t.key, Host="evil.example"), 1, 0.1),
        "gRPC messages, no key": (grpc_message, 1, 0.5),
    }


async def attack(target: Target) -> Counter[str]:
    """Runs all attacks. Returns how often each ended how."""
    ends_s = time.monotonic() + target.seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def repeat(name: str, step: Step, pause_s: float) -> None:
            while time.monotonic() < ends_s:
                outcome = "cut off"
                with suppress(*EXPECTED):
                    outcome = await step(target, session)
                target.done[f"{name}: {outcome}"] += 1
                # A refused flood must not become a busy loop of the attacker.
                await asyncio.sleep(max(pause_s, 0.0 if outcome == "200" else 0.05))

        tasks = [
            asyncio.create_task(repeat(name, step, pause_s))
            for name, (step, width, pause_s) in attacks().items()
            if target.only in name
            for _ in range(width)
        ]
        await asyncio.wait(tasks, timeout=target.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return target.done


def prepare_process() -> None:
    """Starts the attacking process: its imports and the bodies of the attacks take seconds."""
    attacks()


def attack_process(target: Target) -> Counter[str]:
    """The main function of the attacking process."""
    return asyncio.run(attack(target))
