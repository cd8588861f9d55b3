"""The HTTP API on loopback: a real server and real clients, and a fake mesh behind the pipeline."""

import asyncio
import contextlib
import gc
import json
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.clock import SystemClock
from kvmesh.core import ConstraintKind, Generation, ReportKind
from kvmesh.errors import InternalError, LostError, NotFoundError, OverloadedError, UnavailableError, UnsupportedError
from kvmesh.kv.blocks import block_hashes
from kvmesh.telemetry import Instruments
from services.frontend.api.http import stream as streams
from services.frontend.api.http.half_close import PROBE
from services.frontend.api.http.server import HttpServer
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import ServedModel
from services.frontend.pipeline import prepare
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Conversation
from services.frontend.settings import HttpSettings, PipelineSettings
from tests.frontend_mesh import (
    CUT_OFF,
    EOS,
    FakeMesh,
    Faults,
    StaticModels,
    cut_off,
    served_model,
    tokens_of,
    write_model,
)
from tests.patience import PATIENCE_S

TEXT = "Hello! naïve café 日本語 🙂👍🏽 one two three"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), adapters=("tiny-lora",))


@dataclass(slots=True)
class Running:
    """A running frontend."""

    url: str
    port: int
    mesh: FakeMesh
    pipeline: Pipeline
    registry: CollectorRegistry
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        """Returns the status, the JSON body and the headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, **kwargs) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path: str, body: Any) -> list[Any]:
        """Returns all events of a stream. `[DONE]` stays a string."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]

    def metrics(self) -> str:
        return generate_latest(self.registry).decode()


@asynccontextmanager
async def frontend(
    models: Sequence[ServedModel], mesh: FakeMesh, *, http: HttpSettings | None = None, **settings: Any
) -> AsyncIterator[Running]:
    registry = CollectorRegistry()
    pipeline = Pipeline(
        models=StaticModels(models), links=mesh, router=mesh, clock=SystemClock(),
        generator=random.Random(3),
        metrics=FrontendMetrics(Instruments(registry, "frontend"), lambda: pipeline.in_flight),
        settings=PipelineSettings(**settings),
    )  # fmt: skip
    server = HttpServer(pipeline, replace(http or HttpSettings(), port=0), registry)
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
            yield Running(url=url, port=server.port, mesh=mesh, pipeline=pipeline, registry=registry, session=session)
    finally:
        await server.aclose()


@pytest.fixture
async def running(model: ServedModel) -> AsyncIterator[Running]:
    tokens = tokens_of(model.text, TEXT)
    async with frontend([model], FakeMesh(answer=lambda _: tokens)) as running:
        yield running
    assert not running.mesh.running
    assert not running.mesh.handles


