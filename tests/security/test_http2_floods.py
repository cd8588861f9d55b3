"""Floods of the public gRPC port below the level of calls: streams that are reset at once, endless heads, pings, settings."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from bench.hostile.attacks import TOKENIZE
from bench.hostile.connection import PREFACE, Frame, header_block, http2_frame
from services.frontend.models import ServedModel
from tests.patience import PATIENCE_S
from tests.security.rig import Rig, frontend

STREAMS = 5000
CPU_S_MAX = 2.0
"""CPU time of client and server, which share a process. 5 000 resets take 0.15 s.

A busy machine takes several times as much. gRPC handles the frames in C, where no work can be counted."""


@pytest.fixture
async def rig(model: ServedModel, keys: Path) -> AsyncIterator[Rig]:
    async with frontend(model, keys=keys) as running:
        yield running


def resets(address: str) -> bytes:
    """Returns streams that are reset as soon as they begin (CVE-2023-44487)."""
    block = header_block(TOKENIZE, address)
    cancel = struct.pack(">I", 8)
    return b"".join(
        http2_frame(kind=Frame.HEADERS, flags=4, stream=stream, payload=block)
        + http2_frame(kind=Frame.RESET, flags=0, stream=stream, payload=cancel)
        for stream in range(1, 2 * STREAMS, 2)
    )


def endless_head(address: str) -> bytes:
    """Returns a head that continues in CONTINUATION frames without end (CVE-2024-27316)."""
    first = http2_frame(kind=Frame.HEADERS, flags=0, stream=1, payload=header_block(TOKENIZE, address))
    more = http2_frame(kind=Frame.CONTINUATION, flags=0, stream=1, payload=b"\0\1a\x7f\x80\x40" + b"b" * 8191)
    return first + more * 500


def large_head(address: str) -> bytes:
    """Returns a head of 64 fields of 8 kB."""
    fields = b"".join(b"\0\4x-%02d\x7f\x80\x40" % number + b"b" * 8319 for number in range(64))
    return http2_frame(kind=Frame.HEADERS, flags=0, stream=1, payload=header_block(TOKENIZE, address)) + b"".join(
        http2_frame(
            kind=Frame.CONTINUATION, flags=4 if end >= len(fields) else 0, stream=1, payload=fields[end - 16_000 : end]
        )
        for end in range(16_000, len(fields) + 16_000, 16_000)
    )


def pings(_: str) -> bytes:
    return http2_frame(kind=Frame.PING, flags=0, stream=0, payload=b"12345678") * 20_000


def settings(_: str) -> bytes:
    return http2_frame(kind=Frame.SETTINGS, flags=0, stream=0, payload=struct.pack(">HI", 4, 65_535)) * 20_000


@pytest.mark.parametrize("attack", [resets, endless_head, large_head, pings, settings])
async def test_a_flood_costs_little_and_others_are_served(rig: Rig, attack: object) -> None:
    """A flood without a key uses little CPU, and a client with a key is served meanwhile."""
    assert callable(attack)
    host, _, port = rig.rpc_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    used_s = time.process_time()
    try:
        writer.write(
            PREFACE + http2_frame(kind=Frame.SETTINGS, flags=0, stream=0, payload=b"") + attack(rig.rpc_address)
        )
        answered = asyncio.create_task(read_all(reader))
        async with grpc.aio.insecure_channel(rig.rpc_address) as channel:
            call = channel.unary_unary(TOKENIZE)(b"", metadata=(("authorization", "Bearer good"),), timeout=PATIENCE_S)
            # The empty message names no model; this status shows that the key was accepted.
            assert await call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    finally:
        writer.transport.abort()
    await answered
    assert time.process_time() - used_s < CPU_S_MAX


async def read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b"reset"
