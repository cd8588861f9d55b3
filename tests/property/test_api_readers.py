"""Mutated bodies of responses, messages and batch lines are parsed, or refused with the name of a field, without internal errors."""

import copy
import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
import pytest

from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from services.frontend.api.anthropic.read import read_message
from services.frontend.api.batches.lines import LineProblem, read_line
from services.frontend.api.responses.read import read_response, to_request

ROUNDS = 1500
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**63, -(2**70), 1e308, "", "x", "\ud800", "\x00", "x" * 3000, [], [[]], [None], {}, {"": ""},
    {"type": None}, {"type": "text"}, {"type": []}, [{"type": "message"}], "auto", "required",
]  # fmt: skip

RESPONSE: dict[str, Any] = {
    "model": "m", "instructions": "i", "previous_response_id": "resp_" + "0" * 32, "store": True, "stream": True,
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "msg_1"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "d"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"],
    "top_logprobs": 1, "temperature": 1, "top_p": 0.5, "max_output_tokens": 5, "parallel_tool_calls": True, "user": "u",
    "truncation": "disabled", "service_tier": "auto", "stop": ["x"], "seed": 1, "top_k": 3,
    "stream_options": {"include_obfuscation": False},
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "model": "m", "max_tokens": 100, "stream": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "5m"}}],
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "r"}], "is_error": True},
            {"type": "text", "text": "c"},
        ]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 50}, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}  # fmt: skip


def read_all_of_response(body: Mapping[str, Any]) -> None:
    """Parses a body like the server."""
    request = read_response(body, stores_by_default=True, has_store=True)
    to_request(request, [], "0" * 32)


def mutate(value: Any, generator: random.Random) -> Any:
    """Returns a copy with one to three places changed, added or removed."""
    value = copy.deepcopy(value)
    for _ in range(generator.randint(1, 3)):
        places = list(_places(value))
        holder, key = generator.choice(places)
        match generator.randrange(4):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                name = generator.choice(["x", "type", "role", "content", "id", "name"])
                holder[name] = copy.deepcopy(generator.choice(ODD))
            case 2:
                other, other_key = generator.choice(places)
                holder[key] = copy.deepcopy(other[other_key]) if _has(other, other_key) else None
            case _:
                holder[key] = copy.deepcopy(generator.choice(ODD))
    return value


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Any:
    """Yields each container below a value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def refusal(read: Callable[[Any], object], body: Any) -> MeshError | None:
    """Returns the error that refuses the body, or None if it is parsed."""
    try:
        read(body)
    except MeshError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (RESPONSE, read_all_of_response),
        (MESSAGE, lambda body: read_message(body, "0" * 32)),
        ({name: MESSAGE[name] for name in ("model", "messages", "system", "tools")},
         lambda body: read_message(body, "0" * 32, counts_only=True)),
    ],
    ids=["responses", "messages", "count_tokens"],
)  # fmt: skip
def test_mutated_bodies_are_parsed_or_refused(body: dict[str, Any], read: Callable[[Any], object]) -> None:
    """Refusals name a field of the request's own API. Field names of the chat API never appear."""
    read(copy.deepcopy(body))
    generator = random.Random(20_240_607)
    outcomes = {True: 0, False: 0}
    for _ in range(ROUNDS):
        data = json.dumps(mutate(body, generator)).encode()
        with suppress(orjson.JSONDecodeError):
            error = refusal(read, orjson.loads(data))
            outcomes[error is None] += 1
            if error is not None:
                assert isinstance(error, InvalidRequestError | UnsupportedError), (error, data)
                assert error.field and error.message, (error.message, data)
                assert not error.field.startswith(("max_completion_tokens", "response_format", "reasoning_effort"))
    assert min(outcomes.values()) > ROUNDS / 50, outcomes


def test_mutated_lines_are_parsed_or_refused() -> None:
    """A line of a batch is a request, or a problem with a code and a message."""
    endpoint = "/v1/responses"
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": RESPONSE}
    generator = random.Random(20_240_607)
    for number in range(1, ROUNDS):
        data = json.dumps(mutate(line, generator)).encode()
        if generator.random() < 0.3:
            at = generator.randrange(len(data))
            data = data[:at] + bytes(generator.randrange(256) for _ in range(3)) + data[at + 1 :]
        problem: LineProblem | None = None
        try:
            line_read = read_line(number, data, endpoint, line_bytes_max=1 << 20)
        except LineProblem as found:
            problem = found
        if problem is None:
            assert line_read.number == number
        else:
            code, message, _ = problem.args
            assert code and message
