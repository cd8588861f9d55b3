"""gRPC messages, and JSON texts inside requests, with millions of small values are refused before they are decoded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import orjson
import pytest

from kvmesh import constraint_costs
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.api.types.v1 import sampling_pb2
from kvmesh.core import Constraint
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.batch import from_create_batch
from kvmesh.rpc.codec.json_texts import CONTAINERS_MAX, NESTING_MAX, VALUES_MAX, JsonTexts
from kvmesh.rpc.codec.kserve import InferCall
from services.frontend.api.kserve.read import read_inference
from services.frontend.models import ServedModel
from tests.frontend_apps import running_apps
from tests.frontend_mesh import FakeMesh
from tests.security.rig import CHAT, frontend
from tests.work import at_most_bytes, at_most_lines

SERVICE = "/kvmesh.inference.v1.InferenceService/"
BYTES = 4 << 20
MEMORY_BYTES_MAX = 16 * BYTES
"""Of client and server, which share a process: some copies of the message. Its values take another 64 bytes or more for each three bytes."""
LINES_MAX = 1_500_000
"""Reading as many values of a Struct as are allowed takes 400 000, and reading all values 16 million."""
USER_MESSAGE = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")
TEXT = '{"a":[' + "[]," * (BYTES // 3) + "[]]}"


def entry(number: int, content: bytes = b"") -> bytes:
    """Returns a length-delimited field of a message."""
    head = bytearray()
    for value in (number << 3 | 2, len(content)):
        while value > 0x7F:
            head.append(value & 0x7F | 0x80)
            value >>= 7
        head.append(value)
    return bytes(head) + content


def field(message: type[Any], name: str, content: bytes = b"") -> bytes:
    return entry(message.DESCRIPTOR.fields_by_name[name].number, content)


def many(message: type[Any], name: str) -> bytes:
    """Returns BYTES of empty entries of a repeated field."""
    one = field(message, name)
    return one * (BYTES // len(one))


def struct() -> bytes:
    """Returns a Struct with a list of empty values."""
    return entry(1, entry(1, b"a") + entry(2, entry(6, entry(1) * (BYTES // 2))))


def messages() -> Iterator[Any]:
    sampling, request, chat = sampling_pb2.SamplingParams, pb.GenerateRequest, pb.ChatRequest
    text = request(model="tiny", text="Hi").SerializeToString()
    options = field(pb.GenerationOptions, "sampling", many(sampling, "logit_bias"))
    yield pytest.param("Generate", text + field(request, "options", options), id="logit_bias")
    user = USER_MESSAGE
    said = chat(model="tiny", messages=[user]).SerializeToString()
    for name in ("template_arguments", "documents"):
        yield pytest.param("Chat", said + field(chat, name, struct()), id=name)
    tool = pb.Tool(name="f").SerializeToString() + field(pb.Tool, "parameters", struct())
    yield pytest.param("Chat", said + field(chat, "tools", tool), id="tools")
    call = pb.ToolCall(id="1", name="f", arguments=TEXT)
    calling = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="x", tool_calls=[call])
    yield pytest.param("Chat", chat(model="tiny", messages=[user, calling]).SerializeToString(), id="arguments")


@pytest.mark.parametrize(("method", "data"), list(messages()))
async def test_a_message_of_millions_of_values_is_not_built(model: ServedModel, method: str, data: bytes) -> None:
    """A message with millions of values is refused without decoding them, which used to block the frontend's event loop."""
    async with frontend(model) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        with at_most_bytes(MEMORY_BYTES_MAX), at_most_lines(LINES_MAX):
            call: Any = channel.unary_stream(SERVICE + method)(data)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, await call.details()


