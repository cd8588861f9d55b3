"""The HTTP response of a streamed answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from http import HTTPStatus

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.half_close import STREAM
from services.frontend.api.http.stream import EventEncoder, EventStream
from services.frontend.api.run import CLIENT_GONE
from services.frontend.pipeline.prepare import Prepared


class WrittenResponse(web.StreamResponse):
    """A response that is written to the transport already, so that aiohttp writes nothing."""

    def __init__(self, *, keeps_alive: bool) -> None:
        super().__init__()
        self._keeps_alive = keeps_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None: ...


async def stream_answer(
    exchange: Exchange,
    prepared: Sequence[Prepared],
    encoder: EventEncoder,
    *,
    run: Callable[[EventStream], Awaitable[None]],
    choices: int,
    is_detailed: bool = False,
) -> WrittenResponse:
    """Opens a stream, runs the requests with it as their sink, and writes the last events. Returns the response.

    Raises a failure before the first write; a later one becomes the last event. `is_detailed`: the events hold more than
    text, and their rate is limited (see EventPace).
    """
    request = exchange.request
    transport = request.transport
    if transport is None or transport.is_closing():
        raise asyncio.CancelledError("the client has disconnected")
    is_chunked = request.version >= (1, 1)
    stream = request[STREAM] = EventStream(
        transport,
        _head(exchange, is_chunked=is_chunked),
        encoder,
        choices=choices,
        is_chunked=is_chunked,
        tokens_max=prepared[0].generation.sampling.max_tokens,
        pace=exchange.pace if is_detailed else None,
        keep_alive_s=exchange.settings.keep_alive_s,
    )
    try:
        with exchange.pace.opened() if is_detailed else nullcontext():
            await run(stream)
        stream.finish(exchange.usage)
    except Exception as error:
        if not stream.has_begun:
            raise
        failure = error if isinstance(error, MeshError) else exchange.internal_error(error)
        exchange.code, exchange.reason = http_status(failure)[0], failure.reason
        # The response is complete, so the connection stays open: the client may have sent its next request already.
        stream.fail(failure)
    finally:
        stream.close()
    if not await stream.wait_sent(exchange.settings.stalled_client_timeout_s):
        exchange.code, exchange.reason = CLIENT_GONE, "client_stalled"
    return WrittenResponse(keeps_alive=is_chunked and bool(request.keep_alive))


def _head(exchange: Exchange, *, is_chunked: bool) -> bytes:
    """Returns the response's head. Header values were checked to be printable ASCII when they came in."""
    lines = [
        f"HTTP/1.1 200 {HTTPStatus.OK.phrase}",
        "Content-Type: text/event-stream; charset=utf-8",
        "Cache-Control: no-cache",
        # Proxies that buffer responses would undo streaming.
        "X-Accel-Buffering: no",
    ]
    lines += [f"{name}: {value}" for name, value in exchange.headers.items()]
    if not (is_chunked and exchange.request.keep_alive):
        lines.append("Connection: close")
    if is_chunked:
        lines.append("Transfer-Encoding: chunked")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
