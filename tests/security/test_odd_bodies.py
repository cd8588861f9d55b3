"""Small bodies that are expensive, or that a later step cannot handle, are refused with a client error."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from services.frontend.api.http.connection import CHUNKING_FREE_BYTES, CHUNKING_MAX
from services.frontend.api.request_body import NESTING_MAX
from services.frontend.models import ServedModel
from tests.patience import PATIENCE_S
from tests.security.rig import CHAT, Connection, Rig, frontend, head_of

CHAT_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture
async def rig(model: ServedModel) -> AsyncIterator[Rig]:
    async with frontend(model) as running:
        yield running


def nested(depth: int) -> dict[str, Any]:
    """Returns a schema with `2 * depth` objects inside each other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("field", ["response_format", "tools", "chat_template_kwargs"])
async def test_a_deeply_nested_document_is_a_client_error(rig: Rig, field: str) -> None:
    """A schema that orjson can read but not write again, because it is nested too deeply, is a client error."""
    schema = nested(NESTING_MAX)
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "chat_template_kwargs": schema,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(rig.url + CHAT, json={**CHAT_BODY, field: fields[field]}) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_json")


async def test_detokenize_is_limited_to_the_context_length(rig: Rig, model: ServedModel) -> None:
    """Detokenising more tokens than the context length is refused. A million ids take the event loop a third of a second."""
    async with aiohttp.ClientSession() as session:
        for count, status in ((model.context_tokens_max, 200), (model.context_tokens_max + 1, 400)):
            body = {"model": "tiny", "tokens": [5] * count}
            async with session.post(rig.url + "/detokenize", json=body) as response:
                assert response.status == status


async def send_chunks(rig: Rig, chunk: bytes, count: int) -> bytes:
    """Sends `count` chunks and the final one. Returns the head of the answer."""
    connection = await Connection.open(rig.http_port)
    connection.writer.write(head_of(CHAT, Content_Type="application/json", Transfer_Encoding="chunked"))
    connection.writer.write(chunk * count + b"0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await connection.head()
        connection.writer.close()
        return head


@pytest.mark.parametrize("chunk", [b"1\r\n \r\n", b"1;" + b"e" * 1000 + b"\r\n \r\n"], ids=["tiny", "extensions"])
async def test_a_long_body_of_tiny_chunks_is_not_read(rig: Rig, chunk: bytes) -> None:
    """A body of many tiny chunks is refused. 1.3 million chunks of a byte took 2.5 CPU-seconds of the event loop."""
    count = 4 * CHUNKING_FREE_BYTES * CHUNKING_MAX // len(chunk)
    assert (await send_chunks(rig, chunk, count)).startswith(b"HTTP/1.1 400")


async def test_a_short_body_may_come_in_tiny_chunks(rig: Rig) -> None:
    """A short body in tiny chunks is read to its end: the error is that of its content."""
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in b'{"model":"tiny","messages":[],"max_tokens":1}')
    connection = await Connection.open(rig.http_port)
    connection.writer.write(head_of(CHAT, Content_Type="application/json", Transfer_Encoding="chunked"))
    connection.writer.write(chunks + b"0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await connection.head()
        assert head.startswith(b"HTTP/1.1 400"), head
        length = int(next(line for line in head.lower().splitlines() if line.startswith(b"content-length")).split()[1])
        assert b"messages" in await connection.reader.readexactly(length)
    connection.writer.close()
