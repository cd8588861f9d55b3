"""Connections whose client has closed its sending side: `nc -N`, or any socket after `shutdown(SHUT_WR)`.

A server receives a FIN both from a client that will send nothing more and from a client that has disconnected. aiohttp assumes that it
has disconnected. Here the answer continues, and a write shows which case it is, because a closed socket answers with a reset. Before the
answer begins, `100 Continue` is written, which HTTP/1.1 clients ignore at any time.

With TLS the event loop closes a connection after a FIN, so there a FIN means that the client has disconnected.
"""

import asyncio
import socket
from typing import Any

from aiohttp import StreamReader, web

STREAM: web.RequestKey[Any] = web.RequestKey("stream", object)
"""The EventStream of a request, if it has one. Once it `has_begun`, nothing else may be written."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_AFTER_S = 0.02
"""Shorter answers need no probe."""
PROBE_GAP_S = 5.0
"""Time to the second probe; each gap is five times the previous one. Clients accept few interim responses: Go's five."""
PROBE_GAP_FACTOR = 5
CHECK_S_MAX = 1.0
"""Longest time between two checks of the connection's state, each of which is a system call."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_CLOSE = 7
"""State of a connection after a reset (Linux, tcp_states.h)."""


class HalfClosingHandler(web.RequestHandler):
    """Answers the requests that came before the client closed its side, then closes the connection.

    A request whose body is incomplete by then is cancelled, and so is one whose client turns out to be gone.
    """

    __slots__ = ("_check_s", "_has_ended", "_newest_body", "_probe_at_s", "_probe_gap_s")

    def __init__(self, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._has_ended = False
        self._newest_body: StreamReader | None = None
        self._check_s = PROBE_AFTER_S
        self._probe_at_s = 0.0
        self._probe_gap_s = PROBE_GAP_S

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Returns True to keep the connection open."""
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None or not self._has_open_request():
            return None
        self._has_ended = True
        self._close_after_last()
        self._probe_at_s = self._loop.time() + PROBE_AFTER_S
        self._loop.call_later(PROBE_AFTER_S, self._check_connection)
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._newest_body = self._messages[-1][1]

    def _has_open_request(self) -> bool:
        """Returns whether a request is not answered yet, and the newest one has arrived completely."""
        is_idle = not self._messages and self._waiter is not None and not self._waiter.done()
        return not is_idle and self._newest_body is not None and self._newest_body.is_eof()

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        # aiohttp calls it also for responses that are written already.
        self._close_after_last()
        return await super().finish_response(request, resp, start_time)

    def _close_after_last(self) -> None:
        """Makes aiohttp close the connection after the current request, unless others wait."""
        if self._has_ended and not self._messages:
            self._close = True

    def _check_connection(self) -> None:
        """Closes the connection if the client is gone, and sends a probe if one is due."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if _is_reset(transport):
            transport.abort()
            return
        now_s = self._loop.time()
        if now_s >= self._probe_at_s and self._can_probe():
            transport.write(PROBE)
            self._probe_at_s = now_s + self._probe_gap_s
            self._probe_gap_s *= PROBE_GAP_FACTOR
            self._check_s = PROBE_AFTER_S
        self._loop.call_later(self._check_s, self._check_connection)
        self._check_s = min(2 * self._check_s, CHECK_S_MAX)

    def _can_probe(self) -> bool:
        request = self._current_request
        # HTTP/1.0 has no interim responses.
        if request is None or request.version < (1, 1) or request.writer.output_size:
            return False
        stream = request.get(STREAM)
        return stream is None or not stream.has_begun


def _is_reset(transport: asyncio.Transport) -> bool:
    """Returns whether the peer has reset the connection. The event loop does not notice, because it no longer reads."""
    if _TCP_INFO is None:
        return False
    try:
        # `tcpi_state` is the first byte of `struct tcp_info`.
        state: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
    except OSError:
        return True
    return state == _TCP_CLOSE
