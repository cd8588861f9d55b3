"""The OpenAI API on a whole mesh of simulated engines, called by the official client."""

import base64
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import grpc.aio
import jsonschema
import numpy as np
import openai
import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.api.types.v1.sampling_pb2 import SamplingParams
from kvmesh.discovery.base import FRONTEND
from tests.integration.mesh import RunningMesh, argv_simulated, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer", "minimum": 18, "maximum": 65},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "uniqueItems": True},
        "friend": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    """Has separate prefill and decode workers, so that every feature is tested with KV that was handed off."""
    argv = argv_simulated("--prefill", "1", "--decode", "1")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: RunningMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def post(mesh: RunningMesh, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        async with session.post(mesh.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()


async def answer(client: openai.AsyncOpenAI, **options: Any) -> str:
    whole = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=2000, **options)
    assert whole.choices[0].finish_reason == "stop"
    return whole.choices[0].message.content or ""


async def test_json_schema_and_object(client: openai.AsyncOpenAI) -> None:
    """Every answer matches the schema, whole and streamed. The same seed gives the same answer, and different seeds different ones."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answers = [await answer(client, response_format=form, seed=seed, temperature=1) for seed in (*range(8), 0)]
    for text in answers:
        jsonschema.validate(json.loads(text), PERSON)
    assert answers[0] == answers[-1]
    assert len(set(answers)) > 4
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=form, seed=0, temperature=1, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answers[0]
    value = json.loads(await answer(client, response_format={"type": "json_object"}))
    assert isinstance(value, dict) and value


async def test_choices_with_structured_output(client: openai.AsyncOpenAI) -> None:
    """Each choice is a valid document, and they differ."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    whole = await client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=form, n=4, seed=5, temperature=1, max_tokens=2000
    )
    texts = {choice.message.content or "" for choice in whole.choices}
    assert len(texts) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": r"[a-f0-9]{8}-\d+"}, r"[a-f0-9]{8}-\d+"),
        ({"regex": r"[a-f0-9]{8}-\d+"}, r"[a-f0-9]{8}-\d+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "^(north|south) [1-9]$"}}, "(north|south) [1-9]"),
        ({"guided_json": json.dumps({"type": "boolean"})}, "true|false"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "type": "structural_tag",
                        "format": {
                            "type": "tag",
                            "begin": "<n>",
                            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                            "end": "</n>",
                        },
                    }
                }
            },
            r"<n>\d+</n>",
        ),
    ],
)
async def test_field_names_of_engines_for_constraints(
    client: openai.AsyncOpenAI, fields: dict[str, Any], pattern: str
) -> None:
    """Each name that an engine uses for a constraint works, in chats and completions."""
    assert re.fullmatch(pattern, await answer(client, extra_body=fields))
    completion = await client.completions.create(model="demo", prompt="Say", max_tokens=200, extra_body=fields)
    assert re.fullmatch(pattern, completion.choices[0].text)


