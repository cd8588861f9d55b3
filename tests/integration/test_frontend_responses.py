"""The Responses API on loopback, called by the official client and over plain HTTP."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmesh.core import ConstraintKind, Generation
from kvmesh.errors import LostError
from services.frontend.api.responses import serve
from services.frontend.models import ServedModel
from services.frontend.settings import ResponsesSettings
from services.frontend.stores import responses
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import CUT_OFF, EOS, FakeMesh, Faults, cut_off, served_model, tokens_of, write_model
from tests.patience import PATIENCE_S

PATH = "/v1/responses"
TEXT = "Hello! naïve café 日本語 🙂👍🏽 one two three"
CALL = 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
BODY = {"model": "tiny", "input": "Hi"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(
        write_model(tmp_path_factory.mktemp("model")),
        features=frozenset({"structured_output", "logprobs", "logit_bias"}),
        context_tokens_max=4096,
    )


def answering(model: ServedModel, text: str = TEXT) -> FakeMesh:
    """Returns a mesh that always gives the same answer, or the call if the prompt has a tool."""
    plain, call = tokens_of(model.text, text), tokens_of(model.text, CALL)

    def answer(generation: Generation) -> list[int]:
        prompt = model.text.decode(generation.token_ids)
        return call if "get_weather" in prompt and "tool\n" not in prompt else plain

    return FakeMesh(answer=answer)


@pytest.fixture
async def running(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    async with running_apps([model], answering(model), tmp_path) as running:
        yield running
    assert not running.mesh.running
    assert not running.mesh.handles


@pytest.fixture
async def client(running: RunningApps) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt(running: RunningApps, number: int = -1) -> str:
    """Returns the text of a prompt that reached the mesh."""
    text = running.pipeline.models.find("tiny").text
    return text.decode(running.mesh.generations[number].token_ids, skip_special_tokens=False)


async def test_the_client_reads_an_answer(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """The response has the text, the usage and the request's fields. Sampling reaches the worker."""
    answer = await client.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", temperature=0.7, top_p=0.9, max_output_tokens=100,
        metadata={"a": "b"}, user="u",
    )  # fmt: skip
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.7)
    sampling = running.mesh.generations[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 0.9, 100)
    assert prompt(running).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


