"""A client that costs little CPU: prepared bytes on plain sockets, so that the generator uses far less CPU than its target."""

import asyncio
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum
from urllib.parse import urlsplit

TIMEOUT_S = 15.0
CUT_OFF = "cut off"
"""The outcome of a request whose connection ended before an answer."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Frame(IntEnum):
    """HTTP/2 frame types (RFC 9113, section 6)."""

    DATA = 0
    HEADERS = 1
    RESET = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME_BYTES_MAX = 16_384
_FIRST_WINDOW_BYTES = 65_535
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def http_head(url: str, path: str, *, length: int, key: str, **headers: str) -> bytes:
    """Returns the head of a POST with a JSON body. `headers` are further headers, with `_` for `-`."""
    fields = {
        "Host": urlsplit(url).netloc,
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Authorization": f"Bearer {key}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return (
        f"POST {path} HTTP/1.1\r\n".encode() + b"".join(f"{k}: {v}\r\n".encode() for k, v in fields.items()) + b"\r\n"
    )


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connects to `host:port`; closes without waiting."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> str:
    """Sends one HTTP request and reads its answer. Returns the status, or CUT_OFF."""
    async with asyncio.timeout(TIMEOUT_S):
        # Does not drain: the server answers a refused request before its body is sent.
        writer.write(data)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if found := _LENGTH.search(head):
                await reader.readexactly(int(found[1]))
        except (EOFError, OSError):
            return CUT_OFF
        return head.split(b" ", 2)[1].decode()


async def grpc_call(address: str, path: str, message: bytes) -> str:
    """Sends a unary gRPC call without a key, as fast as the server's windows allow. Returns how it ended: `status`, `reset` or CUT_OFF."""
    data = b"\0" + struct.pack(">I", len(message)) + message
    async with asyncio.timeout(TIMEOUT_S), connected(address) as (reader, writer):
        writer.write(
            PREFACE
            + http2_frame(kind=Frame.SETTINGS, flags=0, stream=0, payload=b"")
            + http2_frame(kind=Frame.HEADERS, flags=_END_HEADERS, stream=1, payload=header_block(path, address))
        )
        windows = {0: _FIRST_WINDOW_BYTES, 1: _FIRST_WINDOW_BYTES}
        sent = 0
        try:
            while True:
                while sent < len(data) and (room := min(*windows.values(), _FRAME_BYTES_MAX, len(data) - sent)) > 0:
                    flags = _END_STREAM if sent + room == len(data) else 0
                    writer.write(http2_frame(kind=Frame.DATA, flags=flags, stream=1, payload=data[sent : sent + room]))
                    sent += room
                    windows = {stream: window - room for stream, window in windows.items()}
                kind, flags, stream, payload = await _read_frame(reader)
                if kind == Frame.WINDOW_UPDATE and stream in windows:
                    windows[stream] += struct.unpack(">I", payload)[0]
                elif kind in (Frame.SETTINGS, Frame.PING) and not flags & _ACK:
                    writer.write(
                        http2_frame(kind=kind, flags=_ACK, stream=0, payload=payload if kind == Frame.PING else b"")
                    )
                elif kind == Frame.HEADERS and flags & _END_STREAM:
                    return "status"
                elif kind in (Frame.RESET, Frame.GOAWAY):
                    return "reset"
        except (EOFError, OSError):
            return CUT_OFF


def header_block(path: str, authority: str) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": authority,
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    # Literal fields without indexing and without Huffman coding (RFC 7541, 6.2.2).
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def _string(text: str) -> bytes:
    assert len(text) < 127, "longer strings need a second length byte"
    return bytes([len(text)]) + text.encode()


def http2_frame(*, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream & 0x7FFFFFFF, await reader.readexactly(int.from_bytes(head[:3], "big"))