async def test_unsupported_constraints_are_refused(mesh: RunningMesh) -> None:
    """A grammar, an unsupported schema keyword and an invalid expression each give a 400. None is ignored or gives a 5xx."""
    for fields, reason in (
        ({"guided_grammar": 'root ::= "a"'}, "unsupported"),
        ({"ebnf": 'root ::= "a"'}, "unsupported"),
        ({"guided_json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "unsupported"),
        ({"guided_regex": "(["}, "invalid_request"),
        ({"guided_json": {"type": "array", "items": {"type": "array", "minItems": "many"}}}, "invalid_request"),
    ):
        status, body = await post(mesh, "/v1/chat/completions", {"model": "demo", "messages": MESSAGES, **fields})
        assert (status, body["error"]["code"]) == (400, reason), body


async def test_echo_with_logprobs(client: openai.AsyncOpenAI) -> None:
    """With echo the prompt's tokens come first, with log-probabilities from the second on. The streamed answer is the same."""
    options: Any = {"model": "demo", "prompt": "One two three four", "max_tokens": 6, "echo": True, "logprobs": 2}
    whole = await client.completions.create(**options)
    choice = whole.choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.text_offset and found.top_logprobs
    assert whole.usage is not None
    assert len(found.tokens) == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert found.token_logprobs[0] is None and all(value < 0 for value in found.token_logprobs[1:])
    assert choice.text.startswith("One two three four")
    assert all(choice.text.startswith(token, at) for token, at in zip(found.tokens, found.text_offset, strict=True))
    tokens, offsets, text = [], [], ""
    async for chunk in await client.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens or []
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert (text, tokens, offsets) == (choice.text, found.tokens, found.text_offset)


async def test_scoring_a_prompt_alone(mesh: RunningMesh) -> None:
    """`max_tokens` 0 with echo scores a prompt without generating, as evaluation harnesses do."""
    body = {"model": "demo", "prompt": ["One two", "Three"], "max_tokens": 0, "echo": True, "logprobs": 0}
    status, found = await post(mesh, "/v1/completions", body)
    assert status == 200, found
    assert [choice["text"] for choice in found["choices"]] == ["One two", "Three"]
    for choice in found["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])
    assert found["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_have_vllms_format(mesh: RunningMesh) -> None:
    """Each prompt token except the first has its candidates by token id."""
    body = {"model": "demo", "messages": MESSAGES, "prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 2}
    status, found = await post(mesh, "/v1/chat/completions", body)
    assert status == 200, found
    entries = found["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(found["prompt_token_ids"])
    for token_id, entry in zip(found["prompt_token_ids"][1:], entries[1:], strict=True):
        assert entry[str(token_id)]["rank"] == 1
        assert len(entry) == 2


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.dot(np.asarray(one), np.asarray(other)))


async def test_embeddings(mesh: RunningMesh, client: openai.AsyncOpenAI) -> None:
    """Embeddings are unit vectors in the order of the inputs, equal for a text and its tokens, and closer for similar texts. Dimensions and
    encodings work."""
    texts = ["the sky is blue", "the sky is grey", "seventeen green lizards"]
    found = await client.embeddings.create(model="demo", input=texts)  # The client requests base64.
    vectors = [each.embedding for each in found.data]
    assert [each.index for each in found.data] == [0, 1, 2]
    assert all(math.isclose(cosine(vector, vector), 1, rel_tol=1e-5) for vector in vectors)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2]) + 0.2
    status, tokens = await post(mesh, "/tokenize", {"prompt": texts[0]})
    assert status == 200
    again = await client.embeddings.create(model="demo", input=tokens["tokens"], encoding_format="float")
    assert np.allclose(again.data[0].embedding, vectors[0], atol=1e-6)
    assert again.usage.prompt_tokens == tokens["count"]
    short = await client.embeddings.create(model="demo", input=texts[0], dimensions=64)
    expected = np.asarray(vectors[0][:64]) / np.linalg.norm(vectors[0][:64])
    assert np.allclose(short.data[0].embedding, expected, atol=1e-6)
    status, raw = await post(mesh, "/v1/embeddings", {"model": "demo", "input": texts[0], "encoding_format": "base64"})
    assert np.allclose(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), vectors[0], atol=1e-6)
    many = await client.embeddings.create(model="demo", input=[f"text {i}" for i in range(300)])
    assert len(many.data) == 300


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": [10**6]}, 400, "input"),
        ({"input": "word " * 20_000}, 400, "input"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "messages": 1}, 400, "messages"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": ["a"] * 3000}, 400, "input"),
    ],
)
async def test_wrong_embedding_requests(mesh: RunningMesh, body: dict[str, Any], status: int, field: str) -> None:
    """Invalid requests are refused, and the error names the field."""
    got, answer = await post(mesh, "/v1/embeddings", {"model": "demo", **body})
    assert (got, answer["error"]["param"]) == (status, field), answer


