"""One connection of the HTTP server: limits on its heads, and bodies that no handler has read.

A head must be complete within `head_timeout_s`: of the first request from the time of the connection, of later ones from their first
byte. A response that was made without the request's body, such as 401, does not wait for that body: a short one is discarded, and
after any other the connection is closed.
"""

import asyncio
from contextlib import suppress
from typing import Any

from aiohttp import web

from kvmesh.clock import stood_still
from services.frontend.api.http.half_close import HalfClosingHandler

DISCARDED_BYTES_MAX = 262_144
"""Longest unread body after which a connection is kept. Discarding it costs less than another connection."""
DISCARD_S = 1.0
CLOSE_AFTER_S = 0.5
"""Time between the response and the close of a connection whose client still sends. An earlier reset could overtake the response."""
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HalfClosingHandler):
    """See the module."""

    __slots__ = ("_connections_max", "_has_bytes", "_head_timeout_s", "_head_timer", "_heads")

    def __init__(self, manager: web.Server, *, head_timeout_s: float, connections_max: int, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._connections_max = connections_max
        self._head_timer: asyncio.TimerHandle | None = None
        self._heads = 0
        self._has_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._manager is not None and len(self._manager.connections) > self._connections_max:
            self.force_close()
            return
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_between_requests = self._newest_body is None or self._newest_body.is_eof()
        heads = self._request_count
        super().data_received(data)
        if self._request_count != heads:
            self._stop_waiting()
        elif was_between_requests:
            self._has_bytes = True
            if self._head_timer is None:
                self._await_head()

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """Writes the response, and then discards the rest of the body or closes the connection."""
        content = request.content
        if content.is_eof():
            return await super().finish_response(request, resp, start_time)
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
            self.pause_reading()
            if transport.can_write_eof():
                transport.write_eof()
            await asyncio.sleep(CLOSE_AFTER_S)
        self.force_close()

    def _await_head(self) -> None:
        self._heads = self._request_count
        self._wait(self._head_timeout_s)

    def _wait(self, wait_s: float) -> None:
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
        is_idle = self._waiter is not None and not self._waiter.done() and not self._messages
        if not is_idle or stood_still(due_s, self._loop.time()):
            # A request before it is being served, or this process was paused and the rest of the head waits in the socket.
            self._wait(self._head_timeout_s)
            return
        if self._has_bytes:
            self.transport.write(TIMED_OUT)
        self.force_close()
