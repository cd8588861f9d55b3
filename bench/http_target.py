"""Load target over OpenAI HTTP, on asyncio protocols, so that the generator uses little CPU compared with the server.

It does not parse answers while they stream. It records arrival times and reads the usage from the last bytes.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

from bench.target import LoadRequest, LoadResult

PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')
OUTPUT_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
CACHED_TOKENS = re.compile(rb'"cached_tokens": ?(\d+)')
END = b"0\r\n\r\n"
KEPT_BYTES = 4096
NO_FIELDS: Mapping[str, object] = MappingProxyType({})


class _Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self, *, quick_acks: bool) -> None:
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] | None = None
        self.is_open = False
        self._quick_acks = quick_acks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport but do not inherit from it.
        self.transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def start(self, data: bytes) -> asyncio.Future[None]:
        """Sends a request. The future resolves when its response ends."""
        self.first_at_s = self.last_at_s = 0.0
        self.head = b""
        self.tail = b""
        self.chunks = 0
        self.gaps_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()
        assert self.transport is not None
        self._acknowledge_quickly()
        self.transport.write(data)
        return self.done

    def _acknowledge_quickly(self) -> None:
        """Sets TCP_QUICKACK. Called after each packet, because the kernel clears the option after some packets."""
        if self._quick_acks and self.transport is not None:
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._acknowledge_quickly()
        events = data.count(b"data: {")
        if not self.head:
            self.head = data[:KEPT_BYTES]
        if events and not self.first_at_s:
            self.first_at_s = now_s
        elif events:
            self.gaps_s.append(now_s - self.last_at_s)
        self.chunks += events
        self.last_at_s = now_s
        self.tail = (self.tail + data)[-KEPT_BYTES:]
        if self.tail.endswith(END) or (not self.chunks and self._has_whole_body()):
            self._finish(None)

    def _has_whole_body(self) -> bool:
        """Returns whether a response with a Content-Length is complete: an error, or an answer that is not streamed."""
        header, separator, body = self.tail.partition(b"\r\n\r\n")
        match = re.search(rb"(?i)content-length: (\d+)", header)
        return bool(separator) and match is not None and len(body) >= int(match.group(1))

    def _finish(self, error: Exception | None) -> None:
        done, self.done = self.done, None
        if done is not None and not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish(ConnectionError(f"connection lost: {exc}"))


class HttpTarget:
    """Sends `POST /v1/chat/completions` or `/v1/completions`, streaming with usage."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        is_chat: bool = True,
        timeout_s: float = 120.0,
        quick_acks: bool = False,
        key: str = "",
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._is_chat = is_chat
        self._timeout_s = timeout_s
        self._quick_acks = quick_acks
        self._key = key
        self._idle: list[_Connection] = []

    def encode(self, request: LoadRequest, fields: Mapping[str, object]) -> bytes:
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        data = json.dumps(body).encode()
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {self._host}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *((f"Authorization: Bearer {self._key}",) if self._key else ()),
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + data

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(quick_acks=self._quick_acks), self._host, self._port
        )
        return connection

    async def send(
        self, request: LoadRequest, intended_at_s: float, fields: Mapping[str, object] = NO_FIELDS
    ) -> LoadResult:
        """Sends one request with additional body fields. Does not reuse a connection that failed."""
        result = LoadResult()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.start(self.encode(request, fields))
        except (OSError, TimeoutError) as error:
            result.error = repr(error)
            if connection is not None and connection.transport is not None:
                connection.transport.abort()
            return result
        self._idle.append(connection)
        return self._read(connection, intended_at_s, request, result=result)

    def _read(
        self, connection: _Connection, intended_at_s: float, request: LoadRequest, *, result: LoadResult
    ) -> LoadResult:
        if b" 200 " not in connection.head[:16] or b"[DONE]" not in connection.tail:
            result.error = (connection.head if connection.chunks == 0 else connection.tail)[-300:].decode(
                errors="replace"
            )
            return result
        result.ttft_s = connection.first_at_s - intended_at_s
        result.total_s = connection.last_at_s - intended_at_s
        result.chunks = connection.chunks
        result.gaps_s = connection.gaps_s
        result.prompt_tokens = _number(PROMPT_TOKENS, connection.tail)
        result.output_tokens = _number(OUTPUT_TOKENS, connection.tail)
        result.cached_tokens = _number(CACHED_TOKENS, connection.tail)
        if result.output_tokens != request.output_tokens:
            result.error = f"{result.output_tokens} tokens instead of {request.output_tokens}"
        return result

    async def aclose(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()


def _number(pattern: re.Pattern[bytes], data: bytes) -> int:
    found = pattern.findall(data)
    return int(found[-1]) if found else 0