def content(events: Sequence[Any], choice: int = 0) -> str:
    """Returns the text of a streamed choice."""
    parts = [each for event in events if event != "[DONE]" for each in event["choices"] if each["index"] == choice]
    return "".join(each["delta"].get("content") or "" if "delta" in each else each["text"] for each in parts)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openai_chat(running: Running, client: openai.AsyncOpenAI) -> None:
    """The official client reads whole answers and streams, and gets the same from both."""
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, user="u", metadata={"a": "b"})
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openai_completions(running: Running, client: openai.AsyncOpenAI) -> None:
    """Prompts of all forms, several choices and echo work. Choices are numbered by prompt, then choice."""
    one = await client.completions.create(model="tiny", prompt="Hello", max_tokens=100, echo=True)
    assert one.choices[0].text == "Hello" + TEXT
    ids = list(running.pipeline.models.find("tiny").text.tokenise("Hello", adds_special_tokens=True))
    prompts: list[Any] = [["Hello", "How"], [ids, ids]]
    for prompt in prompts:
        many = await client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=100)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in many.choices} == {TEXT}
    await client.completions.create(model="tiny", prompt=ids)
    assert list(running.mesh.generations[-1].token_ids) == ids
    assert running.mesh.generations[-1].sampling.max_tokens == 16
    texts = ["", "", "", ""]
    stream = await client.completions.create(
        model="tiny", prompt=["Hello", "How"], n=2, max_tokens=100, stream=True, echo=True
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["Hello" + TEXT] * 2 + ["How" + TEXT] * 2


async def test_openai_models(client: openai.AsyncOpenAI) -> None:
    """The client can list models and retrieve one. Adapters are listed, and unknown models give a 404."""
    assert [each.id async for each in client.models.list()] == ["tiny", "tiny-lora"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


async def test_no_chunk_has_a_partial_character(running: Running) -> None:
    """A character whose bytes are split over tokens arrives in one chunk."""
    events = await running.events(CHAT, {"model": "tiny", "messages": MESSAGES})
    assert content(events) == TEXT
    assert "\N{REPLACEMENT CHARACTER}" not in json.dumps(events, ensure_ascii=False)
    assert len(events) > 20
    assert events[-1] == "[DONE]"


async def test_choices_in_one_stream(running: Running) -> None:
    """Each choice has its role, text and end, and usage counts all choices."""
    body = {"model": "tiny", "messages": MESSAGES, "n": 3, "stream_options": {"include_usage": True}}
    events = await running.events(CHAT, body)
    assert [content(events, i) for i in range(3)] == [TEXT] * 3
    choices = [each for event in events[:-1] for each in event["choices"]]
    assert sum(each["delta"].get("role") == "assistant" for each in choices) == 3
    assert sum(each["finish_reason"] == "stop" for each in choices) == 3
    tokens = len(tokens_of(running.pipeline.models.find("tiny").text, TEXT))
    assert events[-2]["usage"]["completion_tokens"] == 3 * tokens


async def test_logprobs_in_both_formats(running: Running) -> None:
    """Log-probabilities have each token's text and bytes; the joined bytes are the answer's."""
    body = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    _, whole, _ = await running.post(CHAT, body)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT + EOS
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.25 for entry in entries)
    events = await running.events(CHAT, body)
    streamed = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == entries
    body = {"model": "tiny", "prompt": "Hi", "logprobs": 1, "max_tokens": 100}
    _, whole, _ = await running.post(COMPLETIONS, body)
    logprobs = whole["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == len(entries)
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert logprobs["text_offset"][-1] == len(TEXT)
    events = await running.events(COMPLETIONS, body)
    offsets = [o for e in events[:-1] for c in e["choices"] if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_token_ids_are_returned_on_request(running: Running) -> None:
    """The token ids are all tokens that usage counts, including the one that ended the answer."""
    tokens = tokens_of(running.pipeline.models.find("tiny").text, TEXT)
    body = {"model": "tiny", "messages": MESSAGES, "return_token_ids": True}
    _, whole, _ = await running.post(CHAT, body)
    assert whole["choices"][0]["token_ids"] == tokens
    assert whole["prompt_token_ids"] == list(running.mesh.generations[0].token_ids)
    events = await running.events(CHAT, body)
    assert [i for event in events[:-1] for i in event["choices"][0].get("token_ids", [])] == tokens


async def test_stop_strings_over_http(running: Running) -> None:
    """The text is cut before the stop string, streamed or not, and the leg is cancelled on its worker."""
    body = {"model": "tiny", "messages": MESSAGES, "stop": [" one t", "zz"]}
    _, whole, _ = await running.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == TEXT.partition(" one")[0]
    assert whole["choices"][0]["stop_reason"] == " one t"
    assert content(await running.events(CHAT, body)) == TEXT.partition(" one")[0]
    assert len(running.mesh.cancelled) == 2


async def test_sampling_reaches_the_workers(running: Running) -> None:
    """The workers get every sampling field unchanged."""
    sampling = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "seed": 42, "max_completion_tokens": 9, "min_tokens": 2, "stop_token_ids": [7],
        "ignore_eos": True, "logit_bias": {"5": 1, "6": -2.5}, "priority": 3, "cache_salt": "tenant",
    }  # fmt: skip
    status, body, _ = await running.post(CHAT, {"model": "tiny-lora", "messages": MESSAGES, **sampling})
    assert status == 200, body
    sent = running.mesh.generations[0]
    got = sent.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.7, 0.9, 5, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (got.seed, got.max_tokens, got.min_tokens, got.stop_token_ids, got.ignore_eos) == (42, 9, 2, (7,), True)
    assert got.logit_bias == ((5, 1.0), (6, -2.5))
    assert (sent.model, sent.adapter, sent.priority, sent.cache_salt) == ("tiny", "tiny-lora", 3, "tenant")


async def test_headers_and_fields_reach_the_router(model: ServedModel) -> None:
    """The router gets the session, the deadline, labels, and pins if the setting allows them. The session in the header takes precedence."""
    http = HttpSettings(allows_pins=True)
    async with frontend([model], FakeMesh(answer=lambda _: [2]), http=http) as running:
        body = {"model": "tiny", "messages": MESSAGES, "session_id": "body", "prompt_cache_key": "key"}
        headers = {
            "x-session-id": "header", "x-request-timeout": "600.5", "x-kvmesh-pin-prefill": "p1",
            "x-kvmesh-pin-decode": "d1", "x-kvmesh-labels": "zone=a, gpu=h200", "x-kvmesh-preferred-labels": "rack=7",
        }  # fmt: skip
        assert (await running.post(CHAT, body, headers=headers))[0] == 200
        ask = running.mesh.asks[-1]
        assert (ask.session_id, ask.pinned_prefill_worker_id, ask.pinned_decode_worker_id) == ("header", "p1", "d1")
        assert ask.required_labels == {"zone": "a", "gpu": "h200"}
        assert ask.preferred_labels == {"rack": "7"}
        assert ask.timeout_s is not None and 600.5 - PATIENCE_S < ask.timeout_s <= 600.5
        for fields, session in (({"session_id": "s", "prompt_cache_key": "k"}, "s"), ({"prompt_cache_key": "k"}, "k")):
            await running.post(CHAT, {"model": "tiny", "messages": MESSAGES, **fields})
            assert running.mesh.asks[-1].session_id == session
        for name, value in (
            ("x-kvmesh-labels", "zone"),
            ("x-kvmesh-preferred-labels", "=a"),
            ("x-session-id", "x" * 300),
            ("x-request-timeout", "-1"),
        ):
            status, answer, _ = await running.post(CHAT, body, headers={name: value})
            assert (status, answer["error"]["param"]) == (400, name)
        refusals = (
            (NotFoundError("no worker is named 'd1'", field="pinned_decode_worker_id"), 404, "x-kvmesh-pin-decode"),
            (UnsupportedError("no worker has it", field="required_labels"), 400, "x-kvmesh-labels"),
        )
        for error, expected, name in refusals:
            running.mesh.faults.place = [error]
            status, answer, _ = await running.post(CHAT, body, headers=headers)
            assert (status, answer["error"]["param"]) == (expected, name)


async def test_prompts_can_be_truncated(running: Running) -> None:
    """Only the last tokens are used; -1 keeps as many as the context allows in addition to the answer."""
    ids = list(range(10, 300)) * 3
    body = {"model": "tiny", "prompt": ids, "max_tokens": 12}
    assert (await running.post(COMPLETIONS, body))[0] == 400
    await running.post(COMPLETIONS, body | {"truncate_prompt_tokens": 5})
    assert list(running.mesh.generations[-1].token_ids) == ids[-5:]
    await running.post(COMPLETIONS, body | {"truncate_prompt_tokens": -1})
    assert list(running.mesh.generations[-1].token_ids) == ids[-500:]


def test_reasoning_effort_reaches_the_template() -> None:
    """The template gets the effort as a variable."""
    asked = read_chat({"model": "m", "messages": MESSAGES, "reasoning_effort": "high"}, "r").requests[0].prompt
    assert isinstance(asked, Conversation) and asked.arguments == {"reasoning_effort": "high"}


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_tool_calls(model: ServedModel) -> None:
    """Tools reach the template. A Hermes call in the answer becomes a tool call, whole and streamed, and can be sent back."""
    tokens = tokens_of(model.text, CALL)
    async with frontend([model], FakeMesh(answer=lambda _: tokens)) as running:
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        _, whole, _ = await running.post(CHAT, body)
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Wait."
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert "get_weather" in model.text.decode(running.mesh.generations[0].token_ids)
        async with (
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
            client.chat.completions.stream(**body) as stream,
        ):
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Wait."
        assert final.message.tool_calls and final.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
        history = [*MESSAGES, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        status, _, _ = await running.post(CHAT, {**body, "messages": history})
        assert status == 200
        _, plain, _ = await running.post(CHAT, {**body, "tool_choice": "none"})
        assert plain["choices"][0]["message"]["content"] == CALL
        assert "get_weather" not in model.text.decode(running.mesh.generations[-1].token_ids)


async def test_structured_output_needs_a_capable_worker(model: ServedModel, running: Running) -> None:
    """The schema is passed on as a constraint, or refused with the field's name."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    body = {"model": "tiny", "messages": MESSAGES, "response_format": form}
    status, answer, _ = await running.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    able = replace(model, features=frozenset({"structured_output"}))
    async with frontend([able], FakeMesh(answer=lambda _: [2])) as other:
        status, _, _ = await other.post(CHAT, body)
        assert status == 200
        constraint = other.mesh.generations[0].sampling.constraint
        assert constraint is not None
        assert (constraint.kind, constraint.text) == (ConstraintKind.JSON_SCHEMA, '{"type":"object"}')
        assert other.mesh.asks[0].required_features == ("structured_output",)


def chat_with(**values: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **values}).encode()


def message(**values: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [values]}).encode()


# Body, status, the field that the error names, and its code.
BAD_CHAT: list[tuple[bytes, int, str | None, str]] = [
    (b"", 400, None, "invalid_json"),
    (b"{", 400, None, "invalid_json"),
    (b"[]", 400, None, "invalid_json"),
    (b'"text"', 400, None, "invalid_json"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None, "invalid_json"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, "invalid_json"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None, "invalid_json"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e400}', 400, None, "invalid_json"),
    (b"[" * 5000, 400, None, "invalid_json"),
    (chat_with(model="absent"), 404, "model", "model_not_found"),
    (chat_with(model=""), 400, "model", "invalid_value"),
    (chat_with(model=5), 400, "model", "invalid_value"),
    (chat_with(model="x" * 1000), 400, "model", "invalid_value"),
    (json.dumps({"model": "tiny"}).encode(), 400, "messages", "invalid_value"),
    (chat_with(messages=[]), 400, "messages", "invalid_value"),
    (chat_with(messages="hello"), 400, "messages", "invalid_value"),
    (chat_with(messages=["hello"]), 400, "messages", "invalid_value"),
    (chat_with(messages=MESSAGES * 5000), 400, "messages", "invalid_value"),
    (message(content="x"), 400, "messages[0].role", "invalid_value"),
    (message(role="wizard", content="x"), 400, "messages[0].role", "invalid_value"),
    (message(role="user"), 400, "messages[0].content", "invalid_value"),
    (message(role="user", content=5), 400, "messages[0].content", "invalid_value"),
    (message(role="user", content=[]), 400, "messages[0].content", "invalid_value"),
    (message(role="user", content=["x"]), 400, "messages[0].content[0]", "invalid_value"),
    (message(role="user", content=[{"type": "text"}]), 400, "messages[0].content[0].text", "invalid_value"),
    (message(role="user", content=[{"type": "image_url"}]), 400, "messages[0].content[0].type", "unsupported"),
    (message(role="user", content="x", tool_calls_=[]), 400, "messages[0].tool_calls_", "unknown_field"),
    (chat_with(**{f"zz{i}": 1 for i in range(17)}), 400, "zz16", "unknown_field"),
    (chat_with(**{"a\r\nb": 1}), 400, "a\r\nb", "unknown_field"),
    (chat_with(prompt="x"), 400, "prompt", "unknown_field"),
    (chat_with(response_format={"type": "text", "zz": 1}), 400, "response_format.zz", "unknown_field"),
    (message(role="user", content="x", tool_calls=[{}]), 400, "messages[0].tool_calls[0].function", "invalid_value"),
    (message(role="tool", content="x"), 400, "messages", "chat_template_refused"),
    (chat_with(messages=[{"role": "user", "content": "word " * 4000}]), 400, "messages", "context_length_exceeded"),
    (chat_with(messages=[{"role": "user", "content": "x" * 70_000}]), 400, "messages", "context_length_exceeded"),
    (chat_with(max_tokens=600), 400, "max_tokens", "context_length_exceeded"),
    (chat_with(max_completion_tokens=600), 400, "max_completion_tokens", "context_length_exceeded"),
    (chat_with(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (chat_with(max_tokens=-5), 400, "max_tokens", "invalid_value"),
    (chat_with(max_tokens=1.5), 400, "max_tokens", "invalid_value"),
    (chat_with(max_tokens="10"), 400, "max_tokens", "invalid_value"),
    (chat_with(max_tokens=True), 400, "max_tokens", "invalid_value"),
    (chat_with(max_tokens=10**30), 400, "max_tokens", "invalid_value"),
    (chat_with(temperature=-1), 400, "temperature", "invalid_request"),
    (chat_with(temperature=2.5), 400, "temperature", "invalid_request"),
    (chat_with(temperature=1e300), 400, "temperature", "invalid_request"),
    (chat_with(temperature="hot"), 400, "temperature", "invalid_value"),
    (chat_with(temperature=True), 400, "temperature", "invalid_value"),
    (chat_with(temperature=[1]), 400, "temperature", "invalid_value"),
    (chat_with(top_p=0), 400, "top_p", "invalid_request"),
    (chat_with(top_p=1.1), 400, "top_p", "invalid_request"),
    (chat_with(top_k=-2), 400, "top_k", "invalid_value"),
    (chat_with(min_p=2), 400, "min_p", "invalid_request"),
    (chat_with(presence_penalty=3), 400, "presence_penalty", "invalid_request"),
    (chat_with(frequency_penalty=-3), 400, "frequency_penalty", "invalid_request"),
    (chat_with(repetition_penalty=0), 400, "repetition_penalty", "invalid_request"),
    (chat_with(seed=2**63), 400, "seed", "invalid_value"),
    (chat_with(seed=1.5), 400, "seed", "invalid_value"),
    (chat_with(n=0), 400, "n", "invalid_value"),
    (chat_with(n=17), 400, "n", "invalid_request"),
    (chat_with(n=True), 400, "n", "invalid_value"),
    (chat_with(stop=["x"] * 17), 400, "stop", "invalid_value"),
    (chat_with(stop=[""]), 400, "stop", "invalid_request"),
    (chat_with(stop="x" * 300), 400, "stop", "invalid_request"),
    (chat_with(stop=5), 400, "stop", "invalid_value"),
    (chat_with(stop=[5]), 400, "stop", "invalid_value"),
    (chat_with(stop_token_ids=[-1]), 400, "stop_token_ids", "invalid_value"),
    (chat_with(stop_token_ids=[100_000]), 400, "stop_token_ids", "invalid_request"),
    (chat_with(stop_token_ids=list(range(65))), 400, "stop_token_ids", "invalid_value"),
    (chat_with(min_tokens=9, max_tokens=5), 400, "min_tokens", "invalid_request"),
    (chat_with(logit_bias=[1]), 400, "logit_bias", "invalid_value"),
    (chat_with(logit_bias={"x": 1}), 400, "logit_bias", "invalid_value"),
    (chat_with(logit_bias={"5": "a"}), 400, "logit_bias", "invalid_value"),
    (chat_with(logit_bias={"5": 101}), 400, "logit_bias", "invalid_request"),
    (chat_with(logit_bias={"100000": 1}), 400, "logit_bias", "invalid_request"),
    (chat_with(top_logprobs=3), 400, "top_logprobs", "invalid_request"),
    (chat_with(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    (chat_with(logprobs=1), 400, "logprobs", "invalid_value"),
    (chat_with(stream="yes"), 400, "stream", "invalid_value"),
    (chat_with(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (chat_with(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unknown_field"),
    (chat_with(response_format="json"), 400, "response_format", "invalid_value"),
    (chat_with(response_format={"type": "xml"}), 400, "response_format.type", "invalid_value"),
    (chat_with(response_format={"type": "json_schema"}), 400, "response_format.json_schema", "invalid_value"),
    (chat_with(tools=[{"type": "function"}]), 400, "tools[0].function", "invalid_value"),
    (chat_with(tools=[{"type": "function", "function": {"name": "?"}}]), 400, "tools[0].function.name", "invalid_value"),
    (chat_with(tools=TOOLS * 200), 400, "tools", "invalid_value"),
    (chat_with(tools=TOOLS, tool_choice="required"), 400, "tool_choice", "unsupported"),
    (chat_with(tools=TOOLS, tool_choice={"type": "function"}), 400, "tool_choice.function.name", "invalid_value"),
    (chat_with(tools=TOOLS, tool_choice={"type": "custom"}), 400, "tool_choice.type", "invalid_value"),
    (
        chat_with(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}),
        400, "tool_choice.function.name", "invalid_value",
    ),
    (
        chat_with(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        400, "tool_choice.allowed_tools.tools", "invalid_value",
    ),
    (chat_with(tools=TOOLS, tool_choice="required", guided_regex="a"), 400, "tool_choice", "invalid_value"),
    (chat_with(guided_json={}, guided_regex="a"), 400, "guided_regex", "invalid_value"),
    (chat_with(structured_outputs={}), 400, "structured_outputs", "invalid_value"),
    (chat_with(structured_outputs={"json": {}, "regex": "a"}), 400, "structured_outputs", "invalid_value"),
    (chat_with(structured_outputs={"xml": "a"}), 400, "structured_outputs.xml", "unknown_field"),
    (chat_with(guided_choice=[]), 400, "guided_choice", "invalid_value"),
    (chat_with(guided_regex=""), 400, "guided_regex", "invalid_value"),
    (chat_with(regex="a", ebnf='root ::= "a"'), 400, "ebnf", "invalid_value"),
    (chat_with(truncation_side="right"), 400, "truncation_side", "unsupported"),
    (chat_with(guided_json="{"), 400, "guided_json", "invalid_value"),
    (chat_with(prompt_logprobs=1), 400, "prompt_logprobs", "unsupported"),
    (chat_with(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "invalid_value"),
    (chat_with(prompt_logprobs=50), 400, "prompt_logprobs", "invalid_value"),
    (chat_with(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "invalid_value"),
    (chat_with(bad_words=["x"]), 400, "bad_words", "unsupported"),
    (chat_with(allowed_token_ids=[1]), 400, "allowed_token_ids", "unsupported"),
    (chat_with(store=1), 400, "store", "invalid_value"),
    (chat_with(service_tier=7), 400, "service_tier", "invalid_value"),
    (chat_with(verbosity="loud"), 400, "verbosity", "invalid_value"),
    (chat_with(metadata={"a": 1}), 400, "metadata", "invalid_value"),
    (chat_with(user=7), 400, "user", "invalid_value"),
    (chat_with(session_id="x" * 300), 400, "session_id", "invalid_value"),
    (chat_with(reasoning_effort="hard"), 400, "reasoning_effort", "invalid_value"),
    (chat_with(tools=TOOLS, tool_choice="sometimes"), 400, "tool_choice", "invalid_value"),
    (chat_with(tool_choice="auto"), 400, "tool_choice", "invalid_value"),
    (chat_with(functions=[{"name": "f"}]), 400, "functions", "unsupported"),
    (chat_with(guided_json={}), 400, "guided_json", "unsupported"),
    (chat_with(best_of=3), 400, "best_of", "unsupported"),
    (chat_with(temprature=0.5), 400, "temprature", "unknown_field"),
    (chat_with(priority=1000), 400, "priority", "invalid_request"),
    (chat_with(chat_template="x"), 400, "chat_template", "unsupported"),
    (chat_with(chat_template_kwargs=5), 400, "chat_template_kwargs", "invalid_value"),
    (chat_with(cache_salt="x" * 300), 400, "cache_salt", "invalid_value"),
]  # fmt: skip


def prompt_of(prompt: Any, **values: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt, **values}).encode()


BAD_COMPLETIONS: list[tuple[bytes, int, str | None, str]] = [
    (b'{"model":"tiny"}', 400, "prompt", "invalid_value"),
    (prompt_of(""), 400, "prompt", "invalid_request"),
    (prompt_of([]), 400, "prompt", "invalid_value"),
    (prompt_of([[]]), 400, "prompt", "invalid_request"),
    (prompt_of({}), 400, "prompt", "invalid_value"),
    (prompt_of([1, "x"]), 400, "prompt", "invalid_value"),
    (prompt_of([True]), 400, "prompt", "invalid_value"),
    (prompt_of([-1]), 400, "prompt", "invalid_value"),
    (prompt_of([402]), 400, "prompt", "invalid_request"),
    (prompt_of([2**40]), 400, "prompt", "invalid_value"),
    (prompt_of(["x"] * 65), 400, "prompt", "invalid_value"),
    (prompt_of([5] * 600), 400, "prompt", "context_length_exceeded"),
    (prompt_of("x", suffix="y"), 400, "suffix", "unsupported"),
    (prompt_of("x", echo=True, logprobs=1), 400, "echo", "unsupported"),
    (prompt_of("x", logprobs=21), 400, "logprobs", "invalid_value"),
    (prompt_of("x", logprobs=True), 400, "logprobs", "invalid_value"),
    (prompt_of("x", messages=[]), 400, "messages", "unknown_field"),
]


async def test_unknown_fields_are_ignored_with_a_warning(running: Running) -> None:
    """Fields that no API declares are ignored, at the top level and in messages. A header names them."""
    content = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    body = chat_with(
        messages=[{"role": "user", "content": content, "mood": "sad"}], provider={"order": []}, max_tokens=1
    )
    for _ in range(2):
        status, _, headers = await running.post(CHAT, body)
        assert status == 200
        what, *fields = headers["X-Kvmesh-Warning"].split()
        assert what == "ignored:"
        assert sorted(fields) == ["messages[0].content[0].cache_control", "messages[0].mood", "provider"]
    _, answer, _ = await running.post(CHAT, chat_with(temprature=0.5))
    assert answer["error"]["message"].endswith("did you mean temperature?")


async def test_a_prediction_is_a_hint(running: Running) -> None:
    """A prediction is accepted in both forms, whole and streamed, with a warning that it is not used. It is validated like other fields."""
    parts = [{"type": "text", "text": "Hi"}]
    for content, stream in (("Hi", False), (parts, False), ("Hi", True)):
        body = chat_with(prediction={"type": "content", "content": content}, max_tokens=1, stream=stream)
        async with running.session.post(running.url + CHAT, data=body) as response:
            assert (response.status, response.headers["X-Kvmesh-Warning"]) == (200, "ignored: prediction")
            assert b"error" not in await response.read()
    status, _, headers = await running.post(CHAT, chat_with(prediction=None, max_tokens=1))
    assert status == 200 and "X-Kvmesh-Warning" not in headers
    status, answer, _ = await running.post(CHAT, chat_with(prediction={"type": "content"}))
    assert (status, answer["error"]["param"]) == (400, "prediction.content")


async def test_bad_input_is_refused_with_the_fields_name(running: Running) -> None:
    """The error has the right status, field and code. The request does not reach the mesh and does not count as an internal error."""
    for path, cases in ((CHAT, BAD_CHAT), (COMPLETIONS, BAD_COMPLETIONS)):
        for body, status, field, code in cases:
            got, answer, _ = await running.post(path, body)
            error = answer["error"]
            assert (got, error["param"], error["code"]) == (status, field, code), (body[:200], answer)
            assert error["message"]
            assert error["type"] in ("invalid_request_error", "not_found_error")
            assert len(json.dumps(answer)) < 1000
    assert not running.mesh.asks
    assert 'code="400",model="tiny"' in running.metrics()
    assert 'code="404",model="unknown"' in running.metrics()
    assert 'code="500"' not in running.metrics()


async def test_neutral_values_of_unsupported_fields_pass(running: Running) -> None:
    """Clients that send defaults of unsupported fields are not refused."""
    body = chat_with(
        best_of=1, use_beam_search=False, functions=None, include_stop_str_in_output=False, stop=None, n=None,
        parallel_tool_calls=True, tools=None, response_format={"type": "text"}, modalities=["text"], logit_bias={},
        service_tier="flex", store=True, verbosity="low", top_k=-1, prompt_cache_options={"mode": "implicit"},
    )  # fmt: skip
    assert (await running.post(CHAT, body))[0] == 200


async def test_a_body_too_large_is_413(model: ServedModel) -> None:
    """Also if the length was not announced."""
    async with frontend([model], FakeMesh(answer=lambda _: [2]), http=HttpSettings(body_bytes_max=2048)) as running:
        status, answer, _ = await running.post(CHAT, chat_with(user="x" * 4096))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b" " * 1024

        async with running.session.post(running.url + CHAT, data=pieces()) as response:
            assert response.status == 413


async def test_paths_that_do_not_exist(running: Running) -> None:
    """Unknown paths and methods give 404 and 405 with OpenAI's error body."""
    status, answer, _ = await running.post("/v1/nothing", {})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    async with running.session.get(running.url + CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["message"] == f"{CHAT} has no GET, only POST"


async def test_failures_before_the_first_token_give_an_error_status(model: ServedModel) -> None:
    """Refused requests get a 503 with Retry-After, lost ones a 502, streamed or not."""
    cases = [
        (Faults(place=[UnavailableError("none", reason="no_worker")]), 503, "no_worker", True),
        (Faults(place=[OverloadedError("full", retry_after_s=2.5)]), 503, "overloaded", True),
        (Faults(prefill=[LostError("gone", reason="worker_silent")] * 8), 502, "worker_silent", False),
        (Faults(prefill=[InternalError("a defect")]), 500, "internal", False),
    ]
    for faults, status, code, has_retry_after in cases:
        for is_stream in (False, True):
            fresh = Faults(place=list(faults.place), prefill=list(faults.prefill))
            mesh = FakeMesh(answer=lambda _: [2], faults=fresh)
            async with frontend([model], mesh) as running:
                got, answer, headers = await running.post(CHAT, chat_with(stream=is_stream))
                assert (got, answer["error"]["code"]) == (status, code)
                assert ("Retry-After" in headers) == has_retry_after
                assert f'code="{status}",model="tiny"' in running.metrics()


async def test_a_failure_in_a_stream_is_its_last_event(model: ServedModel) -> None:
    """The last event is a typed error, without [DONE]. The response is complete, and the next request on the connection is answered."""
    tokens = tokens_of(model.text, TEXT)
    mesh = FakeMesh(answer=lambda _: tokens, faults=cut_off(4))
    async with frontend([model], mesh) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for is_stream in (True, False):
            body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": is_stream}).encode()
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (CHAT.encode(), len(body), body)
            )
        assert b"cannot_continue" in await reader.readuntil(b"0\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()
        mesh.faults = cut_off(4)
        events = await running.events(CHAT, {"model": "tiny", "messages": MESSAGES})
        assert events[-1]["error"] == {
            "message": CUT_OFF, "type": "server_error", "param": "seed", "code": "cannot_continue",
        }  # fmt: skip
        assert "[DONE]" not in events
        assert 'code="502",model="tiny"' in running.metrics()


async def test_internal_errors_show_only_an_id(model: ServedModel) -> None:
    """The client gets no stack trace."""

    def broken(_: Generation) -> list[int]:
        raise AssertionError

    mesh = FakeMesh(answer=broken)
    async with frontend([model], mesh) as running:
        running.pipeline.prepare = None  # type: ignore[assignment,method-assign]
        status, answer, headers = await running.post(CHAT, chat_with())
        assert status == 500
        assert answer["error"]["message"] == f"internal error {headers['x-request-id']}"


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_disconnect_cancels_the_request(model: ServedModel, is_stream: bool, phase: str) -> None:
    """The request is cancelled in every phase, streamed or not."""
    mesh = FakeMesh(answer=lambda _: [50] * 400, step_s=0.01, faults=Faults(prefill_hangs=phase == "prefill"))
    async with frontend([model], mesh) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = chat_with(stream=is_stream, max_tokens=400)
        writer.write(http_request(body))
        await wait_for(lambda: mesh.prefilling if phase == "prefill" else mesh.running)
        writer.close()
        await wait_for(lambda: mesh.settled() == [(1, ReportKind.CANCELLED)])
        await wait_for(lambda: not mesh.running and not mesh.prefilling and not running.pipeline.in_flight)
        assert 'code="499",model="tiny"' in running.metrics()


async def half_closed(port: int, *requests: bytes) -> bytes:
    """Sends the requests, shuts down the write side, and returns all data that the server sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        data = await reader.read()
    writer.close()
    return data


@pytest.mark.parametrize("step_s", [0.0, 0.02])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_half_closed_connection_gets_its_answer(model: ServedModel, is_stream: bool, step_s: float) -> None:
    """The client gets the whole answer and then the end of the connection, also if the request takes longer than the server's check whether
    the client is alive."""
    tokens = tokens_of(model.text, "one two three")
    async with frontend([model], FakeMesh(answer=lambda _: tokens, step_s=step_s)) as running:
        data = await half_closed(running.port, http_request(chat_with(stream=is_stream)))
        while data.startswith(PROBE):
            data = data.removeprefix(PROBE)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        if is_stream:
            lines = [line for line in dechunked(data).split(b"\n\n") if line]
            assert lines.pop() == b"data: [DONE]"
            assert content([json.loads(line[6:]) for line in lines]) == "one two three"
        else:
            whole = json.loads(data.partition(b"\r\n\r\n")[2])
            assert whole["choices"][0]["message"]["content"] == "one two three"
        assert running.mesh.settled() == [(1, ReportKind.FINISHED)]


async def test_requests_before_a_half_close_are_all_answered(running: Running) -> None:
    """Two requests on one connection are answered. An incomplete request gets no answer, nor does a connection without requests."""
    both = http_request(chat_with(stream=True)) + http_request(chat_with(stream=True))
    data = await half_closed(running.port, both)
    assert data.count(b"data: [DONE]") == 2
    assert await half_closed(running.port, http_request(chat_with())[:-5]) == b""
    assert await half_closed(running.port) == b""
    await wait_for(lambda: not running.pipeline.in_flight)


async def test_http_1_0_gets_no_interim_responses(model: ServedModel) -> None:
    """HTTP/1.0 has no interim responses, so the server sends none to a half-closed connection."""
    tokens = tokens_of(model.text, "one two three")
    async with frontend([model], FakeMesh(answer=lambda _: tokens, step_s=0.02)) as running:
        data = await half_closed(running.port, http_request(chat_with(), version="1.0"))
        assert data.startswith(b"HTTP/1.0 200 OK\r\n") and b"100 Continue" not in data


async def test_a_half_closed_client_that_disconnects_later(model: ServedModel) -> None:
    """The client is alive at first. After it closes its socket, the reset in response to the next write cancels its request."""
    mesh = FakeMesh(answer=lambda _: [50] * 400, step_s=0.05)
    async with frontend([model], mesh) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http_request(chat_with(stream=True, max_tokens=400)))
        writer.write_eof()
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await wait_for(lambda: mesh.settled() == [(1, ReportKind.CANCELLED)])
        await wait_for(lambda: not running.pipeline.in_flight)


async def test_a_slow_client_does_not_delay_others_and_gets_everything(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are merged while it does not read. Other streams continue, and in the end no text is missing."""
    monkeypatch.setattr(streams, "BUFFER_BYTES_MAX", 4096)
    word = tokens_of(model.text, "three ", ends=False)
    count = 20_000
    large = replace(model, context_tokens_max=200_000)
    mesh = FakeMesh(answer=lambda g: word * ((g.sampling.max_tokens or 0) // len(word)), tokens_per_step=len(word))
    async with frontend([large], mesh) as running:
        slow = small_socket(running.port)
        body = chat_with(stream=True, max_tokens=count * len(word))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(slow, http_request(body, more="Connection: close\r\n"))
        await wait_for(lambda: mesh.running)
        events = await running.events(CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 10 * len(word)})
        assert content(events) == "three " * 10
        async with asyncio.timeout(90):
            while mesh.running:
                await asyncio.sleep(0.01)
            data = b""
            while piece := await loop.sock_recv(slow, 1 << 16):
                data += piece
        slow.close()
        lines = [line for line in dechunked(data).split(b"\n\n") if line]
        assert lines.pop() == b"data: [DONE]"
        assert content([json.loads(line[6:]) for line in lines]) == "three " * count
        assert len(lines) < count


def dechunked(data: bytes) -> bytes:
    """Returns the body of a chunked response."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body
        body += rest[:length]
        rest = rest[length + 2 :]


async def test_a_client_that_never_reads_is_cut_off(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an answer waits for its client only for a limited time."""
    monkeypatch.setattr(streams, "BUFFER_BYTES_MAX", 4096)
    control = next(i for i in range(300) if model.text.token_bytes(i) == b"\x01")  # Each takes six bytes of JSON.
    large = replace(model, context_tokens_max=4_000_000)
    mesh = FakeMesh(answer=lambda _: [control] * 2_000_000, tokens_per_step=20_000)
    async with frontend([large], mesh, http=HttpSettings(stalled_client_timeout_s=0.3)) as running:
        stuck = small_socket(running.port)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stuck, http_request(chat_with(stream=True)))
        await wait_for(lambda: mesh.settled())
        await wait_for(lambda: 'code="499"' in running.metrics())
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while piece := await loop.sock_recv(stuck, 1 << 20):
                    data += piece
        assert data
        assert not data.endswith(b"0\r\n\r\n")
        stuck.close()


def small_socket(port: int) -> socket.socket:
    """Returns a connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    return connection


def http_request(body: bytes, *, version: str = "1.1", more: str = "") -> bytes:
    """Returns a chat request as bytes."""
    head = f"POST {CHAT} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_keep_alive_and_http_1_0(running: Running) -> None:
    """Two streams share one connection. HTTP/1.0 gets an unchunked stream that ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    body = chat_with(stream=True)
    for _ in range(2):
        writer.write(http_request(body))
        data = await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n"), PATIENCE_S)
        assert b"[DONE]" in data
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(http_request(body, version="1.0"))
    data = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert data.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in data.lower()
    writer.close()


async def test_sockets_do_not_wait_for_acknowledgements(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP_NODELAY is set. Without it a token may wait 40 ms for the previous one."""
    seen: list[int] = []
    run = running.pipeline.run

    async def look(*args: Any, **kwargs: Any) -> Any:
        for task_transport in list(transports()):
            seen.append(task_transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return await run(*args, **kwargs)

    def transports() -> list[Any]:
        return [
            each.get_extra_info("socket")
            for each in gc.get_objects()
            if type(each).__name__.endswith("SocketTransport")
            and (each.get_extra_info("sockname") or ("", 0))[1] == running.port
        ]

    monkeypatch.setattr(running.pipeline, "run", look)
    await running.events(CHAT, {"model": "tiny", "messages": MESSAGES})
    assert seen and all(seen)


async def test_request_ids_are_echoed(running: Running) -> None:
    """Responses have the client's request id, or a new one if the client's is invalid, also on errors."""
    _, _, headers = await running.post(CHAT, chat_with(), headers={"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    _, _, headers = await running.post(CHAT, b"{", headers={"x-request-id": "mine-2"})
    assert headers["x-request-id"] == "mine-2"
    _, body, headers = await running.post(CHAT, chat_with(), headers={"x-request-id": "x" * 500})
    assert body["id"] == f"chatcmpl-{headers['x-request-id']}"
    async with running.session.post(
        running.url + CHAT, data=chat_with(stream=True), headers={"x-request-id": "mine-3"}
    ) as response:
        assert response.headers["x-request-id"] == "mine-3"


async def test_health_and_metrics(model: ServedModel, running: Running) -> None:
    """The frontend is ready if it has a model. While it drains or has no model, it is not ready, and gives the reason."""
    async with running.session.get(running.url + "/health") as response:
        assert (response.status, (await response.json())["models"]) == (200, ["tiny"])
    await running.post(CHAT, chat_with())
    async with running.session.get(running.url + "/metrics") as response:
        text = await response.text()
    for line in (
        'kvmesh_frontend_requests_total{code="200",model="tiny"} 1.0',
        'kvmesh_frontend_ttft_seconds_count{model="tiny"} 1.0',
        f'kvmesh_frontend_itl_seconds_count{{model="tiny"}} {len(tokens_of(model.text, TEXT)) - 1}.0',
        f'kvmesh_frontend_output_tokens_total{{model="tiny"}} {len(tokens_of(model.text, TEXT))}.0',
        "kvmesh_frontend_inflight_requests 0.0",
    ):
        assert line in text
    assert 'kvmesh_frontend_prompt_tokens_total{model="tiny"}' in text
    await running.pipeline.drain()
    async with running.session.get(running.url + "/health") as response:
        assert (response.status, (await response.json())["status"]) == (503, "draining")
    status, _, headers = await running.post(CHAT, chat_with())
    assert (status, headers["Retry-After"]) == (503, "1")
    async with running.session.get(running.url + "/live") as response:
        assert response.status == 200
    async with (
        frontend([], FakeMesh(answer=lambda _: [2])) as empty,
        empty.session.get(empty.url + "/health") as response,
    ):
        assert response.status == 503


async def test_long_prompts_are_tokenised_in_a_thread(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread gives the same tokens."""
    large = replace(model, context_tokens_max=100_000)
    monkeypatch.setattr(prepare, "INLINE_CHARACTERS_MAX", 10)
    async with frontend([large], FakeMesh(answer=lambda _: [2])) as running:
        text = "Hello! How are you? " * 3000
        await running.post(COMPLETIONS, prompt_of(text))
        token_ids = model.text.tokenise(text, adds_special_tokens=True)
        assert running.mesh.generations[0].token_ids == token_ids
        assert len(token_ids) > 16_384
        assert list(running.mesh.asks[0].block_hashes) == block_hashes(token_ids, model.block_size_tokens)
