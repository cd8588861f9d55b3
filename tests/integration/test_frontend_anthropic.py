"""The Messages API on loopback, called by the official client and over plain HTTP."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from kvmesh.core import ConstraintKind, Generation
from kvmesh.errors import LostError, OverloadedError
from services.frontend.models import ServedModel
from tests.frontend_apps import RunningApps, running_apps
from tests.frontend_mesh import CUT_OFF, FakeMesh, Faults, cut_off, served_model, tokens_of, write_model

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
TEXT = "Hello! naïve café 日本語 🙂👍🏽 one two three"
CALL = 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {"name": "get_weather", "description": "Weather.", "input_schema": {"type": "object"}}
USER: Any = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(
        write_model(tmp_path_factory.mktemp("model")),
        features=frozenset({"structured_output", "logprobs", "logit_bias"}),
        context_tokens_max=4096,
    )


@pytest.fixture
async def running(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    plain, call = tokens_of(model.text, TEXT), tokens_of(model.text, CALL)

    def answer(generation: Generation) -> list[int]:
        return call if "get_weather" in model.text.decode(generation.token_ids) else plain

    async with running_apps([model], FakeMesh(answer=answer), tmp_path) as running:
        yield running
    assert not running.mesh.running
    assert not running.mesh.handles


@pytest.fixture
async def client(running: RunningApps) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


def prompt(running: RunningApps) -> str:
    """Returns the text of the last prompt that reached the mesh."""
    text = running.pipeline.models.find("tiny").text
    return text.decode(running.mesh.generations[-1].token_ids, skip_special_tokens=False)


async def test_the_client_reads_a_message(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """The client gets text, stop reason and usage. The system prompt and sampling reach the worker."""
    message = await client.messages.create(
        model="tiny", max_tokens=100, messages=USER, metadata={"user_id": "u"}, stop_sequences=["zz"],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9},
    )  # fmt: skip
    (block,) = message.content
    assert block.type == "text" and block.text == TEXT
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    sent = running.mesh.generations[0]
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (0.5, 7, 0.9)
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.input_tokens == len(sent.token_ids) - 4
    assert message.usage.output_tokens == len(tokens_of(running.pipeline.models.find("tiny").text, TEXT))
    assert prompt(running).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert message._request_id


async def test_a_stream_equals_the_whole_message(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """The client's own accumulator builds the same message from a stream, for text and for calls."""
    for tools in ([], [TOOL]):
        whole = await client.messages.create(model="tiny", max_tokens=100, messages=USER, tools=tools)
        async with client.messages.stream(model="tiny", max_tokens=100, messages=USER, tools=tools) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == ("Wait." if tools else TEXT)
        left, right = final.model_dump(), whole.model_dump()
        for each in (left, right):
            del each["id"]
            for block in each["content"]:
                block.pop("id", None)
                block.pop("parsed_output", None)
        assert {**left, "usage": None} == {**right, "usage": None}
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.usage.input_tokens == whole.usage.input_tokens


async def test_events_come_in_the_documented_order(running: RunningApps) -> None:
    """Each block has a start, deltas and a stop with its index. Every event's name is its type."""
    events = await running.events(PATH, {**BODY, "tools": [TOOL]})
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1]
    assert events[0][1]["message"]["content"] == []
    arguments = [data["delta"]["partial_json"] for name, data in events if data.get("index") == 1 and "delta" in data]
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    plain = await running.events(PATH, BODY)
    assert "".join(data["delta"]["text"] for name, data in plain if name == "content_block_delta") == TEXT


async def test_tool_calls_and_results(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """A call is returned as tool_use. The call and its result can be sent back, and an error is marked for the model."""
    first = await client.messages.create(model="tiny", max_tokens=100, messages=USER, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    use = first.content[-1]
    assert use.type == "tool_use" and use.id
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    content: Any = [block.model_dump(exclude_none=True) for block in first.content]
    result: Any = [
        {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "storm"}],
            "is_error": True,
        },
        {"type": "text", "text": "And now?"},
    ]
    turns: Any = [*USER, {"role": "assistant", "content": content}, {"role": "user", "content": result}]
    await client.messages.create(model="tiny", max_tokens=100, messages=turns)
    shown = prompt(running)
    assert "assistant\nWait." in shown
    assert shown.index("tool\nError: storm") < shown.index("user\nAnd now?")


async def test_the_stop_reason_is_reported(running: RunningApps) -> None:
    """Reports `max_tokens`, or the stop sequence that ended the answer, whole and streamed."""
    for change, reason, stop in (
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zz", " one t"]}, "stop_sequence", " one t"),
    ):
        _, whole, _ = await running.call("POST", PATH, {**BODY, **change})
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
        events = await running.events(PATH, {**BODY, **change})
        assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


