"""InferenceService over real gRPC on loopback, with the same pipeline as HTTP."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from kvmesh.api.types.v1 import output_pb2, sampling_pb2
from kvmesh.core import ReportKind
from kvmesh.errors import InvalidRequestError, LostError, MeshError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import Telemetry
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from tests.frontend_mesh import (
    FakeMesh,
    Faults,
    StaticModels,
    cut_off,
    make_pipeline,
    served_model,
    tokens_of,
    write_model,
)
from tests.patience import PATIENCE_S

TEXT = "Hello! naïve 日本語 🙂 one two three"
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")


@dataclass(slots=True)
class Running:
    stub: Any
    mesh: FakeMesh
    pipeline: Pipeline
    model: ServedModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def running(model: ServedModel) -> AsyncIterator[Running]:
    tokens = tokens_of(model.text, TEXT)
    mesh = FakeMesh(answer=lambda _: tokens)
    pipeline = make_pipeline(mesh, StaticModels([model]))
    server = RpcServer(
        RpcSettings(grace_s=0.1),
        service_names=[SERVICE_NAME],
        add_services=lambda server: add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server),
        interceptors=server_interceptors(Telemetry.create("frontend")),
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield Running(stub=InferenceServiceStub(channel), mesh=mesh, pipeline=pipeline, model=model)
    await server.aclose()
    assert not mesh.running
    assert not mesh.handles


def options(*, stream: bool = True, **values: Any) -> pb.GenerationOptions:
    names = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    sampling = sampling_pb2.SamplingParams(**{key: value for key, value in values.items() if key in names})
    return pb.GenerationOptions(
        stream=stream, sampling=sampling, **{key: value for key, value in values.items() if key not in names}
    )


async def failure(call: Any) -> MeshError:
    """Returns the error that the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("stream", [True, False])
async def test_generate(running: Running, stream: bool) -> None:
    """The prompt can be text or tokens, and the answer unary or streamed. The usage comes last, and each choice has one finish reason."""
    ids = list(running.model.text.tokenise("Hello", adds_special_tokens=True))
    for prompt in ({"text": "Hello"}, {"token_ids": pb.TokenIds(ids=ids)}):
        wanted = options(stream=stream, choices=2, return_token_ids=True, logprobs=1)
        request = pb.GenerateRequest(model="tiny", echo=True, options=wanted, **prompt)
        responses = [each async for each in running.stub.Generate(request)]
        for choice in range(2):
            parts = [each for each in responses[:-1] if each.choice == choice]
            assert "".join(part.text for part in parts) == "Hello" + TEXT
            token_ids = [i for part in parts for i in part.token_ids]
            assert token_ids == tokens_of(running.model.text, TEXT)
            assert sum(len(part.logprobs.token_logprobs) for part in parts) == len(token_ids)
            assert [part.finish_reason for part in parts if part.finish_reason] == [output_pb2.FINISH_REASON_STOP]
            assert stream or len(parts) == 1
        assert responses[-1].usage.output_tokens == 2 * len(tokens_of(running.model.text, TEXT))
        assert list(running.mesh.generations[-1].token_ids) == ids


async def test_requests_with_equal_client_ids_run_concurrently(running: Running) -> None:
    """A client's own id is only logged, so another client with the same id is neither refused nor learns that the id is in use."""
    request = pb.GenerateRequest(model="tiny", text="Hello", options=options(request_id="mine"))

    async def ids() -> set[str]:
        return {response.request_id async for response in running.stub.Generate(request)}

    found = await asyncio.gather(*(ids() for _ in range(3)))
    assert all(len(each) == 1 for each in found)
    assert len(set().union(*found)) == 3
    assert "mine" not in set().union(*found)