async def test_tokenize_and_detokenize(mesh: RunningMesh) -> None:
    """Tokenising works for text and for conversations, and detokenising restores the text. Invalid requests give a 400."""
    _, found = await post(mesh, "/tokenize", {"model": "demo", "prompt": "naïve 日本", "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    status, text = await post(mesh, "/v1/detokenize", {"model": "demo", "tokens": found["tokens"]})
    assert (status, text) == (200, {"prompt": "naïve 日本"})
    _, chat = await post(mesh, "/tokenize", {"messages": MESSAGES})
    _, whole = await post(
        mesh, "/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    )
    assert chat["tokens"] == whole["prompt_token_ids"]
    assert (await post(mesh, "/detokenize", {"tokens": [10**9]}))[0] == 400
    assert (await post(mesh, "/tokenize", {"prompt": "a", "messages": MESSAGES}))[0] == 400


async def test_continuing_the_last_message(mesh: RunningMesh) -> None:
    """The prompt ends where the assistant's message ends. The field excludes `add_generation_prompt`."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The weather is"}]
    body = {"model": "demo", "messages": messages, "continue_final_message": True, "max_tokens": 1}
    _, whole = await post(mesh, "/v1/chat/completions", body | {"return_token_ids": True})
    _, text = await post(mesh, "/detokenize", {"tokens": whole["prompt_token_ids"]})
    assert text["prompt"].endswith("The weather is")
    status, answer = await post(mesh, "/v1/chat/completions", body | {"add_generation_prompt": True})
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_usage_in_every_event(client: openai.AsyncOpenAI) -> None:
    """The token counts in events never decrease, and the last one is the total."""
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=10, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == 10 and len(set(counts)) > 2


async def test_stop_string_can_be_kept(mesh: RunningMesh) -> None:
    """With `include_stop_str_in_output` the text ends with the stop string."""
    body: dict[str, Any] = {"model": "demo", "prompt": "Once", "max_tokens": 30, "temperature": 0}
    _, free = await post(mesh, "/v1/completions", body)
    stop = free["choices"][0]["text"][10:13]
    _, kept = await post(mesh, "/v1/completions", body | {"stop": stop, "include_stop_str_in_output": True})
    _, cut = await post(mesh, "/v1/completions", body | {"stop": stop})
    assert kept["choices"][0]["text"] == cut["choices"][0]["text"] + stop


async def test_logit_bias(mesh: RunningMesh, client: openai.AsyncOpenAI) -> None:
    """A token with a large bias is always generated."""
    _, found = await post(mesh, "/tokenize", {"prompt": " hello", "add_special_tokens": False})
    token_id = str(found["tokens"][-1])
    whole = await client.completions.create(model="demo", prompt="Say", max_tokens=3, logit_bias={token_id: 100})
    _, word = await post(mesh, "/detokenize", {"tokens": [int(token_id)] * 3})
    assert whole.choices[0].text == word["prompt"]


async def test_headers_control_a_request(mesh: RunningMesh) -> None:
    """A timeout header ends a request, pins need a setting that allows them, and errors name an invalid header."""
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4}
    assert (await post(mesh, "/v1/chat/completions", body, **{"x-session-id": "s1"}))[0] == 200
    status, answer = await post(mesh, "/v1/chat/completions", body, **{"x-request-timeout": "soon"})
    assert (status, answer["error"]["param"]) == (400, "x-request-timeout")
    status, _ = await post(
        mesh, "/v1/chat/completions", body | {"max_tokens": 2000, "ignore_eos": True}, **{"x-request-timeout": "0.05"}
    )
    assert status == 504
    status, answer = await post(mesh, "/v1/chat/completions", body, **{"x-kvmesh-pin-decode": "nobody"})
    assert (status, answer["error"]["param"]) == (403, "x-kvmesh-pin-decode")


async def test_the_same_over_grpc(mesh: RunningMesh, client: openai.AsyncOpenAI) -> None:
    """Over gRPC, Embed returns the same vectors as over HTTP, Generate returns log-probabilities of the prompt, and Chat makes a forced tool
    call."""
    registry = mesh.target.registry()
    (frontend,) = (await registry.instances(FRONTEND)).instances
    await registry.aclose()
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        stub: Any = InferenceServiceStub(channel)
        vectors = await stub.Embed(pb.EmbedRequest(model="demo", texts=["a b", "c"], dimensions=32))
        over_http = await client.embeddings.create(model="demo", input=["a b", "c"], dimensions=32)
        for one, other in zip(vectors.embeddings, over_http.data, strict=True):
            assert np.allclose(one.values, other.embedding, atol=1e-6)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(pb.EmbedRequest(model="demo", texts=["a", ""]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "texts[1]" in (caught.value.details() or "")
        sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
        ids = pb.TokenIds(ids=[5, 6, 7, 8])
        generate = pb.GenerateRequest(
            model="demo", token_ids=ids, options=pb.GenerationOptions(sampling=sampling, choices=2, stream=True)
        )
        scored = [each for each in [each async for each in stub.Generate(generate)] if each.HasField("prompt_logprobs")]
        assert sorted(each.choice for each in scored) == [0, 1]
        assert all(len(each.prompt_logprobs.token_logprobs) == 3 for each in scored)
        chat = pb.ChatRequest(
            model="demo",
            messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")],
            tools=[pb.Tool(name="go", parameters=ParseDict(WEATHER, Struct()))],
            tool_choice=pb.TOOL_CHOICE_NAMED,
            tool_name="go",
        )
        calls = [call async for answer in stub.Chat(chat) for call in answer.tool_calls]
        assert [call.name for call in calls] == ["go"]
        jsonschema.validate(json.loads(calls[0].arguments), WEATHER)


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "move", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {"get_weather": WEATHER, "move": PLACE, "stop": {"type": "object"}}
NAMED: Any = {"type": "function", "function": {"name": "move"}}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_forced_tool_calls(client: openai.AsyncOpenAI, choice: Any, seed: int) -> None:
    """The answer consists only of calls with valid arguments, whole and streamed."""
    options: Any = {
        "model": "demo", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": seed, "temperature": 1,
    }  # fmt: skip
    whole = (await client.chat.completions.create(**options)).choices[0]
    calls = [call.function for call in whole.message.tool_calls or () if call.type == "function"]
    assert calls and whole.message.content is None and whole.finish_reason == "tool_calls"
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    if choice is NAMED:
        assert [call.name for call in calls] == ["move"]
    async with client.chat.completions.stream(**options) as stream:
        final = (await stream.get_final_completion()).choices[0]
    streamed = [call.function for call in final.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in streamed] == [(call.name, call.arguments) for call in calls]
    assert final.finish_reason == "tool_calls" and not final.message.content
    ids = {call.id for call in final.message.tool_calls or ()}
    assert len(ids) == len(calls)


async def test_one_call_at_most(client: openai.AsyncOpenAI) -> None:
    """With `parallel_tool_calls` false there is exactly one call, and only of an allowed tool if some are named."""
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]},
    }
    for choice, names in (("required", set(SCHEMAS)), (allowed, {"stop"})):
        for seed in range(5):
            whole = await client.chat.completions.create(
                model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed,
                temperature=1,
            )  # fmt: skip
            calls = whole.choices[0].message.tool_calls or []
            assert len(calls) == 1 and calls[0].type == "function" and calls[0].function.name in names


async def test_strict_tools_follow_their_schema_under_auto(client: openai.AsyncOpenAI) -> None:
    """The model's own marks open and close a call; the engine's grammar constrains the text between them."""
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]
    for seed in range(5):
        whole = await client.chat.completions.create(
            model="demo", messages=MESSAGES, tools=tools, seed=seed, temperature=1
        )
        calls = whole.choices[0].message.tool_calls or []
        assert calls and whole.choices[0].finish_reason == "tool_calls"
        for call in calls:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)


async def test_forced_call_cut_off_by_max_tokens(client: openai.AsyncOpenAI) -> None:
    """The partial arguments are returned, with the finish reason `length`."""
    whole = await client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=2
    )
    assert whole.choices[0].finish_reason == "length"
    calls = whole.choices[0].message.tool_calls or []
    assert len(calls) == 1 and calls[0].type == "function" and calls[0].function.arguments.startswith("{")
