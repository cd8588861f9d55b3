"""A worker is lost in the middle of an answer: every API gives the same answer as without the loss, streamed or not."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.api.inference import grpc_service_pb2 as kserve_pb
from kvmesh.api.inference.grpc_service_pb2_grpc import (
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from kvmesh.api.types.v1 import sampling_pb2
from kvmesh.clock import SystemClock
from kvmesh.errors import WORKER_LOST_TWICE, LostError, MeshError
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.telemetry import Telemetry
from services.frontend.api.grpc.servicer import InferenceServicer
from services.frontend.api.kserve.servicer import KserveServicer
from services.frontend.models import ServedModel
from services.frontend.settings import HttpSettings
from services.frontend.text.text_model import load_text_model
from tests.batch_process import QUICK
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import FakeMesh, cut_off, served_model, tokens_of
from tests.integration.test_frontend_batches import jsonl, openai_client, read_lines, start_batch, wait_ended
from tests.integration.test_frontend_parsers import TEMPLATE, TOOLS, write

ANSWER_TEXT = '<think>Let me see.</think>Well 🙂.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BROKEN = "<think>Hm.</think><tool_call>\nnothing\n</tool_call> and more"
"""A malformed call, which gives a warning that belongs to the answer."""
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@dataclass(slots=True)
class Served:
    """All APIs over one pipeline."""

    apps: RunningApps
    grpc: Any
    kserve: Any

    @property
    def mesh(self) -> FakeMesh:
        return self.apps.mesh


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = write(tmp_path_factory.mktemp("model"), template=TEMPLATE + "{# <think> #}")
    features = frozenset({"logprobs", "prompt_logprobs", "structured_output"})
    return served_model(directory, text=load_text_model(directory, SystemClock()), features=features)


@pytest.fixture
async def served(model: ServedModel, tmp_path: Path) -> AsyncIterator[Served]:
    answer_text = tokens_of(model.text, ANSWER_TEXT)
    async with running_apps(
        [model], FakeMesh(answer=lambda _: answer_text), tmp_path, apps=AppSettings(batches=QUICK)
    ) as running:

        def add(server: grpc.aio.Server) -> None:
            add_InferenceServiceServicer_to_server(InferenceServicer(running.pipeline), server)
            add_GRPCInferenceServiceServicer_to_server(KserveServicer(running.pipeline), server)

        server = RpcServer(
            RpcSettings(grace_s=0.1),
            service_names=[],
            add_services=add,
            interceptors=server_interceptors(Telemetry.create("frontend")),
        )
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Served(running, InferenceServiceStub(channel), GRPCInferenceServiceStub(channel))
        await server.aclose()
    assert not running.mesh.running and not running.mesh.handles and not running.pipeline.in_flight


def http(path: str, **body: Any) -> Callable[[Served], Awaitable[Any]]:
    """Returns a function that sends a request without streaming, and returns its status, body and warnings."""

    async def ask(served: Served) -> Any:
        status, answer, headers = await served.apps.call("POST", path, {"model": "tiny", **body})
        return status, answer, headers.get("X-Kvmesh-Warning")

    return ask


def http_stream(path: str, **body: Any) -> Callable[[Served], Awaitable[Any]]:
    """Returns a function that sends a streamed request, and returns all its events, ordered by choice."""

    async def ask(served: Served) -> Any:
        async with served.apps.session.post(
            served.apps.url + path, json={"model": "tiny", "stream": True, **body}
        ) as response:
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert len(events) > 4, text
        return sorted(events, key=choice_of)

    return ask


def choice_of(event: Any) -> int:
    """Returns the number of the event's choice. Events without a choice come last."""
    return event["choices"][0]["index"] if event.get("choices") else 99


async def grpc_stream(served: Served) -> Any:
    sampling = sampling_pb2.SamplingParams(logprobs=1)
    options = pb.GenerationOptions(stream=True, return_token_ids=True, sampling=sampling)
    # A message has all tokens since the previous read.
    text, token_ids, last = "", [], None
    async for last in served.grpc.Generate(pb.GenerateRequest(model="tiny", text="Hi", options=options)):
        text += last.text
        token_ids += last.token_ids
    return text, token_ids, last.finish_reason, last.usage


