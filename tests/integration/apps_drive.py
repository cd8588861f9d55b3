"""Calls of the official clients to a whole mesh with any engine: responses, messages, files and batches."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import jsonschema
import openai

from tests.integration.mesh import RunningMesh

WORDS: Any = [{"role": "user", "content": "tell me something " * 20}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def openai_client(mesh: RunningMesh) -> openai.AsyncOpenAI:
    """Returns a client without retries, which would hide failures."""
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)


def anthropic_client(mesh: RunningMesh) -> anthropic.AsyncAnthropic:
    """Returns a client without retries, which would hide failures."""
    return anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0)


async def converse_in_responses(mesh: RunningMesh) -> None:
    """Runs a conversation of two responses, the second one streamed. Checks that they are stored, can be deleted, and that a later prompt's
    beginning is cached."""
    async with openai_client(mesh) as client:
        first = await client.responses.create(model="demo", input="tell me something " * 20, max_output_tokens=20)
        assert first.output_text and first.usage is not None
        stream = await client.responses.create(
            model="demo", input="and more", previous_response_id=first.id, max_output_tokens=20, stream=True
        )
        events = [event async for event in stream]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        second = last.response
        assert second.output_text == text
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + 10
        assert (await client.responses.retrieve(second.id)).output_text == text
        # On a busy machine the router may choose another worker than for the first response, so the cache may take a few turns.
        cached, previous = second.usage.input_tokens_details.cached_tokens, second.id
        for _ in range(5):
            if cached:
                break
            turn = await client.responses.create(
                model="demo", input="more", previous_response_id=previous, max_output_tokens=5
            )
            assert turn.usage is not None
            cached, previous = turn.usage.input_tokens_details.cached_tokens, turn.id
        assert cached > 0
        await client.responses.delete(first.id)


async def force_in_responses(mesh: RunningMesh) -> None:
    """Forces a JSON schema and then a tool call, and sends the call's result."""
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": CITY, "strict": True}}
    tool: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    async with openai_client(mesh) as client:
        made = await client.responses.create(
            model="demo", input="Where?", text=form, max_output_tokens=200, temperature=0
        )
        jsonschema.validate(json.loads(made.output_text), CITY)
        options: Any = {"model": "demo", "tools": [tool], "max_output_tokens": 200, "temperature": 0}
        asked = await client.responses.create(
            input="Weather?", tool_choice="required", parallel_tool_calls=False, **options
        )
        (call,) = asked.output
        assert call.type == "function_call" and call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), CITY)
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        reply = await client.responses.create(
            input=result, previous_response_id=asked.id, tool_choice="none", **{**options, "max_output_tokens": 10}
        )
        assert reply.output_text and reply.usage is not None and reply.usage.output_tokens <= 10


async def converse_in_messages(mesh: RunningMesh) -> None:
    """Checks that the streamed message equals the whole one, and that the token count equals the prompt's tokens."""
    options: Any = {"model": "demo", "max_tokens": 20, "messages": WORDS, "extra_body": {"temperature": 0}}
    async with anthropic_client(mesh) as client:
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert whole.content[0].type == "text" and whole.content[0].text == text
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        counted = await client.messages.count_tokens(model="demo", messages=WORDS)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def force_in_messages(mesh: RunningMesh) -> None:
    """Forces a tool call, whole and streamed, checks its arguments, and sends its result."""
    options: Any = {
        "model": "demo", "max_tokens": 200, "messages": WORDS, "extra_body": {"temperature": 0},
        "tools": [{"name": "get_weather", "input_schema": CITY}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    async with anthropic_client(mesh) as client:
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
        for message in (await client.messages.create(**options), final):
            (block,) = message.content
            use = block.model_dump(include={"type", "id", "name", "input"})
            assert (message.stop_reason, use["type"], use["name"]) == ("tool_use", "tool_use", "get_weather")
            jsonschema.validate(use["input"], CITY)
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
        turns: Any = [
            *WORDS, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]  # fmt: skip
        reply = await client.messages.create(model="demo", max_tokens=5, messages=turns)
        assert reply.content[0].type == "text" and reply.usage.output_tokens <= 5


async def run_batch(
    mesh: RunningMesh, endpoint: Any, bodies: Sequence[dict[str, Any]], timeout_s: float = 60
) -> tuple[list[Any], list[Any]]:
    """Uploads a file of these requests with the ids c0, c1 and so on, and runs it. Returns the records of the output file and of the error
    file."""
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": each} for i, each in enumerate(bodies)]
    async with openai_client(mesh) as client:
        data = "\n".join(json.dumps(line) for line in lines).encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        async with asyncio.timeout(timeout_s):
            while (batch := await client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
                await asyncio.sleep(0.1)
        assert batch.status == "completed" and batch.request_counts is not None, batch
        assert batch.request_counts.total == len(lines)
        return await _records(client, batch.output_file_id), await _records(client, batch.error_file_id)


async def _records(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def run_good_and_bad(mesh: RunningMesh, endpoint: str, body: dict[str, Any], field: str) -> Any:
    """Runs a batch of a valid and an invalid line. The error names the field and does not affect the valid line. Returns the body of the
    valid line's response."""
    bodies = [body, {**body, "no_such_field": 1}]
    (good,), (bad,) = await run_batch(mesh, endpoint, bodies)
    assert (good["custom_id"], good["response"]["status_code"]) == ("c0", 200)
    assert good["response"]["body"][field]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("c1", 400)
    assert "no_such_field" in bad["response"]["body"]["error"]["message"]
    return good["response"]["body"]
