"""Features that gRPC shares with HTTP, such as tool choices, reasoning and truncated prompts, and typed failures."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvmesh.api.errors.v1 import errors_pb2
from kvmesh.api.inference import grpc_service_pb2 as kserve_pb
from kvmesh.api.inference.grpc_service_pb2_grpc import (
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from kvmesh.api.types.v1 import output_pb2, sampling_pb2
from kvmesh.clock import SystemClock
from kvmesh.core import ConstraintKind
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import DETAILS_KEY, KINDS, from_rpc_error
from kvmesh.telemetry import Telemetry
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.api.kserve.servicer import SERVICE_NAME as KSERVE_NAME
from services.frontend.api.kserve.servicer import KserveServicer
from services.frontend.models import ServedModel
from tests.frontend_mesh import (
    TEMPLATE,
    FakeMesh,
    Faults,
    StaticModels,
    make_pipeline,
    served_model,
    tokens_of,
    write_model,
)

TEXT = "Hello! one two three"
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
TOOLS = [pb.Tool(name=name, parameters_json=SCHEMA) for name in ("get_weather", "get_time")]


@dataclass(slots=True)
class Served:
    stub: Any
    kserve: Any
    mesh: FakeMesh
    model: ServedModel
    address: str

    def prompt(self) -> str:
        return self.model.text.decode(self.mesh.generations[-1].token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    features = frozenset({"logprobs", "structured_output"})
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=features)


@pytest.fixture
async def served(model: ServedModel, tmp_path: Path) -> AsyncIterator[Served]:
    keys = tmp_path / "keys.json"
    rows = [{"tenant": "acme", "key_sha256": hash_of("good")}]
    rows.append({"tenant": "other", "key_sha256": hash_of("narrow"), "models": ["none"]})  # type: ignore[dict-item]
    keys.write_text(json.dumps({"keys": rows}))
    gate = Access(AccessSettings(keys_file=str(keys)), SystemClock())
    await gate.start()
    mesh = FakeMesh(answer=lambda _: tokens_of(model.text, TEXT))
    pipeline = make_pipeline(mesh, StaticModels([model]))
    pipeline.access = gate

    def add(server: grpc.aio.Server) -> None:
        add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server)
        add_GRPCInferenceServiceServicer_to_server(KserveServicer(pipeline), server)

    server = RpcServer(
        RpcSettings(grace_s=0.1),
        service_names=[SERVICE_NAME, KSERVE_NAME],
        add_services=add,
        interceptors=[*server_interceptors(Telemetry.create("frontend")), AccessInterceptor(gate)],
    )
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield Served(
            stub=InferenceServiceStub(channel),
            kserve=GRPCInferenceServiceStub(channel),
            mesh=mesh,
            model=model,
            address=server.address,
        )
    await server.aclose()
    assert not mesh.running and not mesh.handles and not pipeline.in_flight


GOOD = (("authorization", "Bearer good"),)


async def chat(served: Served, *, options: Any = None, **values: Any) -> list[Any]:
    request = pb.ChatRequest(model="tiny", options=options, **{"messages": [USER], **values})
    return [each async for each in served.stub.Chat(request, metadata=GOOD)]


def calls_of(responses: list[Any]) -> list[tuple[str, str]]:
    found: dict[int, list[str]] = {}
    for call in (call for response in responses for call in response.tool_calls):
        entry = found.setdefault(call.index, ["", ""])
        entry[0] += call.name
        entry[1] += call.arguments
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("stream", [True, False])
async def test_forced_tool_choices(served: Served, stream: bool) -> None:
    """Required and named tool choices give only calls, under a grammar. Parallel calls can be disabled."""
    options = pb.GenerationOptions(stream=stream)
    written = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'
    served.mesh.answer = lambda _: tokens_of(served.model.text, written)
    responses = await chat(served, tools=TOOLS, tool_choice=pb.TOOL_CHOICE_REQUIRED, options=options)
    assert [name for name, _ in calls_of(responses)] == ["get_weather", "get_time"]
    assert responses[-2].finish_reason == output_pb2.FINISH_REASON_TOOL_CALLS
    assert not "".join(response.text for response in responses)
    constraint = served.mesh.generations[-1].sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA
    responses = await chat(
        served, tools=TOOLS, tool_choice=pb.TOOL_CHOICE_REQUIRED, options=options, parallel_tool_calls=False
    )
    assert [name for name, _ in calls_of(responses)] == ["get_weather"]
    served.mesh.answer = lambda _: tokens_of(served.model.text, '{"city": "Rome"}')
    responses = await chat(served, tools=TOOLS, tool_choice=pb.TOOL_CHOICE_NAMED, tool_name="get_time", options=options)
    assert calls_of(responses) == [("get_time", '{"city": "Rome"}')]
    responses = await chat(served, tools=TOOLS, tool_choice=pb.TOOL_CHOICE_NONE, options=options)
    assert not calls_of(responses) and "get_time" not in served.prompt()


async def test_strict_tools_and_structured_output(served: Served) -> None:
    """Strict tools and structured output become a grammar for the engine. An invalid schema is refused with its field."""
    strict = pb.Tool(name="get_weather", parameters_json=SCHEMA, strict=True)
    await chat(served, tools=[strict])
    constraint = served.mesh.generations[-1].sampling.constraint
    assert constraint is not None and constraint.kind is ConstraintKind.STRUCTURAL_TAG
    sampling = sampling_pb2.SamplingParams(constraint=sampling_pb2.Constraint(json_schema=SCHEMA))
    await chat(served, options=pb.GenerationOptions(sampling=sampling))
    constraint = served.mesh.generations[-1].sampling.constraint
    assert constraint is not None and (constraint.kind, constraint.text) == (ConstraintKind.JSON_SCHEMA, SCHEMA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await chat(served, tools=[pb.Tool(name="f", parameters_json="[]")])
    assert from_rpc_error(caught.value).field == "tools[0].parameters_json"


async def test_prompts_can_be_truncated_and_continued(served: Served) -> None:
    """The fields prompt_tokens_kept, continue_final_message, include_stop and add_special_tokens work as over HTTP."""
    text = served.model.text
    long = "Hello! " * 400
    request = pb.GenerateRequest(model="tiny", text=long, options=pb.GenerationOptions(prompt_tokens_kept=7))
    _ = [each async for each in served.stub.Generate(request, metadata=GOOD)]
    assert list(served.mesh.generations[-1].token_ids) == list(text.tokenise(long, adds_special_tokens=True)[-7:])
    begun = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="The sky is")
    await chat(served, messages=[USER, begun], continue_final_message=True)
    assert served.prompt().endswith("<|im_start|>assistant\nThe sky is")
    sampling = sampling_pb2.SamplingParams(stop=["two"])
    stopped = await chat(served, options=pb.GenerationOptions(sampling=sampling, include_stop=True))
    assert "".join(each.text for each in stopped) == "Hello! one two"
    request = pb.GenerateRequest(model="tiny", text="Hello", add_special_tokens=False)
    _ = [each async for each in served.stub.Generate(request, metadata=GOOD)]
    assert list(served.mesh.generations[-1].token_ids) == list(text.tokenise("Hello", adds_special_tokens=False))


async def test_reasoning_is_separated(tmp_path: Path) -> None:
    """Reasoning is returned in its own field, or omitted if the client excludes it. Its tokens are counted either way."""
    directory = write_model(tmp_path)
    opened = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    (directory / "chat_template.jinja").write_text(opened)
    model = served_model(directory)
    mesh = FakeMesh(answer=lambda _: tokens_of(model.text, "I wonder.</think>Yes."))
    server = RpcServer(
        RpcSettings(grace_s=0.1),
        service_names=[SERVICE_NAME],
        add_services=lambda server: add_InferenceServiceServicer_to_server(
            InferenceServicer(make_pipeline(mesh, StaticModels([model]))), server
        ),
        interceptors=server_interceptors(Telemetry.create("frontend")),
    )
    async with aclosing(server):
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            for stream in (True, False):
                for excluded, wanted in ((False, "I wonder."), (True, "")):
                    options = pb.GenerationOptions(stream=stream)
                    request = pb.ChatRequest(model="tiny", messages=[USER], options=options, exclude_reasoning=excluded)
                    responses = [each async for each in InferenceServiceStub(channel).Chat(request)]  # type: ignore[misc]
                    assert "".join(each.text for each in responses) == "Yes."
                    assert "".join(each.reasoning for each in responses) == wanted
                    assert responses[-1].usage.reasoning_tokens > 0


def details(error: grpc.aio.AioRpcError) -> dict[type[Message], Any]:
    """Returns the status's details by type."""
    packed = next(value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY)
    assert isinstance(packed, bytes)
    rich = status_pb2.Status.FromString(packed)
    assert rich.code == error.code().value[0]
    known = (
        errors_pb2.ErrorDetail, error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo,
    )  # fmt: skip
    found: dict[type[Message], Any] = {}
    for each in rich.details:
        kind = next(kind for kind in known if each.Is(kind.DESCRIPTOR))
        found[kind] = kind()
        each.Unpack(found[kind])
    return found