async def test_the_token_count_equals_the_prompts_usage(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """The count equals the prompt tokens of the same message. Counting generates nothing."""
    counted = await client.messages.count_tokens(model="tiny", messages=USER, system="Be brief.", tools=[TOOL])
    assert not running.mesh.asks
    await client.messages.create(model="tiny", max_tokens=9, messages=USER, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == len(running.mesh.generations[0].token_ids)


async def test_thinking_is_accepted_and_its_budget_is_not_enforced(running: RunningApps) -> None:
    """A warning says that the budget is not enforced. Thinking blocks of earlier turns are accepted."""
    body = {**BODY, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    status, _, headers = await running.call("POST", PATH, body)
    assert status == 200
    assert "budget_tokens is not enforced" in headers["x-kvmesh-warning"]
    status, _, headers = await running.call("POST", PATH, {**BODY, "thinking": {"type": "disabled"}})
    assert status == 200 and "x-kvmesh-warning" not in headers
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turns = [*USER, {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}, *USER]
    assert (await running.call("POST", PATH, {**BODY, "messages": turns}))[0] == 200
    assert "assistant\nYes." in prompt(running)


async def test_structured_output_reaches_the_worker(running: RunningApps) -> None:
    """The worker gets the schema of the request."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert (await running.call("POST", PATH, {**BODY, "output_config": {"format": form}}))[0] == 200
    constraint = running.mesh.generations[0].sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (ConstraintKind.JSON_SCHEMA, '{"type":"object"}')


async def test_a_limit_beyond_the_context_is_reduced(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """Clients send limits of 4096 and more by default. The worker gets the limit that the context allows, and a header reports it."""
    context = running.pipeline.models.find("tiny").context_tokens_max
    raw = await client.messages.with_raw_response.create(model="tiny", max_tokens=4096, messages=USER)
    sent = running.mesh.generations[-1]
    assert sent.sampling.max_tokens == context - len(sent.token_ids)
    assert raw.headers["x-kvmesh-max-tokens"] == str(sent.sampling.max_tokens)
    raw = await client.messages.with_raw_response.create(model="tiny", max_tokens=10, messages=USER)
    assert running.mesh.generations[-1].sampling.max_tokens == 10
    assert "x-kvmesh-max-tokens" not in raw.headers
    status, answer, _ = await running.call(
        "POST", PATH, {**BODY, "messages": [{"role": "user", "content": "word " * context}]}
    )
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_unknown_routes_have_anthropics_error_shape(running: RunningApps) -> None:
    """Also on other routes, if the client's headers show that it uses this API."""
    for path, headers in ((PATH + "/absent", {}), ("/v1/absent", {"anthropic-version": "2023-06-01"})):
        status, answer, _ = await running.call("GET", path, None, headers=headers)
        assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    status, answer, _ = await running.call("GET", PATH, None)
    assert (status, answer["error"]["type"]) == (405, "not_found_error")


async def test_failures_have_anthropics_shape(model: ServedModel, tmp_path: Path) -> None:
    """Errors have statuses and types that the client knows. A failure during a stream gives an error event."""
    cases: list[tuple[Faults, int, str, type[anthropic.APIStatusError]]] = [
        (Faults(place=[OverloadedError("full", retry_after_s=2)]), 503, "overloaded_error", anthropic.APIStatusError),
        (
            Faults(prefill=[LostError("gone", reason="worker_silent")] * 8),
            502,
            "api_error",
            anthropic.InternalServerError,
        ),
    ]
    for faults, status, word, kind in cases:
        mesh = FakeMesh(answer=lambda _: [2], faults=faults)
        async with running_apps([model], mesh, tmp_path) as running:
            async with anthropic.AsyncAnthropic(base_url=running.url, api_key="x", max_retries=0) as client:
                with pytest.raises(kind) as caught:
                    await client.messages.create(model="tiny", max_tokens=9, messages=USER)
            assert caught.value.status_code == status
            assert caught.value.body["error"]["type"] == word  # type: ignore[index]
    tokens = tokens_of(model.text, TEXT)
    mesh = FakeMesh(answer=lambda _: tokens, faults=cut_off(4))
    async with running_apps([model], mesh, tmp_path) as running:
        name, data = (await running.events(PATH, BODY))[-1]
        assert (name, data["error"]) == ("error", {"type": "api_error", "message": f"seed: {CUT_OFF}"})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"), ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}, "content[0].input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "content[0].type"),
    ({"temperature": 1.5}, "temperature"), ({"top_k": -1}, "top_k"), ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"system": 1}, "system"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"container": "c"}, "container"), ({"mcp_servers": [{}]}, "mcp_servers"), ({"n": 2}, "n"),
    ({"service_tier": 1}, "service_tier"), ({"stream": 1}, "stream"),
    ({"cache_control": {"type": "x"}}, "cache_control.type"),
]  # fmt: skip


async def test_bad_input_gives_an_error_with_the_field(running: RunningApps) -> None:
    """Every unknown, invalid or unsupported field gives an error that names it, and the request does not reach the mesh."""
    for change, field in BAD:
        status, answer, headers = await running.call("POST", PATH, {**BODY, **change})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (change, answer)
        assert field in answer["error"]["message"], (change, answer)
        assert headers["request-id"]
    assert not running.mesh.asks
    status, answer, _ = await running.call("POST", PATH, {**BODY, "model": "other"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, _ = await running.call("POST", COUNT_PATH, BODY)
    assert (status, "max_tokens" in answer["error"]["message"]) == (400, True)
    status, answer, _ = await running.call("POST", PATH, BODY, headers={"anthropic-version": "newest"})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
