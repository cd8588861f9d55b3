"""Reads the bytes of a request's body: not before the head is acceptable, not without end, and compressed only if the key allows it.

Values are counted before anything is parsed.
"""

import asyncio
import zlib
from collections.abc import Callable

from aiohttp import hdrs, web

from kvmesh.clock import awake_timeout
from kvmesh.errors import InvalidRequestError, PermissionDeniedError
from kvmesh.rpc.codec.json_texts import SLICE_BYTES, JsonCounter
from kvmesh.rpc.http_status import BODY_TOO_LARGE, MEDIA_TYPE
from services.frontend.access.caller import Caller
from services.frontend.settings import HttpSettings

CONTAINERS_MAX = 50_000
"""Arrays and objects of a body. Parsing this many takes about 25 ms."""
VALUES_MAX = 1_100_000
"""Values of a body. The token ids of a prompt of a million tokens fit."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# 32: zlib or gzip, by the header.
_WINDOW_BITS = {"gzip": 32 + zlib.MAX_WBITS, "x-gzip": 32 + zlib.MAX_WBITS, "deflate": 32 + zlib.MAX_WBITS}


async def defer_continue(request: web.Request) -> None:
    """aiohttp's hook for `Expect`: the client may send the body when the handler reads it, which is after authentication."""
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        raise web.HTTPExpectationFailed


async def send_continue(request: web.Request) -> None:
    """Tells a client that waits for it that the body may be sent."""
    if hdrs.EXPECT in request.headers and request.version >= (1, 1) and not request.content.is_eof():
        writer = request.writer
        await writer.write(_CONTINUE)
        # As aiohttp's own handler does: the response itself has not begun.
        writer.output_size = 0


class JsonLimits:
    """Bounds what one body costs to parse, while it arrives.

    A parser holds the interpreter's lock for as long as it runs, also in a thread. 8 MB of `[]` are 2.6 million lists, which take it
    about a second; 8 MB of text take 16 ms. So the values are counted first, in slices, and a body with too many is neither read to its
    end nor parsed.
    """

    _seen = _counted = _brackets = _commas = 0

    def __init__(self) -> None:
        self._counter = JsonCounter()

    async def check(self, body: bytes | bytearray) -> None:
        """Raises InvalidRequestError if what has arrived has too many values. `body`: all of it. Yields to the loop between slices."""
        start, self._seen = self._seen, len(body)
        # Brackets and commas in texts are counted too, so most bodies need nothing more.
        self._brackets += body.count(b"[", start) + body.count(b"{", start)
        self._commas += body.count(b",", start)
        if self._brackets <= CONTAINERS_MAX and self._commas < VALUES_MAX:
            return
        while self._counted < self._seen:
            end = min(self._seen, self._counted + SLICE_BYTES)
            self._counter.feed(bytes(body[self._counted : end]))
            self._counted = end
            self._raise_if_too_many()
            await asyncio.sleep(0)

    def _raise_if_too_many(self) -> None:
        for count, most, what in (
            (self._counter.containers, CONTAINERS_MAX, "arrays and objects"),
            (self._counter.commas + 1, VALUES_MAX, "values"),
        ):
            if count > most:
                raise InvalidRequestError(f"the body has more than {most} {what}", reason="too_many_values")


async def read_bytes(
    request: web.Request,
    settings: HttpSettings,
    caller: Caller,
    *,
    decompressing: asyncio.Semaphore,
    grow: Callable[[int], None],
) -> bytes:
    """Returns the body of a JSON request. Calls `grow` with its size as it arrives, which may refuse more.

    InvalidRequestError if it is not declared as JSON, too large, late or unreadable; PermissionDeniedError if it must not be compressed.
    """
    encoding = _check_head(request, caller)
    limits = JsonLimits()
    limit = settings.body_bytes_max
    if (request.content_length or 0) > limit:
        raise body_too_large(limit)
    content = request.content
    if content.is_eof():
        # Most bodies arrive with the head. This saves the two copies that aiohttp makes of a long one.
        body = content.read_nowait()
        while not content.at_eof():
            body += content.read_nowait()
        if len(body) > limit:
            raise body_too_large(limit)
    else:
        # The values of a compressed body are counted after it is decompressed.
        body = await _wait_bytes(request, settings, None if encoding else limits, grow=grow)
    if encoding:
        async with decompressing:
            body = await asyncio.to_thread(decompress, body, encoding, limit)
    await limits.check(body)
    return body


def body_too_large(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the body is larger than {limit} bytes", reason=BODY_TOO_LARGE)


def _check_head(request: web.Request, caller: Caller) -> str:
    """Returns how the body is compressed; empty if it is not. Refuses a body that is not declared as JSON.

    A page of another origin cannot declare JSON without the server's consent (CORS).
    """
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequestError("the header `Content-Type: application/json` is required", reason=MEDIA_TYPE)
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in _WINDOW_BITS:
        raise InvalidRequestError("Content-Encoding must be gzip, deflate or identity", reason=MEDIA_TYPE)
    if not caller.sends_compressed:
        message = "a compressed body needs a key with `compressed_bodies`"
        raise PermissionDeniedError(message, field=hdrs.CONTENT_ENCODING, reason="compression_not_allowed")
    return encoding


async def _wait_bytes(
    request: web.Request, settings: HttpSettings, limits: JsonLimits | None, *, grow: Callable[[int], None]
) -> bytes:
    body = bytearray()
    try:
        async with awake_timeout(settings.body_timeout_s):
            await send_continue(request)
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > settings.body_bytes_max:
                    raise body_too_large(settings.body_bytes_max)
                grow(len(body))
                if limits is not None:
                    await limits.check(body)
            return bytes(body)
    except TimeoutError:
        raise InvalidRequestError("the body did not arrive in time", reason="body_timeout") from None
    except (web.RequestPayloadError, ValueError) as error:
        raise InvalidRequestError("the body cannot be read", reason="invalid_body") from error


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompresses at most `limit` bytes. Raises InvalidRequestError for more, and for data that is malformed or incomplete."""
    decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        # One more byte than allowed shows that the rest is too large, without decompressing it.
        plain = decoder.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequestError("the body cannot be decompressed", reason="invalid_body") from None
    if len(plain) > limit:
        raise body_too_large(limit)
    # Truncated, or followed by other data, such as a second gzip member.
    if not decoder.eof or decoder.unused_data:
        raise InvalidRequestError("the body cannot be decompressed", reason="invalid_body")
    return plain
