"""Clients that ask for much and read nothing hold neither memory nor a handler for long."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings
from tests.patience import PATIENCE_S
from tests.security.rig import Connection, Rig, frontend, head_of

ANSWER_BYTES = 500_000
PIPELINED = 24
"""Answers that do not fit in the buffers of the kernel together."""
BODY = json.dumps({"model": "tiny", "tokens": [3] * ANSWER_BYTES}).encode()
REQUEST = head_of("/detokenize", Content_Type="application/json", Content_Length=str(len(BODY))) + BODY


@pytest.fixture
async def rig(model: ServedModel) -> AsyncIterator[Rig]:
    settings = FrontendSettings()
    http = replace(settings.http, stalled_client_timeout_s=0.5)
    model = replace(model, context_tokens_max=ANSWER_BYTES)
    async with frontend(model, settings=replace(settings, http=http)) as running:
        yield running


async def asking(rig: Rig) -> Connection:
    """A connection whose requests are sent, and that reads nothing."""
    connection = await Connection.open(rig.http_port)
    assert isinstance(connection.writer.transport, asyncio.ReadTransport)
    connection.writer.transport.pause_reading()
    for _ in range(PIPELINED):
        connection.writer.write(REQUEST)
    return connection


async def send_for_ever(connection: Connection) -> None:
    while True:
        connection.writer.write(b" ")
        await connection.writer.drain()
        await asyncio.sleep(0.05)


async def test_a_client_that_reads_nothing_is_disconnected(rig: Rig) -> None:
    """It gets a part of what it asked for. Without the limit the connection stays open for ever."""
    connection = await asking(rig)
    async with asyncio.timeout(PATIENCE_S):
        # What the client still sends meets a closed connection.
        with pytest.raises(ConnectionError):
            await send_for_ever(connection)


async def test_a_client_that_reads_slowly_gets_everything(rig: Rig) -> None:
    """The limit counts from the last byte that it took."""
    connection = await asking(rig)
    transport = connection.writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.resume_reading()
    async with asyncio.timeout(PATIENCE_S):
        for number in range(PIPELINED):
            head = await connection.head()
            assert head.startswith(b"HTTP/1.1 200"), (number, head)
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await connection.reader.readexactly(size)
            await asyncio.sleep(0.05)
