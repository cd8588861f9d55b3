"""What the APIs have in common: each has its own form of reasoning, and tenants are isolated."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvmesh.clock import SystemClock
from services.frontend.access.access import Access
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.models import ServedModel
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import TEMPLATE, FakeMesh, served_model, tokens_of, write_model
from tests.integration.test_frontend_batches import chat_line, jsonl, read_lines, start_batch, wait_ended

THOUGHTS, TEXT = "Let me see.", "It is Paris."
ANSWER = f"<think>\n{THOUGHTS}\n</think>\n\n{TEXT}\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "Where?"}]


@pytest.fixture
async def thinking(tmp_path: Path) -> AsyncIterator[RunningApps]:
    """A model that writes reasoning before its answer and a call."""
    directory = write_model(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE + "{# <think> <tool_call> #}")
    model = served_model(directory, context_tokens_max=4096)
    answer = tokens_of(model.text, ANSWER + CALL)
    async with running_apps([model], FakeMesh(answer=lambda _: answer), tmp_path / "state") as running:
        yield running


async def test_responses_show_reasoning_as_an_item(thinking: RunningApps) -> None:
    """The reasoning item precedes the message and the call, whole and streamed. Its tokens are counted, and it can be sent back."""
    async with openai.AsyncOpenAI(base_url=f"{thinking.url}/v1", api_key="x", max_retries=0) as client:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
        whole = await client.responses.create(model="tiny", input="Where?", tools=[tool])
        async with client.responses.stream(model="tiny", input="Where?", tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for response in (whole, streamed):
            thought, message, call = response.output
            assert thought.type == "reasoning" and thought.content is not None
            assert thought.content[0].text.strip() == THOUGHTS
            assert message.type == "message" and response.output_text.strip() == TEXT
            assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
            assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        items: Any = [item.model_dump(exclude_none=True) for item in whole.output]
        result: Any = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "sunny"}
        again = await client.responses.create(model="tiny", input=[*USER, *items, result])
        assert again.status == "completed"


async def test_messages_show_reasoning_as_a_thinking_block(thinking: RunningApps) -> None:
    """The thinking block precedes the text and the call, whole and streamed."""
    async with anthropic.AsyncAnthropic(base_url=thinking.url, api_key="x", max_retries=0) as client:
        tool: Any = {"name": "get_weather", "input_schema": {"type": "object"}}
        whole = await client.messages.create(model="tiny", max_tokens=500, messages=USER, tools=[tool])
        async with client.messages.stream(model="tiny", max_tokens=500, messages=USER, tools=[tool]) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thought, text, call = message.content
            assert thought.type == "thinking" and thought.thinking.strip() == THOUGHTS
            assert text.type == "text" and text.text.strip() == TEXT
            assert call.type == "tool_use" and call.input == {"city": "Paris"}
            assert message.stop_reason == "tool_use"


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[RunningApps]:
    """A frontend with the keys `red` and `blue` of two tenants. Blue has a small quota."""
    model: ServedModel = served_model(write_model(tmp_path / "model"))
    keys = [
        {"tenant": "red", "key_sha256": hash_of("red")},
        {"tenant": "blue", "key_sha256": hash_of("blue"), "concurrent_requests": 1, "models": ["tiny"]},
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    access = Access(AccessSettings(keys_file=str(path)), SystemClock())
    apps = AppSettings(batches=QUICK)
    async with running_apps([model], answering(model), tmp_path / "state", apps=apps, access=access) as running:
        yield running


def client_of(running: RunningApps, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


async def test_tenants_cannot_access_each_others_data(tenants: RunningApps) -> None:
    """Responses, files and batches of another tenant do not exist for a tenant. Without a key all requests get a 401."""
    async with client_of(tenants, "red") as red, client_of(tenants, "blue") as blue:
        response = await red.responses.create(model="tiny", input="5")
        made = await start_batch(red, jsonl([chat_line(1)]))
        for attempt in (
            blue.responses.retrieve(response.id),
            blue.responses.create(model="tiny", input="6", previous_response_id=response.id),
            blue.files.retrieve(made.input_file_id),
            blue.files.content(made.input_file_id),
            blue.batches.retrieve(made.id),
            blue.batches.cancel(made.id),
            blue.batches.create(input_file_id=made.input_file_id, endpoint="/v1/responses", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert not [each async for each in blue.files.list()] and not [each async for each in blue.batches.list()]
        assert (await wait_ended(red, made.id)).status == "completed"
    for path in ("/v1/files", "/v1/batches", f"/v1/responses/{response.id}"):
        assert (await tenants.call("GET", path))[0] == 401
    body = {"model": "tiny", "max_tokens": 5, "messages": USER}
    status, answer, _ = await tenants.call("POST", "/v1/messages", body)
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert (await tenants.call("POST", "/v1/messages", body, headers={"x-api-key": "red"}))[0] == 200


async def test_a_batch_runs_within_its_owners_quota(tenants: RunningApps) -> None:
    """Blue may have one request at a time, so the lines of its batch run one after the other, and all are answered."""
    async with client_of(tenants, "blue") as blue:
        made = await start_batch(blue, jsonl(chat_line(i) for i in range(6)))
        batch = await wait_ended(blue, made.id)
        assert batch.request_counts.completed == 6
        output = await read_lines(blue, batch.output_file_id)
        assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(6)]
