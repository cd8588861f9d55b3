"""Data that a client sends before its key is checked, or that its key does not allow, costs almost nothing."""

import asyncio
import gzip
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.frontend.api.batches.file_routes import FileRoutes
from services.frontend.api.http.connection import DISCARDED_BYTES_MAX
from services.frontend.models import ServedModel
from services.frontend.settings import BatchSettings
from tests.patience import PATIENCE_S
from tests.security.rig import BODY, CHAT, Connection, Rig, frontend, head_of

BOMB_BYTES = 1 << 27


@cache
def bomb() -> bytes:
    """Returns 128 kB that decompress to 128 MB."""
    encoder = zlib.compressobj(9, wbits=31)
    return b"".join([*(encoder.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)), encoder.flush()])


async def post(rig: Rig, data: bytes, **headers: str) -> tuple[int, Any]:
    names = {"Content-Type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(rig.url + CHAT, data=data, headers={k: v for k, v in names.items() if v}, skip_auto_headers=["Content-Type"]) as response,
    ):  # fmt: skip
        return response.status, await response.json()


async def test_a_bomb_without_a_key_is_not_decompressed(
    model: ServedModel, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusing a compression bomb of a wrong key decompresses nothing, neither here nor in aiohttp."""
    decoders: list[int] = []
    make = zlib.decompressobj

    def recorded(wbits: int = zlib.MAX_WBITS, **options: Any) -> Any:
        decoders.append(wbits)
        return make(wbits, **options)

    monkeypatch.setattr(zlib, "decompressobj", recorded)
    data = bomb()
    values = {"Content_Encoding": "gzip", "Content_Length": str(len(data)), "Content_Type": "application/json"}
    async with frontend(model, keys=keys) as rig:
        for key, status, count in (("wrong", b" 401 ", 0), ("zip", b" 413 ", 1)):
            connection = await Connection.open(rig.http_port)
            connection.writer.write(head_of(Authorization=f"Bearer {key}", **values) + data)
            assert status in await asyncio.wait_for(connection.head(), PATIENCE_S)
            assert len(decoders) == count


async def test_the_body_of_a_refused_request_is_not_read(model: ServedModel, keys: Path) -> None:
    """The server answers before it receives the body, and closes the connection without waiting for the body."""
    async with frontend(model, keys=keys) as rig:
        connection = await Connection.open(rig.http_port)
        length = str(DISCARDED_BYTES_MAX + 1)
        connection.writer.write(head_of(Content_Length=length, Content_Type="application/json") + b"{")
        head = await asyncio.wait_for(connection.head(), PATIENCE_S)
        assert b" 401 " in head and b"Connection: close" in head
        await asyncio.wait_for(connection.rest(), PATIENCE_S)


async def test_a_short_body_of_a_refused_request_keeps_the_connection(model: ServedModel, keys: Path) -> None:
    """After a short body with a wrong key, the client can send the next request on the same connection."""
    async with frontend(model, keys=keys) as rig:
        connection = await Connection.open(rig.http_port)
        data = b"x" * 100_000
        for _ in range(2):
            connection.writer.write(head_of(Content_Length=str(len(data)), Content_Type="application/json") + data)
            head = await asyncio.wait_for(connection.head(), PATIENCE_S)
            assert b" 401 " in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await connection.reader.readexactly(length)
        connection.writer.close()


async def test_a_client_that_waits_for_100_sends_no_body_with_a_wrong_key(model: ServedModel, keys: Path) -> None:
    """The server sends `100 Continue` only after it has accepted the key."""
    async with frontend(model, keys=keys) as rig:
        data = json.dumps(BODY).encode()
        for key, first in (("wrong", b"HTTP/1.1 401"), ("good", b"HTTP/1.1 100")):
            connection = await Connection.open(rig.http_port)
            connection.writer.write(
                head_of(
                    Content_Length=str(len(data)),
                    Content_Type="application/json",
                    Expect="100-continue",
                    Authorization=f"Bearer {key}",
                )
            )
            assert (await asyncio.wait_for(connection.head(), PATIENCE_S)).startswith(first)
            if key == "good":
                connection.writer.write(data)
                assert b" 200 " in await asyncio.wait_for(connection.head(), PATIENCE_S)
            connection.writer.close()


async def test_compressed_bodies_need_a_key_that_allows_them(model: ServedModel, keys: Path) -> None:
    """A compressed body needs a key with `compressed_bodies`, and its decompressed size is limited."""
    plain = json.dumps(BODY).encode()
    async with frontend(model, keys=keys) as rig:
        packed = gzip.compress(plain)
        status, body = await post(rig, packed, Content_Encoding="gzip", Authorization="Bearer good")
        assert (status, body["error"]["code"]) == (403, "compression_not_allowed")
        for data, coding in ((packed, "gzip"), (zlib.compress(plain), "deflate"), (plain, "identity")):
            assert (await post(rig, data, Content_Encoding=coding, Authorization="Bearer zip"))[0] == 200
        for data, wanted in ((bomb(), 413), (packed[:-4], 400), (b"no gzip", 400)):
            assert (await post(rig, data, Content_Encoding="gzip", Authorization="Bearer zip"))[0] == wanted
        assert (await post(rig, plain, Content_Encoding="br", Authorization="Bearer zip"))[0] == 415
    async with frontend(model) as rig:
        assert (await post(rig, packed, Content_Encoding="gzip"))[0] == 403


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_json_needs_a_json_content_type(model: ServedModel, kind: str) -> None:
    """Content types that a page of another origin can send without a preflight request are refused with 415."""
    async with frontend(model) as rig:
        data = json.dumps(BODY).encode()
        assert (await post(rig, data, Content_Type=kind))[0] == 415
        for allowed in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
            assert (await post(rig, data, Content_Type=allowed))[0] == 200
        assert len(rig.mesh.asks) == 3


async def test_a_page_of_another_origin_cannot_upload(model: ServedModel, tmp_path: Path) -> None:
    """The server checks the origin of an upload, because browsers send forms without a preflight request."""

    class NoFiles:
        def new(self, _: str) -> Any:
            raise AssertionError("the form was read")

    routes = FileRoutes(NoFiles(), BatchSettings())  # type: ignore[arg-type]
    async with frontend(model, more_routes=[routes.add_routes]) as rig, aiohttp.ClientSession() as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}", filename="x.jsonl")
        async with session.post(f"{rig.url}/v1/files", data=form, headers={"Origin": "https://evil.example"}) as reply:
            assert reply.status == 403
