"""Connections whose client has ended its own side: `nc -N`, or any socket after `shutdown(SHUT_WR)`.

TCP tells a server the same thing, a FIN, when a client will send no more and when it is gone. The framework takes it for the
latter. Here the answer goes on, and whether the client is gone shows when something is written to it: a closed socket answers
with a reset. Until the answer begins, that something is `100 Continue`, which HTTP/1.1 clients skip wherever it comes.

With TLS the event loop closes a connection whose client has ended its side, so there a FIN still means that it is gone.
"""

import asyncio
import socket
from typing import Any

from aiohttp import StreamReader, web

STREAM: web.RequestKey[Any] = web.RequestKey("stream", object)
"""The event stream of a request, once there is one: what may not be interrupted when it `has_begun`."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_AFTER_S = 0.02
"""Answers that take less need none."""
PROBE_GAP_S = 5.0
"""Until the second probe; each gap is five times the one before. Clients take only so many interim answers: Go's five."""
PROBE_GAP_FACTOR = 5
LOOK_S_MAX = 1.0
"""Between two looks at the connection's state, which costs a system call."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_CLOSE = 7
"""The state in which a reset leaves a connection (Linux, tcp_states.h)."""


class HalfClosingHandler(web.RequestHandler):
    """Answers what was asked before the client ended its side, then closes.

    1. After the client's end no further request is read; those that came before it are answered.
    2. A request whose body is not complete by then is cancelled, as is one whose client turns out to be gone.
    """

    __slots__ = ("_has_ended", "_look_s", "_newest_body", "_probe_at_s", "_probe_gap_s")

    def __init__(self, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._has_ended = False
        self._newest_body: StreamReader | None = None
        self._look_s = PROBE_AFTER_S
        self._probe_at_s = 0.0
        self._probe_gap_s = PROBE_GAP_S

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection open."""
        transport = self.transport
        if transport is None or transport.get_extra_info("sslcontext") is not None or not self._owes_answer():
            return None
        self._has_ended = True
        self._close_if_last()
        self._probe_at_s = self._loop.time() + PROBE_AFTER_S
        self._loop.call_later(PROBE_AFTER_S, self._look)
        return True

    def data_received(self, data: bytes) -> None:
        """See the base class."""
        super().data_received(data)
        if self._messages:
            self._newest_body = self._messages[-1][1]

    def _owes_answer(self) -> bool:
        """Whether there is a request that is not answered yet, and all of the newest one came."""
        is_idle = not self._messages and self._waiter is not None and not self._waiter.done()
        return not is_idle and self._newest_body is not None and self._newest_body.is_eof()

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """See the base class; also called for responses that are written already."""
        self._close_if_last()
        return await super().finish_response(request, resp, start_time)

    def _close_if_last(self) -> None:
        """The base class closes behind the request that it handles, unless others wait."""
        if self._has_ended and not self._messages:
            self._close = True

    def _look(self) -> None:
        """Cuts the connection off if the client is gone; probes now and then."""
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
            self._look_s = PROBE_AFTER_S
        self._loop.call_later(self._look_s, self._look)
        self._look_s = min(2 * self._look_s, LOOK_S_MAX)

    def _can_probe(self) -> bool:
        request = self._current_request
        if request is None or request.version < (1, 1) or request.writer.output_size:
            return False
        stream = request.get(STREAM)
        return stream is None or not stream.has_begun


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the peer has reset the connection. Nothing is read any more, so the event loop does not notice by itself."""
    if _TCP_INFO is None:
        return False
    try:
        state: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
    except OSError:
        return True
    return state == _TCP_CLOSE


class _Server(web.Server):
    """Makes one such handler per connection."""

    def __call__(self) -> HalfClosingHandler:
        return HalfClosingHandler(self, loop=self._loop, **self._kwargs)


class HalfClosingRunner(web.AppRunner):
    """A runner whose connections are such handlers."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,
        )
