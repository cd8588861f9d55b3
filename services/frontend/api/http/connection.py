"""One connection of the HTTP server: limits for request heads, for bodies that no handler reads, and for answers that the client does not
read.

A head must be complete within `head_timeout_s`: of the first request from the time of the connection, of later ones from their first byte
that does not arrive with the request before. A head may have at most `HEAD_BYTES_MAX` bytes, because anybody can send heads, and the
parser keeps an incomplete head twice. A response that does not need the request's body, such as 401, does not wait for it: a short body
is discarded; otherwise the connection is closed.

A body in tiny chunks costs a hundred times the CPU time of its bytes. So a body is rejected if its framing takes more than `CHUNKING_MAX`
bytes of the connection per byte of the body.

A client that reads nothing of a waiting answer for `stalled_timeout_s` is disconnected. Otherwise it could keep the answer and its
handler in memory forever.
"""

import asyncio
from contextlib import suppress
from typing import Any

from aiohttp import web

from kvmesh.clock import stood_still
from services.frontend.api.http.half_close import HalfClosingHandler

HEAD_BYTES_MAX = 65_536
"""Bytes of a head that arrives in parts. Clients' heads have a few KiB, and 8192 connections with such heads take about 1 GiB."""
DISCARDED_BYTES_MAX = 262_144
"""Longest unread body after which a connection is kept. Discarding it costs less than another connection."""
DISCARD_S = 1.0
CLOSE_AFTER_S = 0.5
"""Time between the response and the close of a connection whose client still sends. An earlier reset could overtake the response."""
CHUNKING_MAX, CHUNKING_FREE_BYTES = 4, 65_536
"""A chunk of one byte needs six. Short bodies may come as they like."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HalfClosingHandler):
    """See the module."""

    __slots__ = (
        "_connections_max", "_has_bytes", "_head_bytes", "_head_timeout_s", "_head_timer", "_heads", "_stalled_timeout_s",
        "_stalled_timer", "_wire_bytes",
    )  # fmt: skip

    def __init__(
        self,
        manager: web.Server,
        *,
        head_timeout_s: float,
        stalled_timeout_s: float,
        connections_max: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(manager, **kwargs)
        self._stalled_timeout_s = stalled_timeout_s
        self._stalled_timer: asyncio.TimerHandle | None = None
        self._head_timeout_s = head_timeout_s
        self._connections_max = connections_max
        self._head_timer: asyncio.TimerHandle | None = None
        self._heads = 0
        self._has_bytes = False
        self._head_bytes = 0
        self._wire_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._manager is not None and len(self._manager.connections) > self._connections_max:
            self.force_close()
            return
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not taken what was written: the transport holds more than its limit."""
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        # Before the call of the base class, which sets both.
        was_between_requests = self._newest_body is None or self._newest_body.is_eof()
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._head_bytes = self._wire_bytes = 0
            self._stop_waiting()
        elif not data:
            # aiohttp's own call, after it has paused reading: nothing has arrived.
            return
        elif was_between_requests:
            self._has_bytes = True
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head(TOO_LARGE)
            elif self._head_timer is None:
                self._await_head()
        else:
            self._wire_bytes += len(data)
            self._check_chunking()

    def _check_chunking(self) -> None:
        body = self._newest_body
        if (
            body is not None
            and not body.is_eof()
            and body.exception() is None
            and self._wire_bytes > CHUNKING_FREE_BYTES + CHUNKING_MAX * body.total_bytes
        ):
            body.set_exception(web.RequestPayloadError("the chunks of the body are too small"))

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """Writes the response, and then discards the rest of the body or closes the connection."""
        content = request.content
        if content.is_eof():
            return await super().finish_response(request, resp, start_time)
        # A client that sent `Expect` may never send the body.
        length = request.content_length
        is_short = length is not None and length <= DISCARDED_BYTES_MAX and "Expect" not in request.headers
        if not is_short and not resp.prepared:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if is_short:
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_S):
                    while not content.is_eof():
                        await content.readany()
        if not content.is_eof():
            await self._close_unread()
        return finished

    async def _close_unread(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            # A close with unread data resets the connection, and the reset may reach the client before it has read the response (RFC 9112, 9.6).
            self.pause_reading()
            if transport.can_write_eof():
                transport.write_eof()
            await asyncio.sleep(CLOSE_AFTER_S)
        self.force_close()

    def _watch_client(self) -> None:
        if (transport := self.transport) is not None:
            size, wait_s = transport.get_write_buffer_size(), self._stalled_timeout_s
            due_s = self._loop.time() + wait_s
            self._stalled_timer = self._loop.call_later(wait_s, self._on_stalled_timeout, size, due_s)

    def _stop_watching(self) -> None:
        if self._stalled_timer is not None:
            self._stalled_timer.cancel()
            self._stalled_timer = None

    def _on_stalled_timeout(self, size: int, due_s: float) -> None:
        """Ends the connection unless the client has read something. Data that was added since can only hide that for one more timeout."""
        self._stalled_timer = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() < size or stood_still(due_s=due_s, now_s=self._loop.time()):
            self._watch_client()
        else:
            transport.abort()

    def _await_head(self) -> None:
        self._heads, wait_s = self._request_count, self._head_timeout_s
        self._head_timer = self._loop.call_later(wait_s, self._on_head_timeout, self._loop.time() + wait_s)

    def _stop_waiting(self) -> None:
        self._has_bytes = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self, due_s: float) -> None:
        self._head_timer = None
        if self._force_close or self._close or self.transport is None or self._request_count != self._heads:
            return
        # aiohttp sets `_waiter` while no request is served, and keeps requests that wait for their turn in `_messages`.
        is_idle = self._waiter is not None and not self._waiter.done() and not self._messages
        if not is_idle or stood_still(due_s=due_s, now_s=self._loop.time()):
            # A request before it is being served, or this process was paused and the rest of the head waits in the socket.
            self._await_head()
            return
        if self._has_bytes:
            self._refuse_head(TIMED_OUT)
        else:
            self.force_close()

    def _refuse_head(self, response: bytes) -> None:
        """Answers and closes the connection. A client that still sends may see the reset only."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(response)
        self.force_close()
