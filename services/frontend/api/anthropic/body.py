"""Messages, their blocks, and errors as JSON bodies."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvmesh.core import FinishReason, Usage
from kvmesh.errors import MeshError
from services.frontend.api.answer_blocks import Block, BlockKind
from services.frontend.api.http.exchange import status_of
from services.frontend.pipeline.request import Ending

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"
_ERROR_WORDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: MeshError) -> dict[str, Any]:
    """Anthropic's error object; the field is named in the message, which is where its clients look."""
    return {
        "type": "error",
        "error": {"type": _ERROR_WORDS.get(status_of(error), "api_error"), "message": _told(error)},
    }


def _told(error: MeshError) -> str:
    return error.message if not error.field or error.field in error.message else f"{error.field}: {error.message}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Here tokens that were found in a cache are not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "service_tier": "standard",
    }


def message_body(
    request_id: str, model: str, content: Sequence[Mapping[str, Any]], ending: Ending | None, usage: Usage
) -> dict[str, Any]:
    """A message; without an ending it has only begun."""
    has_calls = any(block["type"] == "tool_use" for block in content)
    reason, stop = stop_of(ending, has_calls=has_calls) if ending is not None else (None, None)
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage_body(usage),
    }


def stop_of(ending: Ending, *, has_calls: bool) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if ending.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(ending.stop, str):
        return "stop_sequence", ending.stop
    return ("tool_use" if has_calls else "end_turn"), None


def block_body(block: Block) -> dict[str, Any]:
    """A whole block. A call whose arguments are no object is shown as text: nothing the model said is dropped."""
    text = block.text
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    try:
        arguments = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        return {"type": "text", "text": f"{block.name}: {text}"}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def begun_block(block: Block) -> dict[str, Any]:
    """A block at its start."""
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def delta_body(block: Block, text: str) -> dict[str, Any]:
    """What is new of a block."""
    if block.kind is BlockKind.TEXT:
        return {"type": "text_delta", "text": text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
