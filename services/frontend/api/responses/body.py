"""The response object and its output items."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.core import FinishReason, Usage
from kvmesh.errors import MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.answer_blocks import Block, BlockKind
from services.frontend.api.responses.read import ParsedResponse
from services.frontend.pipeline.request import Ending

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


def item_id(request_id: str, block: Block) -> str:
    # Unique in any conversation, because the request id is random.
    return f"{_PREFIXES[block.kind]}_{request_id}{block.number}"


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    return part if logprobs is None else part | {"logprobs": list(logprobs)}


def thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def item_body(
    request_id: str, block: Block, status: str, *, logprobs: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns an output item. While it is in progress it has no content."""
    head = {"id": item_id(request_id, block), "status": status}
    text = block.text
    is_whole = status != IN_PROGRESS
    if block.kind is BlockKind.CALL:
        arguments = text if is_whole else ""
        return {**head, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": arguments}
    if block.kind is BlockKind.REASONING:
        content = [thought_part(text)] if is_whole else []
        return {**head, "type": "reasoning", "summary": [], "content": content}
    content = [text_part(text, logprobs)] if is_whole else []
    return {**head, "type": "message", "role": "assistant", "content": content}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def status_of(ending: Ending) -> str:
    return INCOMPLETE if ending.reason is FinishReason.LENGTH else COMPLETED


def begun_body(parsed: ParsedResponse, request_id: str, created_s: int) -> dict[str, Any]:
    """Returns the response before its output."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created_s,
        "status": IN_PROGRESS,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "max_tool_calls": None,
        **parsed.echoed(),
    }


def ended_body(
    begun: Mapping[str, Any], output: Sequence[Mapping[str, Any]], ending: Ending, *, usage: Usage, completed_s: int
) -> dict[str, Any]:
    """Returns the whole response."""
    status = status_of(ending)
    return {
        **begun,
        "status": status,
        "completed_at": completed_s if status == COMPLETED else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        "output": list(output),
        "usage": usage_body(usage),
    }


def failed_body(begun: Mapping[str, Any], output: Sequence[Mapping[str, Any]], error: MeshError) -> dict[str, Any]:
    """Returns a response that failed after its stream began."""
    code = "rate_limit_exceeded" if http_status(error)[0] == 429 else "server_error"
    failure = {"code": code, "message": error.message}
    return {**begun, "status": "failed", "output": list(output), "error": failure}