async def test_the_input_token_count_equals_the_usage(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """Also for a response that continues a conversation."""
    answer = await client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    assert answer.usage is not None
    counted = await client.responses.input_tokens.count(model="tiny", input="Hi", instructions="Be brief.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    more = await client.responses.create(model="tiny", input="More", previous_response_id=answer.id)
    counted = await client.responses.input_tokens.count(model="tiny", input="More", previous_response_id=answer.id)
    assert more.usage is not None and counted.input_tokens == more.usage.input_tokens


async def test_truncation_auto_drops_excess_tokens(running: RunningApps) -> None:
    """`auto` drops the first tokens of the prompt. Without it the request is refused."""
    context = running.pipeline.models.find("tiny").context_tokens_max
    long = {**BODY, "input": "word " * context, "max_output_tokens": 10}
    status, answer, _ = await running.call("POST", PATH, long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer, _ = await running.call("POST", PATH, {**long, "truncation": "auto"})
    assert (status, answer["truncation"]) == (200, "auto")
    assert answer["usage"]["input_tokens"] == context - 10


async def test_a_stream_equals_the_whole_answer(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """The client's own accumulator builds the same response from a stream."""
    async with client.responses.stream(model="tiny", input="Hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    whole = await client.responses.create(model="tiny", input="Hi")
    assert final.output_text == whole.output_text == TEXT
    assert final.usage == whole.usage
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


async def test_events_come_in_the_documented_order(running: RunningApps) -> None:
    """Events are numbered without gaps, each item has its opening and closing events, and the joined deltas are the text."""
    events = await running.events(PATH, {**BODY, "tools": [TOOL]})
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    names = [name.removeprefix("response.") for name, _ in events]
    assert [name for i, name in enumerate(names) if name != names[i - 1] or not name.endswith("delta")] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = events[-1][1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call"]
    assert "".join(data["delta"] for name, data in events if name.endswith("output_text.delta")) == "Wait."
    assert final["output"][1]["arguments"] == '{"city": "Paris"}'
    done = [data["item"] for name, data in events if name.endswith("output_item.done")]
    assert done == final["output"]
    assert (await running.call("GET", f"{PATH}/{final['id']}"))[1] == final


async def test_tool_calls_and_results(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """The result of a call can be sent with the id of the earlier response."""
    first = await client.responses.create(model="tiny", input="Weather?", tools=[TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
    second = await client.responses.create(
        model="tiny", tools=[TOOL], previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    )  # fmt: skip
    assert second.output_text == TEXT
    assert "user\nWeather?" in prompt(running)
    assert "assistant\nWait." in prompt(running)
    assert "tool\nsunny" in prompt(running)


async def test_structured_output_reaches_the_worker(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """The worker gets the schema of the request."""
    schema: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    answer = await client.responses.create(model="tiny", input="Hi", text={"format": schema})
    constraint = running.mesh.generations[0].sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (ConstraintKind.JSON_SCHEMA, '{"type":"object"}')
    assert answer.text is not None and answer.text.format is not None


async def test_a_conversation_continues_without_earlier_instructions(
    running: RunningApps, client: openai.AsyncOpenAI
) -> None:
    """Over three turns, the prompt has all earlier messages and only the instructions of the latest request."""
    first = await client.responses.create(model="tiny", input="One", instructions="Old.")
    second = await client.responses.create(model="tiny", input="Two", previous_response_id=first.id)
    await client.responses.create(model="tiny", input="Three", previous_response_id=second.id, instructions="New.")
    shown = prompt(running)
    assert shown.startswith("<|im_start|>system\nNew.")
    assert "Old." not in shown
    assert [shown.index(word) for word in ("One", "Two", "Three")] == sorted(map(shown.index, ("One", "Two", "Three")))
    assert shown.count(TEXT) == 2


async def test_stored_responses_are_retrieved_listed_and_deleted(
    running: RunningApps, client: openai.AsyncOpenAI
) -> None:
    """A retrieved response equals the original, and its input items come in pages. A deleted response can be neither retrieved nor continued."""
    items: Any = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Three"}]},
    ]
    made = await client.responses.create(model="tiny", input=items)
    assert (await client.responses.retrieve(made.id)).model_dump() == made.model_dump()
    listed = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
    shown = [item.model_dump()["content"][0]["text"] for item in listed]
    assert shown == ["One", "Two", "Three"]
    newest = await client.responses.input_items.list(made.id, limit=1)
    assert newest.data[0].id == listed[-1].id and newest.has_more
    await client.responses.delete(made.id)
    for attempt in (
        client.responses.retrieve(made.id),
        client.responses.delete(made.id),
        client.responses.input_items.list(made.id),
        client.responses.create(model="tiny", input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt


def everything_in(directory: Path) -> bytes:
    """Returns the bytes of all files in a directory."""
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def test_store_false_stores_nothing(running: RunningApps, client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """The response cannot be retrieved, and no file contains its text. Reasoning and calls can be sent back as items instead."""
    made = await client.responses.create(model="tiny", input="secret", store=False)
    assert made.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    assert b"secret" not in everything_in(tmp_path)
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    assert (await client.responses.create(model="tiny", input=items, store=False)).output_text == TEXT


async def test_the_store_survives_a_restart(model: ServedModel, tmp_path: Path) -> None:
    """Responses survive a restart, and two frontends share them."""
    async with running_apps([model], answering(model), tmp_path) as first:
        _, made, _ = await first.call("POST", PATH, BODY)
        async with running_apps([model], answering(model), tmp_path, instance_id="b") as second:
            status, _, _ = await second.call("POST", PATH, {**BODY, "previous_response_id": made["id"]})
            assert status == 200
    async with running_apps([model], answering(model), tmp_path) as again:
        assert (await again.call("GET", f"{PATH}/{made['id']}"))[1] == made


async def test_the_store_is_bounded(model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses are removed by total bytes, the least recently used first, and by age. A continued conversation keeps its first response."""
    monkeypatch.setattr(serve, "SWEEP_S", 0.05)
    settings = ResponsesSettings(stored_bytes_max=4000)
    async with running_apps([model], answering(model), tmp_path, apps=AppSettings(responses=settings)) as running:
        made = [(await running.call("POST", PATH, BODY))[1]["id"] for _ in range(3)]
        await running.call("POST", PATH, {**BODY, "previous_response_id": made[0]})
        await running.call("POST", PATH, BODY)
        found = [(await running.call("GET", f"{PATH}/{each}"))[0] for each in made]
        assert found == [200, 404, 404]
    with sqlite3.connect(tmp_path / "responses.sqlite") as connection:
        (total,) = connection.execute("SELECT size_bytes FROM totals").fetchone()
        assert connection.execute("SELECT sum(size_bytes) FROM responses").fetchone() == (total,)
        assert 0 < total <= 4000
    settings = ResponsesSettings(ttl_s=1)
    async with running_apps([model], answering(model), tmp_path, apps=AppSettings(responses=settings)) as running:
        async with asyncio.timeout(PATIENCE_S):
            with sqlite3.connect(tmp_path / "responses.sqlite") as connection:
                while connection.execute("SELECT size_bytes FROM totals").fetchone() != (0,):
                    await asyncio.sleep(0.05)
        assert (await running.call("GET", f"{PATH}/{made[0]}"))[0] == 404


async def test_chains_are_bounded_and_have_no_gap(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that is too long, or that lacks a response, is refused with its own error code."""
    monkeypatch.setattr(responses, "CHAIN_MAX", 2)
    async with running_apps([model], answering(model), tmp_path) as running:
        made: list[str] = []
        for _ in range(3):
            previous = {"previous_response_id": made[-1]} if made else {}
            made.append((await running.call("POST", PATH, {**BODY, **previous}))[1]["id"])
        status, answer, _ = await running.call("POST", PATH, {**BODY, "previous_response_id": made[2]})
        assert (status, answer["error"]["code"]) == (400, "conversation_too_long")
        await running.call("DELETE", f"{PATH}/{made[0]}")
        status, answer, _ = await running.call("POST", PATH, {**BODY, "previous_response_id": made[1]})
        assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
        assert answer["error"]["param"] == "previous_response_id"


async def test_a_file_of_a_later_version_is_refused(model: ServedModel, tmp_path: Path) -> None:
    """If the store's path was configured, the frontend does not start. Otherwise it runs without a store."""
    path = tmp_path / "responses.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    async with running_apps([model], answering(model), tmp_path) as running:
        status, answer, _ = await running.call("POST", PATH, {**BODY, "store": True})
        assert (status, answer["error"]["param"]) == (400, "store")
        assert (await running.call("POST", PATH, BODY))[1]["store"] is False
    settings = AppSettings(responses=ResponsesSettings(path=str(path)))
    with pytest.raises(Exception, match="later version"):
        async with running_apps([model], answering(model), tmp_path, apps=settings):
            pass


async def test_an_answer_that_hits_its_limit_is_incomplete(running: RunningApps) -> None:
    """The status is `incomplete`, whole and streamed."""
    _, whole, _ = await running.call("POST", PATH, {**BODY, "max_output_tokens": 3})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    events = await running.events(PATH, {**BODY, "max_output_tokens": 3})
    assert events[-1][0] == "response.incomplete"
    assert events[-1][1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_logprobs_are_included_on_request(running: RunningApps) -> None:
    """The message and the deltas of the stream have the log-probabilities."""
    body = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, whole, _ = await running.call("POST", PATH, body)
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode() == TEXT + EOS
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    events = await running.events(PATH, body)
    streamed = [entry for name, data in events if name.endswith("output_text.delta") for entry in data["logprobs"]]
    assert streamed == logprobs[:-1], "the token that ended the answer has no text of its own"
    assert logprobs == events[-1][1]["response"]["output"][0]["content"][0]["logprobs"]


async def test_a_failure_in_a_stream_is_its_last_event(model: ServedModel, tmp_path: Path) -> None:
    """The last event is response.failed with the error, and nothing is stored. Before the first event a failure is a status."""
    mesh = answering(model)
    mesh.faults = cut_off(4)
    async with running_apps([model], mesh, tmp_path) as running:
        events = await running.events(PATH, BODY)
        name, data = events[-1]
        assert name == "response.failed"
        assert data["response"]["status"] == "failed"
        assert data["response"]["error"] == {"code": "server_error", "message": CUT_OFF}
        assert (await running.call("GET", f"{PATH}/{data['response']['id']}"))[0] == 404
        mesh.faults = Faults(prefill=[LostError("gone", reason="worker_silent")] * 8)
        status, answer, _ = await running.call("POST", PATH, {**BODY, "stream": True})
        assert (status, answer["error"]["code"]) == (502, "worker_silent")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"), ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [1]}, "input[0]"),
    ({"input": [{"role": "nobody", "content": ""}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata"), ({"previous_response_id": "x"}, "previous_response_id"),
    ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "middle"}, "truncation"), ({"max_tool_calls": 0}, "max_tool_calls"), ({"store": 1}, "store"),
    ({"include": ["file_search_call.results"]}, "include[0]"), ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"service_tier": 1}, "service_tier"), ({"messages": []}, "messages"), ({"n": 2}, "n"),
    ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"), ({"top_k": -5}, "top_k"),
]  # fmt: skip


async def test_advisory_fields_pass(running: RunningApps) -> None:
    """Accepts fields that clients and gateways send and that do not change the answer."""
    advisory = {
        "max_tool_calls": 3, "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"},
        "service_tier": "priority", "safety_identifier": "s", "user": "u", "metadata": {"a": "b"},
        "truncation": "auto", "text": {"verbosity": "low"},
    }  # fmt: skip
    status, answer, headers = await running.call("POST", PATH, {**BODY, **advisory})
    assert status == 200, answer
    assert "X-Kvmesh-Warning" not in headers


async def test_bad_input_gives_an_error_with_the_field(running: RunningApps) -> None:
    """Every unknown, invalid or unsupported field gives an error that names it, and the request does not reach the mesh."""
    for change, field in BAD:
        status, answer, _ = await running.call("POST", PATH, {**BODY, **change})
        assert (status, answer["error"]["param"]) == (400, field), (change, answer)
    assert not running.mesh.asks
    assert 'code="500"' not in running.metrics()
    for path, status in ((f"{PATH}/nothing", 404), (f"{PATH}/resp_{'0' * 32}", 404)):
        assert (await running.call("GET", path))[0] == status
    made = (await running.call("POST", PATH, BODY))[1]["id"]
    for method, path, field in (
        ("POST", f"{PATH}/{made}/cancel", "response_id"),
        ("GET", f"{PATH}/{made}?stream=true", "stream"),
        ("GET", f"{PATH}/{made}/input_items?limit=0", "limit"),
        ("GET", f"{PATH}/{made}/input_items?after=x", "after"),
        ("GET", f"{PATH}/{made}/input_items?order=x", "order"),
    ):
        status, answer, _ = await running.call(method, path)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_structured_output_needs_a_capable_model(model: ServedModel, tmp_path: Path) -> None:
    """The error names the field as this API does."""
    poor = replace(model, features=frozenset())
    async with running_apps([poor], answering(model), tmp_path) as running:
        status, answer, _ = await running.call("POST", PATH, {**BODY, "text": {"format": {"type": "json_object"}}})
        assert (status, answer["error"]["param"]) == (400, "text.format")


@pytest.mark.parametrize("answer_text", ['[{"', '[{"name": "get_weather", "parameters": {}}, {"'])
async def test_a_forced_call_that_was_cut_off_gives_no_text(
    model: ServedModel, tmp_path: Path, answer_text: str
) -> None:
    """Neither the deltas nor the message contain the punctuation of the list of calls."""
    tokens = tokens_of(model.text, answer_text, ends=False)
    body = {**BODY, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": len(tokens)}
    async with running_apps([model], FakeMesh(answer=lambda _: tokens), tmp_path) as running:
        events = await running.events(PATH, body)
        assert not [data["delta"] for name, data in events if name.endswith("output_text.delta")]
        _, whole, _ = await running.call("POST", PATH, body)
        for response in (whole, events[-1][1]["response"]):
            assert response["status"] == "incomplete"
            texts = [part["text"] for item in response["output"] for part in item.get("content") or []]
            assert not any(texts)
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            assert len(calls) == answer_text.count("}}")
