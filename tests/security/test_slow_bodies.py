"""Bodies that stop, or that arrive one byte at a time, end with the body time-out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest

from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings
from tests.patience import PATIENCE_S
from tests.security.rig import CHAT, Connection, Rig, frontend, head_of

HEAD = head_of(CHAT, Content_Type="application/json", Content_Length="1000000")
GAP_S = 0.05


@pytest.fixture
async def rig(model: ServedModel) -> AsyncIterator[Rig]:
    settings = FrontendSettings()
    async with frontend(model, settings=replace(settings, http=replace(settings.http, body_timeout_s=0.5))) as running:
        yield running


async def trickle(connection: Connection) -> None:
    with suppress(ConnectionError):
        while True:
            connection.writer.write(b"[")
            await connection.writer.drain()
            await asyncio.sleep(GAP_S)


@pytest.mark.parametrize("trickles", [False, True], ids=["stops", "trickles"])
async def test_a_slow_body_times_out(rig: Rig, trickles: bool) -> None:
    """The client gets an error with the reason, and the connection closes even while bytes arrive."""
    connection = await Connection.open(rig.http_port)
    connection.writer.write(HEAD + b"[")
    trickling = asyncio.create_task(trickle(connection)) if trickles else None
    try:
        async with asyncio.timeout(PATIENCE_S):
            head = await connection.head()
            assert head.startswith(b"HTTP/1.1 4"), head
            assert b"body_timeout" in await connection.rest()
    finally:
        if trickling is not None:
            trickling.cancel()
            await asyncio.wait({trickling})
