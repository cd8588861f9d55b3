"""Runs requests whose answer is an event stream, and completes the HTTP response."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from http import HTTPStatus

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kvmesh.core import Usage
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_reader import Reading
from services.frontend.api.http.exchange import CLIENT_GONE, Exchange, internal_error
from services.frontend.api.http.half_close import STREAM
from services.frontend.api.http.stream import EventStream
from services.frontend.api.openai.chunks import Chunks
from services.frontend.api.run import run_all
from services.frontend.pipeline.prepare import Prepared


class WrittenResponse(web.StreamResponse):
    """A response that is written to the transport already, so that aiohttp writes nothing."""

    def __init__(self, *, keeps_alive: bool) -> None:
        super().__init__()
        self._keeps_alive = keeps_alive

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection takes another request."""
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Does nothing: the head is written."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: the end is written."""


async def stream_answer(
    exchange: Exchange,
    prepared: Sequence[Prepared],
    chunks: Chunks,
    choices: int,
    *,
    stream_type: type[EventStream] = EventStream,
    reading: Reading | None = None,
    on_answered: Callable[[Usage], Awaitable[None]] | None = None,
    is_detailed: bool = False,
) -> web.StreamResponse:
    """Runs the requests and writes their events. Raises a failure that happens before the first event.

    `on_answered` runs after the last token and before the last events. `is_detailed`: the events hold more than text, and
    their rate is limited (see EventPace).
    """
    request = exchange.request
    transport = request.transport
    if transport is None or transport.is_closing():
        raise asyncio.CancelledError("the client is gone")
    is_chunked = request.version >= (1, 1)
    stream = stream_type(
        transport,
        _head(exchange, is_chunked=is_chunked),
        chunks,
        choices=choices,
        is_chunked=is_chunked,
        buffer_bytes_max=exchange.settings.stream_buffer_bytes_max,
        tokens_max=prepared[0].generation.sampling.max_tokens,
        pace=exchange.pace if is_detailed else None,
    )
    request[STREAM] = stream
    keeps_alive = is_chunked and request.keep_alive
    keep_alive = _KeepAlive(stream, exchange.settings.keep_alive_s)
    try:
        with exchange.pace.opened() if is_detailed else nullcontext():
            await run_all(exchange, prepared, stream, reading)
        if on_answered is not None:
            await on_answered(exchange.usage)
        stream.close_well(exchange.usage)
    except Exception as error:
        if not stream.has_begun:
            raise
        failure = error if isinstance(error, MeshError) else internal_error(error, exchange.request_id)
        exchange.code, exchange.reason = http_status(failure)[0], failure.reason
        # The response is complete, so the connection takes the next request: a client may have sent one already, and would
        # lose its answer for another's failure.
        stream.close_failed(failure)
    finally:
        keep_alive.stop()
        stream.abandon()
    if not await stream.wait_sent(exchange.settings.stalled_client_timeout_s):
        exchange.code, exchange.reason = CLIENT_GONE, "client_stalled"
    return WrittenResponse(keeps_alive=keeps_alive)


class _KeepAlive:
    """Writes a comment to an idle stream every `interval_s` seconds; 0: never."""

    def __init__(self, stream: EventStream, interval_s: float) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    def _schedule(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._write)

    def _write(self) -> None:
        self._stream.keep_alive()
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _head(exchange: Exchange, *, is_chunked: bool) -> bytes:
    """The response's head. Header values are printable ASCII: they were checked where they came in."""
    lines = [
        f"HTTP/1.1 200 {HTTPStatus.OK.phrase}",
        "Content-Type: text/event-stream; charset=utf-8",
        "Cache-Control: no-cache",
        # Proxies that collect responses would undo streaming.
        "X-Accel-Buffering: no",
        *(f"{name}: {value}" for name, value in exchange.headers.items()),
        *(("Connection: close",) if not (is_chunked and exchange.request.keep_alive) else ()),
        *(("Transfer-Encoding: chunked",) if is_chunked else ()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
