"""The attacks: prepared bytes, the number of concurrent senders, and the maximum rate of each."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from bench.hostile.connection import ask, connected, grpc_call, http_head

CHAT = "/v1/chat/completions"
FLOOD_TOKENS = 64
TOKENIZE_PATH = "/tokenize"
PIPELINED = 16
UNREAD_S = 5.0
TOKENIZE = "/kvmesh.inference.v1.InferenceService/Tokenize"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The mesh under attack. `key` is that of the hostile tenant."""

    url: str
    grpc_address: str
    model: str
    key: str

    @property
    def http_address(self) -> str:
        return urlsplit(self.url).netloc

    def body(self, **more: Any) -> bytes:
        """Returns a chat request."""
        messages = [{"role": "user", "content": "Hello"}]
        return orjson.dumps({"model": self.model, "messages": messages, "max_tokens": 8, **more})


Step = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """`step` sends one request and returns its outcome. At most `width` run at a time, and at most `per_s` start per second in total."""

    step: Step
    width: int
    per_s: float


def bomb() -> bytes:
    """Returns 64 kB that decompress to 64 MB."""
    encoder = zlib.compressobj(9, wbits=31)
    return b"".join([*(encoder.compress(bytes(1 << 20)) for _ in range(64)), encoder.flush()])


def expensive_schema() -> dict[str, Any]:
    """Returns a schema of 3 000 integers with a range."""
    fields = {f"f{i}": {"type": "integer", "minimum": -(10**12) + i, "maximum": 10**15 + i} for i in range(3000)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def attacks(target: Target) -> Mapping[str, Attack]:
    """Returns the attacks by name."""

    def post(body: bytes, *, key: str, path: str = CHAT, **headers: str) -> Step:
        data = http_head(target.url, path, length=len(body), key=key, **headers) + body

        async def step() -> str:
            async with connected(target.http_address) as (reader, writer):
                return await ask(reader, writer, data)

        return step

    async def half_head() -> str:
        """Holds a connection with half a head until the server closes it."""
        async with connected(target.http_address) as (reader, writer):
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            return "closed" if await reader.read() is not None else ""

    def get(path: str) -> Step:
        head = f"GET {path} HTTP/1.1\r\nHost: {target.http_address}\r\n\r\n".encode()

        async def step() -> str:
            async with connected(target.http_address) as (reader, writer):
                return await ask(reader, writer, head)

        return step

    async def unread_answers() -> str:
        """Sends requests, reads nothing, and keeps the connection open."""
        async with connected(target.http_address) as (reader, writer):
            assert isinstance(writer.transport, asyncio.ReadTransport)
            writer.transport.pause_reading()
            writer.write(unread)
            await asyncio.sleep(UNREAD_S)
            return "left" if not reader.at_eof() else "closed"

    key = target.key
    packed, message = bomb(), bytes(8 << 20)
    lists = b'{"model":"bench","messages":[' + b"[]," * 2_600_000 + b"[]]}"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": expensive_schema()}}
    long_text = orjson.dumps({"model": target.model, "prompt": "one two three four five six seven eight " * 5000})
    text = orjson.dumps({"model": target.model, "prompt": "one two three four five six seven eight " * 200})
    form = b"\r\n" * (1 << 20)
    form_kind = {"Content_Type": "multipart/form-data; boundary=xxx"}
    unread = b"".join([http_head(target.url, TOKENIZE_PATH, length=len(text), key=key), text]) * PIPELINED
    return {
        "half-sent heads": Attack(step=half_head, width=100, per_s=20),
        "gzip bombs, wrong key": Attack(step=post(packed, key="wrong", Content_Encoding="gzip"), width=2, per_s=4),
        "gzip bombs, key": Attack(step=post(packed, key=key, Content_Encoding="gzip"), width=1, per_s=2),
        "2 MB bodies, wrong key": Attack(step=post(b"x" * (2 << 20), key="wrong"), width=2, per_s=4),
        "8 MB of []": Attack(step=post(lists, key=key), width=2, per_s=4),
        "expensive schemas": Attack(step=post(target.body(response_format=schema), key=key), width=1, per_s=2),
        "tokenise 200 kB": Attack(step=post(long_text, key=key, path=TOKENIZE_PATH), width=2, per_s=10),
        "tokenise 8 kB": Attack(step=post(text, key=key, path=TOKENIZE_PATH), width=2, per_s=20),
        "answers that nobody reads": Attack(step=unread_answers, width=20, per_s=4),
        "forms of empty lines": Attack(step=post(form, key=key, path="/v1/files", **form_kind), width=1, per_s=2),
        "metrics, no key": Attack(step=get("/metrics"), width=2, per_s=10),
        "unknown paths, no key": Attack(step=get("/" + "x" * 4000), width=2, per_s=20),
        "flood of one tenant": Attack(step=post(target.body(max_tokens=FLOOD_TOKENS), key=key), width=40, per_s=400),
        "foreign host": Attack(step=post(target.body(), key=key, Host="evil.example"), width=1, per_s=10),
        "gRPC messages, no key": Attack(
            step=lambda: grpc_call(target.grpc_address, TOKENIZE, message), width=1, per_s=2
        ),
    }