@pytest.mark.parametrize("kind", list(KINDS), ids=lambda kind: kind.__name__)
async def test_each_kind_of_failure_is_typed(served: Served, kind: type[MeshError]) -> None:
    """The client gets the status code, ErrorDetail, ErrorInfo, BadRequest with a field, and RetryInfo with a delay."""
    failure = kind("it failed", reason="some_reason", field="options.x", retry_after_s=2.5, where="d0")
    # There is one failure per attempt of the frontend, so that retried ones also reach the client.
    served.mesh.faults = Faults(place=[failure] * 5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await chat(served)
    error_kind, code = KINDS[kind]
    assert caught.value.code() is code
    found = details(caught.value)
    detail = found[errors_pb2.ErrorDetail]
    assert (detail.kind, detail.reason, detail.message) == (error_kind, "some_reason", "it failed")
    assert detail.retry_after.ToTimedelta().total_seconds() == 2.5
    info = found[error_details_pb2.ErrorInfo]
    assert (info.reason, info.domain) == ("SOME_REASON", "kvmesh")
    assert found[error_details_pb2.BadRequest].field_violations[0].field == "options.x"
    assert found[error_details_pb2.RetryInfo].retry_delay.ToTimedelta().total_seconds() == 2.5
    assert type(from_rpc_error(caught.value)) is kind


async def test_an_invalid_message_is_an_invalid_request(served: Served) -> None:
    """The status is INVALID_ARGUMENT with details. gRPC alone would return UNKNOWN."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE_NAME}/Tokenize")(b"\xff\xff\xff", metadata=GOOD)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequestError) and error.reason == "invalid_message"


async def test_keys_apply_to_kserve(served: Served) -> None:
    """Only calls about the server itself need no key. A model that a key may not use does not exist for it."""
    assert (await served.kserve.ServerReady(kserve_pb.ServerReadyRequest())).ready
    assert (await served.kserve.ServerMetadata(kserve_pb.ServerMetadataRequest())).name == "kvmesh"
    tensor = kserve_pb.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents={"bytes_contents": [b"Hi"]},  # type: ignore[arg-type]
    )
    request = kserve_pb.ModelInferRequest(model_name="tiny", inputs=[tensor])
    narrow = (("authorization", "Bearer narrow"),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.kserve.ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.kserve.ModelInfer(request, metadata=narrow)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    ready = kserve_pb.ModelReadyRequest(name="tiny")
    assert not (await served.kserve.ModelReady(ready, metadata=narrow)).ready
    assert (await served.kserve.ModelReady(ready, metadata=GOOD)).ready
    response = await served.kserve.ModelInfer(request, metadata=GOOD)
    assert response.raw_output_contents[0][4:].decode() == "Hi" + TEXT
    assert not (await served.stub.ListModels(pb.ListModelsRequest(), metadata=narrow)).models
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Detokenize(pb.DetokenizeRequest(model="tiny", token_ids=[5]), metadata=narrow)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
