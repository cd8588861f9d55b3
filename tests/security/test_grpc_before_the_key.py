"""gRPC calls are refused by their metadata, before a message is received. Messages and calls have limits."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from bench.hostile.connection import PREFACE, Frame, http2_frame
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings, GrpcApiSettings
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import Rig, frontend

SERVICE = "/kvmesh.inference.v1.InferenceService/"
OPTIONS = [("grpc.max_send_message_length", 1 << 30)]
GOOD = (("authorization", "Bearer good"),)


@pytest.mark.parametrize("method", ["Tokenize", "Generate", "Chat", "Embed", "ListModels"])
async def test_a_wrong_key_is_refused_before_the_message(model: ServedModel, keys: Path, method: str) -> None:
    """The server refuses a wrong key although the client sends no message."""
    async with frontend(model, keys=keys) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        call: Any = channel.stream_stream(SERVICE + method)(metadata=(("authorization", "Bearer wrong"),))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asyncio.wait_for(call.read(), PATIENCE_S)
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_message_of_a_wrong_key_is_not_decoded(model: ServedModel, keys: Path) -> None:
    """An undecodable message gives UNAUTHENTICATED with a wrong key and INVALID_ARGUMENT with a valid one."""
    async with (
        frontend(model, keys=keys) as rig,
        grpc.aio.insecure_channel(rig.rpc_address, options=OPTIONS) as channel,
    ):
        call = channel.unary_unary(SERVICE + "Tokenize")
        for metadata, data, code in (
            ((), b"\xff\xff", grpc.StatusCode.UNAUTHENTICATED),
            ((), bytes(32 << 20), grpc.StatusCode.UNAUTHENTICATED),
            (GOOD, b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (GOOD, bytes(32 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(data, metadata=metadata)
            assert failure.value.code() is code


async def test_compressed_messages_are_refused(model: ServedModel, keys: Path) -> None:
    """The server does not accept compression, because gRPC decompresses before the server can check the key."""
    for metadata in ((), GOOD):
        async with (
            frontend(model, keys=keys) as rig,
            grpc.aio.insecure_channel(rig.rpc_address, options=OPTIONS, compression=grpc.Compression.Gzip) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary(SERVICE + "Tokenize")(bytes(60 << 20), metadata=metadata)
            assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


COMPRESSED = """
import asyncio, sys
import grpc.aio
from kvmesh.rpc.settings import RpcSettings, server_options

async def main():
    server = grpc.aio.server(options=server_options(RpcSettings()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
        for _ in range(20):
            try:
                await channel.unary_unary("/a.B/C")(bytes(10_000))
            except grpc.aio.AioRpcError as error:
                print(error.code().name)
    await server.stop(0)

asyncio.run(main())
"""


async def test_refused_messages_are_not_logged() -> None:
    """Refused messages are not logged, because any client could fill the disk. GRPC_VERBOSITY=ERROR logs them."""
    code = "import kvmesh\n" + COMPRESSED
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    for more, lines in (({}, 0), ({"GRPC_VERBOSITY": "ERROR"}, 20)):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code), stdout=PIPE, stderr=PIPE, env=environment | more
        )
        out, errors = await process.communicate()
        assert out.split() == [b"UNIMPLEMENTED"] * 20
        assert errors.count(b"Compression algorithm 'gzip' is disabled") == lines, errors


async def test_the_calls_of_a_connection_are_limited(model: ServedModel) -> None:
    """Calls beyond the connection's limit wait at the client until others end."""
    mesh = FakeMesh(answer=lambda _: [3, 4, 2])
    mesh.faults.stalls_after = 0
    settings = FrontendSettings(grpc_api=GrpcApiSettings(streams_max=5))
    async with (
        frontend(model, settings=settings, mesh=mesh) as rig,
        grpc.aio.insecure_channel(rig.rpc_address) as channel,
    ):
        # The client receives the limit when it connects.
        await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        calls = [InferenceServiceStub(channel).Generate(pb.GenerateRequest(model="tiny", text="Hi")) for _ in range(12)]
        readers = [asyncio.create_task(call.read()) for call in calls]
        await _until(lambda: mesh.stalled == 5)
        await list_models_elsewhere(rig)
        assert mesh.stalled == 5
        for call in calls:
            call.cancel()
        await asyncio.wait(readers)


async def list_models_elsewhere(rig: Rig) -> None:
    """Makes a call on another connection, which is served meanwhile."""
    async with grpc.aio.insecure_channel(rig.rpc_address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())


async def test_more_connections_than_allowed_are_closed(model: ServedModel) -> None:
    """Connections beyond the limit are closed. Each uses a file descriptor, and clients without a key could use all of them."""
    settings = FrontendSettings(grpc_api=GrpcApiSettings(connections_max=3))
    async with frontend(model, settings=settings) as rig:
        host, _, port = rig.rpc_address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        try:
            for _, writer in opened:
                writer.write(PREFACE + http2_frame(kind=Frame.SETTINGS, flags=0, stream=0, payload=b""))
            answers = [asyncio.create_task(_first_bytes(reader)) for reader, _ in opened]
            done, _ = await asyncio.wait(answers, timeout=PATIENCE_S)
            assert sorted(len(answer.result()) > 0 for answer in done) == [False] * 3 + [True] * 3
        finally:
            for _, writer in opened:
                writer.transport.abort()


async def test_clients_cannot_use_channelz(model: ServedModel) -> None:
    """Channelz, which would list the addresses of all clients and of the mesh's services, is not served."""
    async with frontend(model) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        for method in ("GetServers", "GetTopChannels", "GetServerSockets"):
            call = channel.unary_unary(f"/grpc.channelz.v1.Channelz/{method}")(b"")
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """Returns the first bytes from the server; empty if it closes the connection, or resets it because it has not read the preface."""
    try:
        return await reader.read(9)
    except ConnectionError:
        return b""


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
