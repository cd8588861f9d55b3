"""Structured output, forced tools and scored prompts on vLLM, with separate prefill and decode workers and no compiler on PATH."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from tests.integration import apps_drive
from tests.integration.mesh import RunningMesh, running_mesh
from tests.integration.no_compilers import compiled_files, environment_without_compilers
from tests.integration.test_kserve_triton import drive
from tests.integration.test_worker_commands import check_roles
from tests.integration.vllm_model import HIDDEN, add_tokenizer, make_model
from tests.parts import require_part

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """One prefill and two decode workers."""
    require_part("vllm")
    require_part("nixl")
    engine = "--engine-args=--no-vllm-json-whitespace --vllm-dtype float32 --vllm-can-switch-role"
    argv = ("--greeting", "", "--decode", "2", engine)
    workshop = tmp_path_factory.mktemp("workshop")
    env = environment_without_compilers(workshop)
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv, ready_timeout_s=180, env=env) as mesh:
        yield mesh
    assert compiled_files(workshop) == [], "a request caused a compilation"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: RunningMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_tritonclient(mesh: RunningMesh) -> None:
    """The Open Inference Protocol works, whole and streamed, with separate prefill and decode workers."""
    seen = await drive(mesh)
    assert seen["about"]["model_ready"] == [True, True]
    assert seen["unary"]["whole"][0].startswith("one two three") and len(seen["unary"]["text"]) == 2
    assert seen["unary"]["errors"]["temperature"][0] == "StatusCode.INVALID_ARGUMENT"
    by_id = {call_id: final for call_id, _, final, _ in seen["streaming"]["mixed"]}
    assert {call_id: by_id[call_id] for call_id in "abc"} == {"a": True, "b": True, "c": True}
    assert seen["asynchronous"]["cancelled"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_regex": r"[a-f]{4}-[0-9]{2}"}, r"[a-f]{4}-[0-9]{2}"),
        ({"guided_grammar": 'root ::= "up" | "down"'}, "up|down"),
        ({"guided_json": {"type": "object", "properties": {}, "additionalProperties": False}}, r"\{\s*\}"),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
async def test_constraints(client: openai.AsyncOpenAI, fields: dict[str, Any], pattern: str) -> None:
    """The answer matches the constraint when the prompt's KV comes from the prefill worker."""
    whole = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=60, extra_body=fields)
    assert re.fullmatch(pattern, whole.choices[0].message.content or ""), whole


async def test_json_schema(client: openai.AsyncOpenAI) -> None:
    """The answer matches the schema."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    whole = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=200, response_format=form, temperature=0
    )
    jsonschema.validate(json.loads(whole.choices[0].message.content or ""), WEATHER)


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tools(client: openai.AsyncOpenAI, stream: bool) -> None:
    """With `required` and with a named tool, the calls have valid arguments, whole and streamed."""
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        options: Any = {
            "model": "demo", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300,
            "parallel_tool_calls": False, "temperature": 0,
        }  # fmt: skip
        if stream:
            async with client.chat.completions.stream(**options) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**options)).choices[0].message
        (call,) = message.tool_calls
        if call.function.name == "get_weather":
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        else:
            assert choice == "required" and json.loads(call.function.arguments) == {}


async def test_strict_tools_by_structural_tags(client: openai.AsyncOpenAI) -> None:
    """Calls that the model makes by itself have valid arguments. The model may also answer with text."""
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]
    whole = await client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=tools, max_tokens=200, temperature=0
    )
    message = whole.choices[0].message
    assert message.content or message.tool_calls
    for call in message.tool_calls or ():
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


async def test_a_scored_text_has_the_logprobs_it_was_generated_with(client: openai.AsyncOpenAI) -> None:
    """Greedy tokens scored as a prompt have the same log-probabilities, whichever worker computed them."""
    prompt = "The weather today is nice and the sky is very blue, so we go out and"
    options: Any = {"model": "demo", "temperature": 0, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    made: Any = (await client.completions.create(prompt=prompt, max_tokens=8, **options)).choices[0]
    token_ids = [*made.prompt_token_ids, *made.token_ids]
    scored = (await client.completions.create(prompt=token_ids, max_tokens=0, echo=True, **options)).choices[0]
    found = scored.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    assert found.token_logprobs[0] is None and len(found.tokens) == len(token_ids)
    assert found.tokens[-8:] == made.logprobs.tokens
    assert found.token_logprobs[-8:] == pytest.approx(made.logprobs.token_logprobs, abs=2e-2)
    # Greedy tokens have the highest probability.
    assert [max(top, key=lambda token: top[token]) for top in found.top_logprobs[-8:]] == found.tokens[-8:]


async def test_seeded_prompts_that_take_many_steps(client: openai.AsyncOpenAI) -> None:
    """Long prompts are scored and sampled at the same time, by one request and by many. The same seed gives the same tokens."""
    prompts = [[300 + (number * 7 + index * 11) % 1700 for index in range(1200)] for number in range(4)]
    options: Any = {
        "model": "demo",
        "max_tokens": 8,
        "temperature": 1,
        "seed": 5,
        "extra_body": {"return_token_ids": True},
    }
    scored = await client.completions.create(prompt=prompts, echo=True, logprobs=1, **options)
    again = await asyncio.gather(*(client.completions.create(prompt=each, n=3, **options) for each in prompts * 2))
    answers: Any = [[choice.token_ids for choice in whole.choices] for whole in again]
    assert answers[:4] == answers[4:]
    assert [whole[0] for whole in answers[:4]] == [choice.token_ids[-8:] for choice in scored.choices]


async def test_invalid_expressions_are_refused(client: openai.AsyncOpenAI) -> None:
    """An invalid regular expression is the client's error."""
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=5, extra_body={"guided_regex": "(["}
        )