async def grpc_generate(served: Served) -> Any:
    sampling = sampling_pb2.SamplingParams(logprobs=1)
    options = pb.GenerationOptions(stream=False, choices=3, return_token_ids=True, sampling=sampling)
    request = pb.GenerateRequest(model="tiny", text="Hi", options=options)
    return [each async for each in served.grpc.Generate(request)]


async def grpc_chat(served: Served) -> Any:
    tools = [pb.Tool(name="get_weather", parameters_json=json.dumps(SCHEMA))]
    request = pb.ChatRequest(
        model="tiny",
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")],
        tools=tools,
        options=pb.GenerationOptions(stream=False, choices=2),
    )
    return [each async for each in served.grpc.Chat(request)]


async def kserve_infer(served: Served) -> Any:
    contents = kserve_pb.InferTensorContents(bytes_contents=[b"Hi"])
    tensor = kserve_pb.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    return await served.kserve.ModelInfer(
        kserve_pb.ModelInferRequest(
            model_name="tiny", inputs=[tensor], parameters={"max_tokens": kserve_pb.InferParameter(int64_param=100)}
        )
    )


async def batch(served: Served) -> Any:
    async with openai_client(served.apps.url) as client:
        body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        line = {"custom_id": "c0", "method": "POST", "url": "/v1/chat/completions", "body": body}
        ended = await wait_ended(client, (await start_batch(client, jsonl([line]))).id)
        assert ended.output_file_id, await read_lines(client, ended.error_file_id)
        return [each["response"] for each in await read_lines(client, ended.output_file_id)]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS: dict[str, Callable[[Served], Awaitable[Any]]] = {
    "chat": http(CHAT, messages=MESSAGES),
    "chat tools": http(CHAT, messages=MESSAGES, tools=TOOLS),
    "chat n": http(CHAT, messages=MESSAGES, tools=TOOLS, n=3),
    "chat logprobs": http(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, return_token_ids=True),
    "chat forced": http(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="required"),
    "chat structured": http(CHAT, messages=MESSAGES, response_format={"type": "json_object"}),
    "completions": http(COMPLETIONS, prompt="Hi", max_tokens=100, logprobs=1, echo=True),
    "completions several": http(COMPLETIONS, prompt=["Hi", "Hello! How"], max_tokens=100, n=2),
    "completions stop": http(COMPLETIONS, prompt="Hi", max_tokens=100, stop=["}\n</tool_call>", "d more"]),
    "responses": http("/v1/responses", input="Hi", tools=[{"type": "function", **TOOLS[0]["function"]}], store=False),
    "messages": http("/v1/messages", messages=MESSAGES, max_tokens=200, tools=[{"name": "get_weather", "input_schema": SCHEMA}]),
    "grpc generate": grpc_generate,
    "grpc chat": grpc_chat,
    "kserve": kserve_infer,
    "batch": batch,
    "chat stream": http_stream(CHAT, messages=MESSAGES, tools=TOOLS, stream_options={"include_usage": True}),
    "chat stream n": http_stream(CHAT, messages=MESSAGES, tools=TOOLS, n=3),
    "chat stream logprobs": http_stream(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, return_token_ids=True),
    "completions stream": http_stream(COMPLETIONS, prompt="Hi", max_tokens=100, stop=["}\n</tool_call>", "d more"]),
    "responses stream": http_stream("/v1/responses", input="Hi", tools=[{"type": "function", **TOOLS[0]["function"]}], store=False),
    "messages stream": http_stream("/v1/messages", messages=MESSAGES, max_tokens=200, tools=[{"name": "get_weather", "input_schema": SCHEMA}]),
    "grpc stream": grpc_stream,
}  # fmt: skip


