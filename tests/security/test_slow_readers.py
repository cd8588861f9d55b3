"""Clients that request much and read nothing do not hold memory or a handler for long."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from kvmesh.api.inference import grpc_service_pb2 as kserve_pb
from kvmesh.api.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.api.types.v1 import sampling_pb2
from kvmesh.core import TokenLogprob
from kvmesh.rpc.status import from_rpc_error
from services.frontend.api.grpc.running import RunningRequest
from services.frontend.api.kserve.servicer import STREAM_REQUESTS_MAX
from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings, PipelineSettings
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import Connection, Rig, frontend, head_of

ANSWER_BYTES = 500_000
PIPELINED = 24
"""Together these answers exceed the kernel's buffers."""
BODY = json.dumps({"model": "tiny", "tokens": [3] * ANSWER_BYTES}).encode()
REQUEST = head_of("/detokenize", Content_Type="application/json", Content_Length=str(len(BODY))) + BODY


@pytest.fixture
async def rig(model: ServedModel) -> AsyncIterator[Rig]:
    settings = FrontendSettings()
    http = replace(settings.http, stalled_client_timeout_s=0.5)
    model = replace(model, context_tokens_max=ANSWER_BYTES)
    async with frontend(model, settings=replace(settings, http=http)) as running:
        yield running


async def open_unread_connection(rig: Rig) -> Connection:
    """Opens a connection, sends its requests, and reads nothing."""
    connection = await Connection.open(rig.http_port)
    assert isinstance(connection.writer.transport, asyncio.ReadTransport)
    connection.writer.transport.pause_reading()
    for _ in range(PIPELINED):
        connection.writer.write(REQUEST)
    return connection


async def send_for_ever(connection: Connection) -> None:
    while True:
        connection.writer.write(b" ")
        await connection.writer.drain()
        await asyncio.sleep(0.05)


async def test_a_client_that_reads_nothing_is_disconnected(rig: Rig) -> None:
    """The server closes the connection of a client that does not read its answers."""
    connection = await open_unread_connection(rig)
    async with asyncio.timeout(PATIENCE_S):
        # The client's further data meets a closed connection.
        with pytest.raises(ConnectionError):
            await send_for_ever(connection)


async def test_a_client_that_reads_slowly_gets_everything(rig: Rig) -> None:
    """The time-out counts from the last byte that the client read."""
    connection = await open_unread_connection(rig)
    transport = connection.writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.resume_reading()
    async with asyncio.timeout(PATIENCE_S):
        for number in range(PIPELINED):
            head = await connection.head()
            assert head.startswith(b"HTTP/1.1 200"), (number, head)
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await connection.reader.readexactly(size)
            await asyncio.sleep(0.05)


LONG = 5_000
"""Tokens of an answer whose log-probabilities exceed the buffers of gRPC and the kernel."""
DETAILED = pb.GenerateRequest(
    model="tiny",
    text="Hi",
    options=pb.GenerationOptions(
        stream=True, sampling=sampling_pb2.SamplingParams(max_tokens=LONG, logprobs=20, ignore_eos=True)
    ),
)


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_grpc_client_that_reads_nothing_loses_its_call(model: ServedModel, ends_first: bool) -> None:
    """The server ends the request of a client that reads nothing. The call used to keep 45 MB of log-probabilities after the request had
    ended. A client that reads again gets what was written, and the status."""
    mesh = FakeMesh(answer=lambda _: [5] * LONG, tokens_per_step=LONG if ends_first else 50, step_s=0.02)
    settings = FrontendSettings(pipeline=PipelineSettings(unread_timeout_s=1.0))
    model = replace(model, context_tokens_max=2 * LONG)
    async with (
        frontend(model, settings=settings, mesh=mesh) as rig,
        grpc.aio.insecure_channel(rig.rpc_address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stub = InferenceServiceStub(channel)
        calls = [stub.Generate(DETAILED) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while len(mesh.asks) < len(calls):
                await asyncio.sleep(0.05)
            while [each for each in gc.get_objects() if type(each) in (RunningRequest, TokenLogprob)]:
                await asyncio.sleep(0.2)
            assert not rig.pipeline.in_flight
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 (the loop ends by the error)
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert caught.value.code() is grpc.StatusCode.CANCELLED
                assert from_rpc_error(caught.value).reason == "answer_unread"


async def test_a_kserve_client_that_reads_nothing_loses_its_stream(model: ServedModel) -> None:
    """The stream ends with a status after the messages that were written."""
    mesh = FakeMesh(answer=lambda _: [5] * LONG, tokens_per_step=LONG)
    settings = FrontendSettings(pipeline=PipelineSettings(unread_timeout_s=1.0))
    request = kserve_pb.ModelInferRequest(model_name="tiny", parameters={"max_tokens": {"int64_param": LONG}})
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Hi")
    async with (
        frontend(replace(model, context_tokens_max=2 * LONG), settings=settings, mesh=mesh) as rig,
        grpc.aio.insecure_channel(rig.rpc_address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(STREAM_REQUESTS_MAX):
                await stream.write(request)
            while not mesh.asks:
                await asyncio.sleep(0.05)
            while [each for each in gc.get_objects() if type(each) is RunningRequest]:
                await asyncio.sleep(0.2)
            answers = 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 (the loop ends by the error)
                while await stream.read() is not grpc.aio.EOF:
                    answers += 1
        assert from_rpc_error(caught.value).reason == "answer_unread"
        assert 0 < answers < STREAM_REQUESTS_MAX


async def test_a_grpc_client_that_disconnects_during_a_write_causes_no_traceback(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that disconnects with an unread answer causes no traceback in the log."""
    mesh = FakeMesh(answer=lambda _: [5] * LONG, tokens_per_step=LONG)
    async with (
        frontend(replace(model, context_tokens_max=2 * LONG), mesh=mesh) as rig,
        grpc.aio.insecure_channel(rig.rpc_address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        calls = [InferenceServiceStub(channel).Generate(DETAILED) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            while len(mesh.asks) < len(calls) or rig.pipeline.in_flight:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            for call in calls:
                call.cancel()
            while [each for each in gc.get_objects() if type(each) is RunningRequest]:
                await asyncio.sleep(0.2)
    assert not [record for record in caplog.records if record.exc_info]