async def test_responses(mesh: RunningMesh) -> None:
    """The Responses API supports a stored conversation, a schema and a forced call."""
    await apps_drive.converse_in_responses(mesh)
    await apps_drive.force_in_responses(mesh)


async def test_messages(mesh: RunningMesh) -> None:
    """The Messages API works with the anthropic client: whole, streamed, token counts, and a forced call."""
    await apps_drive.converse_in_messages(mesh)
    await apps_drive.force_in_messages(mesh)


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "seed": 4}, "choices"),
        ("/v1/completions", {"prompt": "say it", "max_tokens": 3, "logprobs": 1}, "choices"),
        ("/v1/responses", {"input": "say it", "max_output_tokens": 3}, "output"),
    ],
)
async def test_a_batch(mesh: RunningMesh, endpoint: str, body: dict[str, Any], field: str) -> None:
    """Batches run on real engines, and invalid lines do not affect others. The last test below covers embeddings."""
    body = await apps_drive.run_good_and_bad(mesh, endpoint, {"model": "demo", **body}, field)
    assert body["usage"]["total_tokens"] > 2


async def test_a_worker_changes_roles(mesh: RunningMesh) -> None:
    """A worker changes its role under load, and the mesh gives the same tokens as before."""
    await check_roles(mesh)


async def test_embeddings_of_a_pooling_model(tmp_path: Path) -> None:
    """A mesh of one worker serves a model that only computes embeddings."""
    require_part("vllm")
    model = add_tokenizer(make_model(tmp_path / "vectors"))
    engine = "--engine-args=--vllm-runner pooling --no-vllm-has-kv-transfer"
    argv = ("--greeting", "", "--model", str(model), "--prefill", "0", "--decode", "1", engine)
    async with running_mesh(tmp_path, *argv, ready_timeout_s=180) as mesh:
        async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
            texts = ["the sky is blue", "the sea is deep", "the sky is blue"]
            found = await client.embeddings.create(model="vectors", input=texts)
            vectors = [each.embedding for each in found.data]
            assert len(vectors[0]) == HIDDEN
            assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
            assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
            assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-3)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="vectors", input="a", dimensions=8)
            assert "atryoshka" in str(caught.value)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="vectors", prompt="a")
        made = await apps_drive.run_good_and_bad(mesh, "/v1/embeddings", {"model": "vectors", "input": texts}, "data")
        assert made["data"][1]["embedding"] == pytest.approx(vectors[1], abs=1e-5)
