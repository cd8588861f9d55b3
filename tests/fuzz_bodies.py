"""Generates invalid request bodies from a seed: valid bodies with a part replaced, and bytes that are not JSON."""

import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 0.5, -1e300, 2**31, 2**63 - 1, -(2**63), 10**25, "", "a", "required", "auto", "none",
    "text", "é\u0000\u202e", "x" * 5000, [], [[]], [None], ["a"], ["a", 1], [0], [-1], [[1], [2]], {}, {"a": {}}, {"type": "x"},
    {"type": "function", "function": {"name": "f"}}, {"type": "json_schema", "json_schema": {"schema": {}}}, {"5": 1},
    [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}],
    {"json": {}}, {"regex": "("}, {"choice": ["a"]}, {"include_usage": True, "continuous_usage_stats": True},
]  # fmt: skip
SAMPLING = (
    "n stop seed top_p top_k min_p logprobs max_tokens min_tokens temperature logit_bias stop_token_ids ignore_eos priority "
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf prompt_logprobs cache_salt "
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
APP_FIELDS = {
    "/v1/responses": [
        "input", "instructions", "tools", "tool_choice", "text", "reasoning", "previous_response_id", "store", "metadata", "include",
        "max_output_tokens", "temperature", "top_p", "top_logprobs", "truncation", "user", "background", "parallel_tool_calls",
    ],
    "/v1/messages": [
        "messages", "system", "tools", "tool_choice", "thinking", "output_config", "max_tokens", "temperature", "top_p", "top_k",
        "stop_sequences", "metadata", "service_tier", "cache_control",
    ],
    "/v1/messages/count_tokens": ["messages", "system", "tools", "tool_choice", "thinking"],
    "/v1/batches": ["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"],
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "n": [1, 3], "stop": ["l", ["x", "lo"]], "seed": [5], "temperature": [0, 1.5], "logprobs": [1, True], "echo": [True],
    "max_tokens": [1, 9], "logit_bias": [{"5": 2}], "stream_options": [{"include_usage": True}], "return_token_ids": [True],
    "response_format": [{"type": "json_object"}], "guided_choice": [["a", "b"]], "include_stop_str_in_output": [True],
    "truncate_prompt_tokens": [1, -1], "continue_final_message": [True], "metadata": [{"a": "b"}], "session_id": ["s"],
    "prompt": ["a", ["a", "b"], [5, 6]], "tokens": [[5], []], "return_token_strs": [True], "parallel_tool_calls": [False],
    "messages": [[{"role": "user", "content": [{"type": "text", "text": "x"}]}]], "top_logprobs": [2], "stop_token_ids": [[7]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}], "system": ["s", [{"type": "text", "text": "s"}]],
    "include": [["message.output_text.logprobs"]], "instructions": ["be"], "truncation": ["auto", "disabled"],
    "previous_response_id": ["resp_0"], "text": [{"format": {"type": "json_object"}}], "reasoning": [{"effort": "low"}],
    "input": ["Hi", [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c", "output": "1"}]],
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "parameters": {"$defs": {"x": {}}}}},
]
CHOICES: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "g"}}]
ANSWERS = [
    "Hello!",
    '{"a": 1}',
    '<tool_call>\n{"name": "f", "arguments": {"x": [1',
    '[{"name": "g", "parameters": {}}]',
]
"""Answers of the model: text, JSON, a broken tool call, tool calls as JSON."""


def with_odd_part(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Returns the value with a random part replaced by an odd value."""
    if rng.random() < 0.3 or depth > 3:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: with_odd_part(rng, value[key], depth + 1)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], with_odd_part(rng, value[at], depth + 1), *value[at + 1 :]]
    return rng.choice(ODD)


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """Returns a body for an endpoint, with valid or odd values in one or two of its fields."""
    body: dict[str, Any] = {"model": "tiny", **BASES[path]}
    if path == "/v1/chat/completions" and rng.random() < 0.5:
        body["tools"] = TOOLS
        body["tool_choice"] = rng.choice(CHOICES)
    fields = FIELDS.get(path) or APP_FIELDS[path]
    for name in rng.sample(fields, rng.choice((1, 1, 2))):
        is_good = name in GOOD and rng.random() < 0.6
        body[name] = rng.choice(GOOD[name]) if is_good else with_odd_part(rng, body.get(name, rng.choice(ODD)))
    if rng.random() < 0.2:
        body["stream"] = True
    return body


def mangled(rng: random.Random, data: bytes) -> bytes:
    """Returns the bytes of a body truncated, partly duplicated, overwritten or deeply nested."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at + 1 :]
        case 2:
            return data[:at] + data[max(0, at - 20) :]
        case 3:
            return data.replace(b'"Hi"', b"[" * (depth := rng.choice((3, 200, 20_000))) + b"]" * depth)
        case 4:
            return data.replace(b'"Hi"', rng.choice((b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"9" * 5000)))
        case _:
            return rng.choice(
                (b"", b"null", b"[]", b'"x"', b"0", b"\xff\xfe{}", b"{}", b"{}" + data, b'{"model":1,"model":2}')
            )


def encoded(rng: random.Random, path: str, *, mangled_share: float) -> bytes:
    """Returns the bytes to send to an endpoint."""
    data = json.dumps(body_of(rng, path)).encode()
    return mangled(rng, data) if rng.random() < mangled_share else data
