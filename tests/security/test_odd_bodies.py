"""Bodies that are small and yet expensive, or that a later step could not handle, are refused as the client's error."""

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
async def test_a_document_that_is_nested_too_deeply_is_the_clients_error(rig: Rig, field: str) -> None:
    """orjson reads deeper documents than it writes, so that a deep schema used to be status 500."""
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


async def test_an_answer_to_detokenize_is_no_longer_than_the_context(rig: Rig, model: ServedModel) -> None:
    """A million ids take the event loop a third of a second."""
    async with aiohttp.ClientSession() as session:
        for count, status in ((model.context_tokens_max, 200), (model.context_tokens_max + 1, 400)):
            body = {"model": "tiny", "tokens": [5] * count}
            async with session.post(rig.url + "/detokenize", json=body) as response:
                assert response.status == status


async def send_chunks(rig: Rig, chunk: bytes, count: int) -> bytes:
    """Sends chunks, the last of them included, until the server answers. Returns the head and body of the answer."""
    connection = await Connection.open(rig.http_port)
    connection.writer.write(head_of(CHAT, Content_Type="application/json", Transfer_Encoding="chunked"))
    connection.writer.write(chunk * count + b"0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await connection.head()
        connection.writer.close()
        return head


@pytest.mark.parametrize("chunk", [b"1\r\n \r\n", b"1;" + b"e" * 1000 + b"\r\n \r\n"], ids=["tiny", "extensions"])
async def test_a_long_body_of_tiny_chunks_is_not_read(rig: Rig, chunk: bytes) -> None:
    """1.3 million chunks of a byte took 2.5 CPU-seconds of the event loop."""
    count = 4 * CHUNKING_FREE_BYTES * CHUNKING_MAX // len(chunk)
    assert (await send_chunks(rig, chunk, count)).startswith(b"HTTP/1.1 400")


async def test_a_short_body_may_come_in_tiny_chunks(rig: Rig) -> None:
    """It is read to its end: the error is that of its content."""
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
