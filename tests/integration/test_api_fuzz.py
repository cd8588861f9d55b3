"""Bodies that no client would send: an answer or a 4xx with an error object, never a 5xx, and nothing left behind."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.frontend.models import ServedModel
from tests.frontend_mesh import FakeMesh, served_model, write_model
from tests.integration.test_frontend_http import frontend

ROUNDS = 1500
FEATURES = frozenset({"logprobs", "logit_bias", "structured_output", "prompt_logprobs"})
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -1e300, 2**31, 2**63 - 1, -(2**63), 10**25, "", "a", "required", "auto", "none",
    "text", "é\u0000\u202e", "x" * 5000, [], [[]], [None], ["a"], ["a", 1], [0], [-1], [[1], [2]], {}, {"a": {}}, {"type": "x"},
    {"type": "function", "function": {"name": "f"}}, {"type": "json_schema", "json_schema": {"schema": {}}}, {"5": 1},
    [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}],
    {"json": {}}, {"regex": "("}, {"choice": ["a"]}, {"include_usage": True, "continuous_usage_stats": True},
]  # fmt: skip
SAMPLING = (
    "n stop seed top_p top_k min_p logprobs max_tokens min_tokens temperature logit_bias stop_token_ids ignore_eos priority "
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar prompt_logprobs cache_salt "
    "truncate_prompt_tokens include_stop_str_in_output return_token_ids stream_options user metadata store session_id"
).split()
FIELDS = {
    "/v1/chat/completions": [
        *SAMPLING, "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "chat_template_kwargs",
        "continue_final_message", "add_generation_prompt", "documents", "reasoning_effort", "max_completion_tokens",
    ],
    "/v1/completions": [*SAMPLING, "prompt", "echo", "suffix", "add_special_tokens"],
    "/v1/embeddings": ["input", "dimensions", "encoding_format", "truncate_prompt_tokens", "priority", "user"],
    "/tokenize": ["prompt", "messages", "tools", "return_token_strs", "add_special_tokens", "add_generation_prompt"],
    "/detokenize": ["tokens", "model"],
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
GOOD: dict[str, list[Any]] = {
    "n": [1, 3], "stop": ["l", ["x", "lo"]], "seed": [5], "temperature": [0, 1.5], "logprobs": [1, True], "echo": [True],
    "max_tokens": [1, 9], "logit_bias": [{"5": 2}], "stream_options": [{"include_usage": True}], "return_token_ids": [True],
    "response_format": [{"type": "json_object"}], "guided_choice": [["a", "b"]], "include_stop_str_in_output": [True],
    "truncate_prompt_tokens": [1, -1], "continue_final_message": [True], "metadata": [{"a": "b"}], "session_id": ["s"],
    "prompt": ["a", ["a", "b"], [5, 6]], "tokens": [[5], []], "return_token_strs": [True], "parallel_tool_calls": [False],
    "messages": [[{"role": "user", "content": [{"type": "text", "text": "x"}]}]], "top_logprobs": [2], "stop_token_ids": [[7]],
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"x": {}}}}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=FEATURES)


def bent(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A value with some part of it replaced."""
    if rng.random() < 0.3 or depth > 3:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: bent(rng, value[key], depth + 1)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], bent(rng, value[at], depth + 1), *value[at + 1 :]]
    return rng.choice(ODD)


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", **BASES[path]}
    if path == "/v1/chat/completions" and rng.random() < 0.5:
        body["tools"] = TOOLS
        body["tool_choice"] = rng.choice(["auto", "required", {"type": "function", "function": {"name": "g"}}])
    for name in rng.sample(FIELDS[path], rng.choice((1, 1, 2))):
        is_good = name in GOOD and rng.random() < 0.6
        body[name] = rng.choice(GOOD[name]) if is_good else bent(rng, body.get(name, rng.choice(ODD)))
    if rng.random() < 0.2:
        body["stream"] = True
    return body


@pytest.mark.parametrize("seed", [1, 2])
async def test_mutated_bodies(model: ServedModel, seed: int, tmp_path: Path) -> None:
    """Over all endpoints that take a JSON object."""
    rng = random.Random(seed)
    texts = [
        "Hello!",
        '{"a": 1}',
        '<tool_call>\n{"name": "f", "arguments": {"x": [1',
        '[{"name": "g", "parameters": {}}]',
    ]
    answers = [model.text.tokenise(text, adds_special_tokens=False) for text in texts]
    statuses: dict[int, int] = {}
    async with frontend([model], FakeMesh(answer=lambda _: [*rng.choice(answers), 2])) as running:
        for _ in range(ROUNDS):
            path = rng.choice(sorted(FIELDS))
            body = body_of(rng, path)
            async with running.session.post(running.url + path, data=json.dumps(body).encode()) as response:
                text = await response.text()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status < 500, (path, body, text)
            if response.status >= 400:
                assert json.loads(text)["error"]["code"], (path, body, text)
            else:
                assert '"error"' not in text[:20] and "internal error" not in text, (path, body, text)
        assert running.pipeline.in_flight == 0
        assert not running.mesh.running and not running.mesh.handles
    assert statuses[200] > ROUNDS / 10 and statuses[400] > ROUNDS / 4
