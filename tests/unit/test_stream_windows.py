"""Unread messages of a stream wait at the sender, which can merge them, and not at the receiver."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kvmesh.rpc.settings import STREAM_WINDOW_BYTES, RpcSettings, channel_options, server_options

MESSAGES, MESSAGE_BYTES, LONG_BYTES = 2000, 32, 1 << 20


async def test_an_unread_stream_buffers_few_messages() -> None:
    """A thousand buffered step frames would delay a token by a thousand iterations of a busy event loop. All messages still arrive in order."""
    written = 0

    async def send(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        nonlocal written
        for number in range(MESSAGES):
            await context.write(number.to_bytes(MESSAGE_BYTES, "big"))
            written += 1
        await context.write(bytes(LONG_BYTES))

    server = grpc.aio.server(options=server_options(RpcSettings()))
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(send)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options(RpcSettings())) as channel:
        call: Any = channel.stream_stream("/test.Service/Stream")()
        assert int.from_bytes(await call.read(), "big") == 0
        await asyncio.sleep(0.5)
        assert written <= 4 * STREAM_WINDOW_BYTES // MESSAGE_BYTES
        for number in range(1, MESSAGES):
            assert int.from_bytes(await call.read(), "big") == number
        assert len(await call.read()) == LONG_BYTES
    await server.stop(None)
