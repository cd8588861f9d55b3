"""Messages, their blocks, and errors as JSON bodies."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import FinishReason, Usage
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_blocks import Block, BlockKind
from services.frontend.api.request_body import object_in
from services.frontend.pipeline.request import Ending

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"
_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: MeshError) -> dict[str, Any]:
    """Returns Anthropic's error object. It has no place for the field, so the message names it."""
    is_named = not error.field or error.field in error.message
    message = error.message if is_named else f"{error.field}: {error.message}"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(http_status(error)[0], "api_error"), "message": message},
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        # In this API cached tokens are not input tokens.
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "service_tier": "standard",
    }


def message_body(
    *, request_id: str, model: str, content: Sequence[Mapping[str, Any]], ending: Ending | None, usage: Usage
) -> dict[str, Any]:
    """Returns a message; without `ending` one that has only begun."""
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
    """Returns `stop_reason` and `stop_sequence`."""
    if ending.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(ending.stop, str):
        return "stop_sequence", ending.stop
    return ("tool_use" if has_calls else "end_turn"), None


def block_body(block: Block) -> dict[str, Any]:
    """Returns a whole block. A call whose arguments are not an object becomes text: no output of the model is dropped."""
    text = block.text
    if block.kind is not BlockKind.CALL:
        return _text_block(block.kind, text)
    try:
        arguments = object_in(text) if text else {}
    except InvalidRequestError:  # It has too many values.
        arguments = None
    if arguments is None:
        return {"type": "text", "text": f"{block.name}: {text}"}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _text_block(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind is BlockKind.TEXT:
        return {"type": "text", "text": text}
    return {"type": "thinking", "thinking": text, "signature": ""}


def started_block(block: Block) -> dict[str, Any]:
    """Returns a block without its text, for the event that begins it."""
    if block.kind is not BlockKind.CALL:
        return _text_block(block.kind, "")
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def delta_body(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text_delta", "text": text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