async def test_the_cost_of_a_long_schema_is_not_estimated_on_the_event_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a long schema is estimated in a thread. An estimate for 240 kB took a quarter of a second on the event loop."""
    schema = '{"a":[' + "[]," * 80_000 + "[]]}"
    constraint = sampling_pb2.Constraint(json_schema=schema)
    options = pb.GenerationOptions(sampling=sampling_pb2.SamplingParams(constraint=constraint))
    estimate, threads = constraint_costs._estimate, list[threading.Thread]()

    def estimated(constraint: Constraint) -> constraint_costs.Verdict:
        threads.append(threading.current_thread())
        return estimate(constraint)

    monkeypatch.setattr(constraint_costs, "_estimate", estimated)
    async with frontend(model) as rig, grpc.aio.insecure_channel(rig.rpc_address) as channel:
        stub = InferenceServiceStub(channel)
        for call, request in (
            (stub.Generate, pb.GenerateRequest(model="tiny", text="Hi", options=options)),
            (stub.Chat, pb.ChatRequest(model="tiny", messages=[USER_MESSAGE], options=options)),
        ):
            constraint_costs._verdicts.clear()
            assert await call(request).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_lines_of_a_batch_are_counted_before_they_are_read() -> None:
    """Refusing a message with too many lines builds no list of them."""
    batch = pb.CreateBatchRequest(endpoint=pb.BATCH_ENDPOINT_COMPLETIONS).SerializeToString()
    lines = field(pb.CreateBatchRequest, "lines", many(pb.BatchLines, "lines"))
    message = pb.CreateBatchRequest.FromString(batch + lines)
    with at_most_bytes(1 << 20), pytest.raises(InvalidRequestError) as caught:
        from_create_batch(message, lines_max=50_000)
    assert caught.value.field == "lines.lines"


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": TEXT}}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": TEXT}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]}),
        ("/v1/responses", {"input": [{"type": "message", **USER}, ITEM]}),
    ],
)
async def test_a_text_of_millions_of_values_is_not_parsed(
    model: ServedModel, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """The limit applies to JSON inside strings, whose brackets do not count as those of the body."""
    async with running_apps([model], FakeMesh(answer=lambda _: [3, 2]), tmp_path) as apps:
        data = orjson.dumps({"model": "tiny", **body})
        with at_most_bytes(MEMORY_BYTES_MAX):
            status, answer, _ = await apps.call("POST", path, data)
        assert (status, answer["error"]["code"]) == (400, "too_many_values")


def test_a_kserve_document_of_millions_of_values_is_not_parsed() -> None:
    inputs = {"text_input": "Hi", "sampling_parameters": TEXT}
    call = InferCall(model="tiny", call_id="", inputs=inputs, parameters={}, outputs=())
    with at_most_bytes(MEMORY_BYTES_MAX), pytest.raises(InvalidRequestError) as caught:
        read_inference(call, "r", None, choices_max=1)
    assert caught.value.reason == "too_many_values"


def test_the_texts_of_a_request_share_one_limit() -> None:
    """The limits apply to all texts of a request together. Brackets and commas inside strings do not count."""
    texts = JsonTexts()
    for _ in range(9):
        assert texts.object_in('{"a":[' + "[]," * (CONTAINERS_MAX // 10 - 3) + "[]]}") is not None
    code = orjson.dumps({"code": 'f([{,\\"[' * VALUES_MAX}).decode()
    assert texts.object_in(code) == orjson.loads(code)
    with pytest.raises(InvalidRequestError):
        texts.object_in('{"a":[' + "[]," * (CONTAINERS_MAX // 10 - 3) + "[]]}")
    with pytest.raises(InvalidRequestError):
        JsonTexts().object_in('{"a":[' + "0," * (VALUES_MAX + 1) + "0]}")


def test_texts_without_an_object_give_none() -> None:
    deep = '{"a":' * (NESTING_MAX + 1) + "0" + "}" * (NESTING_MAX + 1)
    assert [JsonTexts().object_in(text) for text in ("", "[]", "1", "{", deep, "[" * 100)] == [None] * 6
    assert JsonTexts().object_in('{"a": 1}') == {"a": 1}
