"""The server closes connections that never complete the head of a request."""

import asyncio
import json

from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings, HttpSettings
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import BODY, Connection, frontend, head_of

SETTINGS = FrontendSettings(http=HttpSettings(head_timeout_s=0.3))


async def test_half_sent_heads_and_silent_connections_are_closed(model: ServedModel) -> None:
    """Half-sent heads get 408. Connections that sent nothing are closed without a response."""
    async with frontend(model, settings=SETTINGS) as rig:
        opened = []
        for number in range(100):
            opened.append(connection := await Connection.open(rig.http_port))
            if number < 50:
                # At once: the time-out counts from the connection, and opening all of them may take longer.
                connection.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        async with asyncio.timeout(PATIENCE_S):
            answers = [await connection.rest() for connection in opened]
        assert all(b" 408 " in answer for answer in answers[:50])
        assert answers[50:] == [b""] * 50


async def test_a_head_that_arrives_byte_by_byte_times_out(model: ServedModel) -> None:
    """A byte does not restart the time-out."""
    async with frontend(model, settings=SETTINGS) as rig, asyncio.timeout(PATIENCE_S):
        connection = await Connection.open(rig.http_port)
        ended = asyncio.create_task(connection.rest())
        while not ended.done():
            connection.writer.write(b"G")
            await asyncio.wait({ended}, timeout=0.05)


async def test_the_second_head_of_a_connection_is_limited_too(model: ServedModel) -> None:
    """The head time-out applies to a half-sent second head, but not to an idle connection."""
    async with frontend(model, settings=SETTINGS) as rig, asyncio.timeout(PATIENCE_S):
        connection = await Connection.open(rig.http_port)
        for _ in range(2):
            connection.writer.write(head_of("/version", method="GET"))
            head = await connection.head()
            await connection.reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            await asyncio.sleep(0.7)
        connection.writer.write(b"GET /vers")
        assert b" 408 " in await connection.rest()


async def test_a_connection_that_has_served_a_body_may_be_idle(model: ServedModel) -> None:
    """An idle connection stays open after a request with a body. A 408 on it would become the answer to the client's next request."""
    data = json.dumps(BODY).encode()
    async with frontend(model, settings=SETTINGS) as rig, asyncio.timeout(PATIENCE_S):
        connection = await Connection.open(rig.http_port)
        for _ in range(2):
            connection.writer.write(head_of(Content_Type="application/json", Content_Length=str(len(data))) + data)
            head = await connection.head()
            assert b" 200 " in head
            await connection.reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            await asyncio.sleep(0.7)


async def test_a_slow_answer_is_not_subject_to_the_head_timeout(model: ServedModel) -> None:
    """The head time-out does not apply while an answer is generated, even if half of the next head has arrived.

    Half a head that arrives together with the request is not noticed; the idle time-out ends it.
    """
    mesh = FakeMesh(answer=lambda _: [3, 4, 2], step_s=0.4)
    data = json.dumps(BODY).encode()
    async with frontend(model, settings=SETTINGS, mesh=mesh) as rig, asyncio.timeout(PATIENCE_S):
        connection = await Connection.open(rig.http_port)
        connection.writer.write(head_of(Content_Type="application/json", Content_Length=str(len(data))) + data)
        await asyncio.sleep(0.1)
        connection.writer.write(b"GET /ver")
        head = await connection.head()
        assert b" 200 " in head
        answer = await connection.reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
        assert b" 408 " in await connection.rest()


async def test_more_connections_than_allowed_are_closed(model: ServedModel) -> None:
    settings = FrontendSettings(http=HttpSettings(connections_max=3))
    async with frontend(model, settings=settings) as rig, asyncio.timeout(PATIENCE_S):
        kept = [await Connection.open(rig.http_port) for _ in range(3)]
        for connection in kept:
            connection.writer.write(head_of("/live", method="GET"))
            assert b" 200 " in await connection.head()
        assert await (await Connection.open(rig.http_port)).rest() == b""


async def test_a_large_head_is_refused_before_it_is_complete(model: ServedModel) -> None:
    """The server refuses a large head before it is complete: 8 000 connections with a megabyte each used 16 GB for ten seconds.

    A head with many cookies is allowed.
    """
    settings = FrontendSettings(http=HttpSettings(head_timeout_s=3600))
    lines = [b"X-%03d: " % number + b"a" * 8000 + b"\r\n" for number in range(120)]
    first = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    async with frontend(model, settings=settings) as rig, asyncio.timeout(PATIENCE_S):
        for after_another in (False, True):
            connection = await Connection.open(rig.http_port)
            if after_another:
                connection.writer.write(head_of("/live", method="GET"))
                await connection.head()
            connection.writer.write(first + b"".join(lines))
            # The connection ends, with 431 unless the reset overtakes the response.
            await connection.rest()
        connection = await Connection.open(rig.http_port)
        for part in (first, *lines[:7], b"\r\n"):
            connection.writer.write(part)
            await connection.writer.drain()
            await asyncio.sleep(0)
        assert (await connection.head()).startswith(b"HTTP/1.1 200")