async def test_chat_with_tools(running: Running) -> None:
    """Typed messages reach the template, and a call in the answer is a typed call."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    running.mesh.answer = lambda _: tokens_of(running.model.text, "Wait. " + call)
    parameters = ParseDict({"type": "object"}, Struct())
    old_call = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Rome"}')
    request = pb.ChatRequest(
        model="tiny",
        messages=[
            USER,
            pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=[old_call]),
            pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, tool_call_id="c1", content="rain"),
        ],
        tools=[pb.Tool(name="get_weather", description="d", parameters=parameters)],
        options=options(),
    )
    responses = [each async for each in running.stub.Chat(request)]
    calls = [each for response in responses for each in response.tool_calls]
    assert [each.name for each in calls if each.name] == ["get_weather"]
    assert {each.index for each in calls} == {0} and calls[0].id
    assert "".join(each.arguments for each in calls) == '{"city": "Paris"}'
    assert "".join(response.text for response in responses) == "Wait."
    assert responses[-2].finish_reason == output_pb2.FINISH_REASON_TOOL_CALLS
    prompt = running.model.text.decode(running.mesh.generations[0].token_ids)
    assert '"name": "get_weather", "description": "d", "parameters": {"type": "object"}' in prompt


async def test_a_malformed_tool_call_is_text_with_a_warning(running: Running) -> None:
    """The text stays in the answer, and a typed warning has the reason."""
    text = "<tool_call>oops</tool_call>"
    running.mesh.answer = lambda _: tokens_of(running.model.text, text)
    tools = [pb.Tool(name="get_weather", parameters=ParseDict({"type": "object"}, Struct()))]
    request = pb.ChatRequest(model="tiny", messages=[USER], tools=tools, options=options())
    responses = [each async for each in running.stub.Chat(request)]
    assert "".join(response.text for response in responses) == text
    warnings = [response.warning for response in responses if response.HasField("warning")]
    assert [(each.reason, bool(each.message)) for each in warnings] == [("tool_call_malformed", True)]
    assert responses[-2].finish_reason == output_pb2.FINISH_REASON_STOP


async def test_tokenize_and_models(running: Running) -> None:
    """Tokenize returns the tokens of a text, or of a conversation with the chat template applied."""
    text = running.model.text
    response = await running.stub.Tokenize(pb.TokenizeRequest(model="tiny", text="Hello"))
    assert list(response.token_ids) == list(text.tokenise("Hello", adds_special_tokens=False))
    assert response.context_tokens_max == 512
    chat = pb.ChatRequest(model="tiny", messages=[USER])
    response = await running.stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=chat))
    assert (
        text.decode(response.token_ids, skip_special_tokens=False)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    models = await running.stub.ListModels(pb.ListModelsRequest())
    assert [(each.name, each.workers_ready) for each in models.models] == [("tiny", 1)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Embed(pb.EmbedRequest(model="tiny", texts=["x"]))
    assert isinstance(from_rpc_error(caught.value), UnsupportedError)


def generate(**wanted: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="tiny", text="x", options=options(**wanted))


def chat(message: pb.ChatMessage, **values: Any) -> pb.ChatRequest:
    return pb.ChatRequest(model="tiny", messages=[message], **values)


BAD: list[tuple[pb.GenerateRequest | pb.ChatRequest, type[MeshError], str]] = [
    (pb.GenerateRequest(model="tiny"), InvalidRequestError, "prompt"),
    (pb.GenerateRequest(text="x"), InvalidRequestError, "model"),
    (pb.GenerateRequest(model="absent", text="x"), NotFoundError, "model"),
    (pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=[402])), InvalidRequestError, "prompt"),
    (generate(temperature=3), InvalidRequestError, "options.sampling.temperature"),
    (generate(temperature=float("nan")), InvalidRequestError, "options.sampling.temperature"),
    (generate(max_tokens=600), InvalidRequestError, "options.sampling.max_tokens"),
    (generate(stop=["x"] * 17), InvalidRequestError, "options.sampling.stop"),
    (generate(choices=99), InvalidRequestError, "options.choices"),
    (generate(request_id="a b"), InvalidRequestError, "options.request_id"),
    (generate(timeout=Duration(seconds=-1)), InvalidRequestError, "options.timeout"),
    (pb.ChatRequest(model="tiny"), InvalidRequestError, "messages"),
    (chat(pb.ChatMessage(content="x")), InvalidRequestError, "messages[0].role"),
    (chat(pb.ChatMessage(role=9, content="x")), InvalidRequestError, "messages[0].role"),  # type: ignore[arg-type]
    (chat(pb.ChatMessage(role=pb.CHAT_ROLE_USER)), InvalidRequestError, "messages[0].content"),
    (chat(pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="x")), InvalidRequestError, "messages"),
    (chat(USER, tool_choice=pb.TOOL_CHOICE_REQUIRED), InvalidRequestError, "tool_choice"),
]


async def test_invalid_input_is_reported_by_field(running: Running) -> None:
    """Invalid input gives a status with the name of the field, and no placement is requested."""
    for request, kind, field in BAD:
        method = running.stub.Chat if isinstance(request, pb.ChatRequest) else running.stub.Generate
        error = await failure(method(request))
        assert (type(error), error.field) == (kind, field), request
    assert not running.mesh.asks


async def test_failures_are_typed(running: Running) -> None:
    """Failures before and during a stream are typed, and have RetryInfo if the client may retry."""
    running.mesh.faults = Faults(place=[UnavailableError("none", reason="no_worker")])
    error = await failure(running.stub.Generate(pb.GenerateRequest(model="tiny", text="x")))
    assert isinstance(error, UnavailableError)
    assert (error.reason, error.retry_after_s) == ("no_worker", 1.0)
    running.mesh.faults = cut_off(3)
    error = await failure(running.stub.Generate(pb.GenerateRequest(model="tiny", text="x", options=options())))
    assert isinstance(error, LostError)
    text = requests_text(running)
    assert 'code="503",model="tiny"' in text
    assert 'code="502",model="tiny"' in text


def requests_text(running: Running) -> str:
    """Returns the labels of the request counter's samples."""
    samples = [sample for family in running.pipeline.metrics.requests.collect() for sample in family.samples]
    return "".join(f'code="{each.labels["code"]}",model="{each.labels["model"]}"\n' for each in samples)


@pytest.mark.parametrize("stream", [True, False])
async def test_cancel_and_deadline_stop_the_request(running: Running, stream: bool) -> None:
    """A cancelled call, and one at its deadline, stop the request on the workers, unary or streaming."""
    running.mesh.answer = lambda _: [50] * 400
    running.mesh.step_s = 0.01
    request = pb.GenerateRequest(model="tiny", text="x", options=options(stream=stream, max_tokens=400))
    call = running.stub.Generate(request)
    reading = asyncio.ensure_future(anext(aiter(call)))
    async with asyncio.timeout(PATIENCE_S):
        while not running.mesh.running:
            await asyncio.sleep(0.005)
        call.cancel()
        while not running.mesh.settled():
            await asyncio.sleep(0.005)
    await asyncio.wait({reading})
    reading.exception() if not reading.cancelled() else None
    running.mesh.step_s = 1.0
    timeout_s = 0.1
    async with asyncio.timeout(PATIENCE_S):
        # A call whose deadline passes before the server reads it is not placed, so the next one gets more time.
        while len(running.mesh.asks) < 2:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in running.stub.Generate(request, timeout=timeout_s):
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            timeout_s *= 2
        while len(running.mesh.settled()) < len(running.mesh.asks):
            await asyncio.sleep(0.005)
    kinds = [kind for _, kind in running.mesh.settled()]
    assert kinds[0] is ReportKind.CANCELLED
    assert set(kinds[1:]) <= {ReportKind.CANCELLED, ReportKind.FAILED}