def comparable(answer: Any) -> str:
    """Removes ids and times, which differ between requests."""
    text = json.dumps(answer, default=str, sort_keys=True)
    text = re.sub(r"[0-9a-f]{24,32}", "ID", text)
    return re.sub(r'"(created|created_at|completed_at)": \d+', r'"\1": 0', text)


@pytest.mark.parametrize("answer_text", [ANSWER_TEXT, BROKEN], ids=["calls", "broken"])
@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_continues(served: Served, model: ServedModel, path: str, answer_text: str) -> None:
    """Two placements are lost, in the middle of a call and of a character. The answer equals that of an undisturbed request.

    For streams every event is compared.
    """
    tokens = tokens_of(model.text, answer_text)
    served.mesh.answer = lambda _: tokens
    expected = comparable(await PATHS[path](served))
    placed = len(served.mesh.asks)
    first = len(tokens_of(model.text, answer_text.partition("}}")[0])) - 8
    served.mesh.faults.legs = [(first, LostError("killed")), (5, LostError("killed"))]
    assert comparable(await PATHS[path](served)) == expected
    assert len(served.mesh.asks) > placed + 1
    assert not served.mesh.faults.legs
    continued = [generation for generation in served.mesh.generations if generation.emitted_token_ids]
    assert first in {len(generation.emitted_token_ids) for generation in continued}


@pytest.mark.parametrize("path", ["chat tools", "messages", "batch", "grpc chat"])
async def test_an_answer_that_is_not_streamed_can_restart(served: Served, model: ServedModel, path: str) -> None:
    """If no engine can continue the answer, it restarts, and the body is that of the last placement alone."""
    tokens = tokens_of(model.text, ANSWER_TEXT)
    expected = comparable(await PATHS[path](served))
    served.mesh.faults = cut_off(len(tokens) - 3)
    assert comparable(await PATHS[path](served)) == expected
    assert not served.mesh.generations[-1].emitted_token_ids


@pytest.mark.parametrize("path", ["chat tools", "messages", "responses"])
async def test_clients_do_not_retry_a_request_that_killed_two_engines(served: Served, path: str) -> None:
    """The request gets a 500 with the header that tells the clients of OpenAI and Anthropic not to retry."""
    deaths: list[tuple[int, MeshError]] = [(3, LostError("died", reason="engine_died")) for _ in range(4)]
    served.mesh.faults.legs = list(deaths)
    status, body, _ = await PATHS[path](served)
    assert status == 500 and "engines of 2 workers died" in json.dumps(body)
    assert served.mesh.faults.legs == deaths[2:], "the request must be placed exactly twice"
    status, _, headers = await served.apps.call("POST", CHAT, {"model": "tiny", "messages": MESSAGES})
    assert (status, headers["x-should-retry"]) == (500, "false")


async def test_a_line_of_a_batch_that_killed_two_engines_is_not_run_again(served: Served) -> None:
    """The error is the result of the line."""
    deaths: list[tuple[int, MeshError]] = [(3, LostError("died", reason="engine_died")) for _ in range(9)]
    served.mesh.faults.legs = list(deaths)
    with pytest.raises(AssertionError, match=WORKER_LOST_TWICE):
        await batch(served)
    assert served.mesh.faults.legs == deaths[2:]


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.01])
async def test_a_stream_without_output_is_placed_again(model: ServedModel, tmp_path: Path, keep_alive_s: float) -> None:
    """No event precedes the first text, not even the role. Keep-alive comments do not count as output."""
    tokens = tokens_of(model.text, "🙂 Paris")
    mesh = FakeMesh(answer=lambda _: tokens, step_s=0.05)
    async with running_apps([model], mesh, tmp_path, http=HttpSettings(keep_alive_s=keep_alive_s)) as running:
        mesh.faults.legs = [(1, LostError("killed"))]
        body = {"model": "tiny", "messages": MESSAGES, "stream": True}
        async with running.session.post(running.url + CHAT, json=body) as response:
            text = await response.text()
    assert (b": keep-alive" in text.encode()) == bool(keep_alive_s)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert "".join(delta.get("content") or "" for delta in deltas) == "🙂 Paris"
    assert len(mesh.asks) == 2
