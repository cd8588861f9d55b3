"""The schemas of what comes back, and of the form of an upload. Those of JSON requests come from their classes."""

from services.frontend.api.batches.line_runner import ENDPOINTS
from services.frontend.api.openapi.json_schema import (
    Schema,
    anything,
    array,
    constant,
    either,
    flag,
    integer,
    mapping,
    nullable,
    number,
    page,
    reference,
    text,
    told,
    words,
)
from services.frontend.api.responses.read import RESPONSE_ID_PATTERN

FILE_ID = {"type": "string", "pattern": "^file-[0-9a-f]{32}$"}
_RESPONSE_ID = {"type": "string", "pattern": RESPONSE_ID_PATTERN}
_STATUS = words("in_progress", "completed", "incomplete")
_FINISH = words("stop", "length", "tool_calls")
_STOP_REASON = {"type": ["string", "integer", "null"]}
_TOKEN_IDS = array(integer(0, 2**31 - 1))


def error() -> Schema:
    """OpenAI's error. `param` is the field, `code` a stable word."""
    maybe = nullable(text())
    return told({"error": told({"message": text(), "type": text(), "param": maybe, "code": maybe})})


def model() -> Schema:
    """A model."""
    return told({"id": text(), "object": constant("model"), "created": integer(0), "owned_by": text(),
                 "max_model_len": integer(1), "root": text(), "parent": nullable(text())})  # fmt: skip


def health() -> Schema:
    """Whether requests can be answered."""
    return told({"status": text(), "models": array(text()), "problems": mapping(text())})


def usage() -> Schema:
    """OpenAI's usage."""
    count = integer(0)
    return told({
        "prompt_tokens": count, "completion_tokens": count, "total_tokens": count,
        "prompt_tokens_details": told({"cached_tokens": count}),
        "completion_tokens_details": told({"reasoning_tokens": count}),
    })  # fmt: skip


def chat_answer() -> Schema:
    """A chat completion."""
    call = told({"id": text(), "type": constant("function"), "function": told({"name": text(), "arguments": text()})})
    answer = told(
        {"role": constant("assistant"), "content": nullable(text()), "refusal": {"type": "null"},
         "reasoning_content": text(), "reasoning": text("The same."), "tool_calls": array(call)},
        "reasoning_content", "reasoning", "tool_calls",
    )  # fmt: skip
    choice = told(
        {"index": integer(0), "message": answer, "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH,
         "stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS},
        "token_ids",
    )  # fmt: skip
    return told(
        {"id": text(), "object": constant("chat.completion"), "created": integer(0), "model": text(),
         "choices": array(choice, least=1), "usage": reference("Usage"), "prompt_token_ids": _TOKEN_IDS,
         "prompt_logprobs": anything()},
        "prompt_token_ids",
    )  # fmt: skip


def completion_answer() -> Schema:
    """A completion."""
    choice = told(
        {"index": integer(0), "text": text(), "logprobs": {"type": ["object", "null"]}, "finish_reason": _FINISH,
         "stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS,
         "prompt_logprobs": anything()},
        "token_ids", "prompt_token_ids",
    )  # fmt: skip
    return told({
        "id": text(), "object": constant("text_completion"), "created": integer(0), "model": text(),
        "choices": array(choice, least=1), "usage": reference("Usage"),
    })  # fmt: skip


def response_usage() -> Schema:
    """Usage in the words of this API."""
    count = integer(0)
    return told({
        "input_tokens": count, "output_tokens": count, "total_tokens": count,
        "input_tokens_details": told({"cached_tokens": count, "cache_write_tokens": count}),
        "output_tokens_details": told({"reasoning_tokens": count}),
    })  # fmt: skip


def output_item() -> Schema:
    """An item that comes out."""
    head = {"id": text(), "status": _STATUS}
    said = told({"type": constant("output_text"), "text": text(), "annotations": array(anything()),
                 "logprobs": array(anything())}, "logprobs")  # fmt: skip
    thought = told({"type": constant("reasoning_text"), "text": text()})
    return either(
        told({"type": constant("message"), "role": constant("assistant"), "content": array(said), **head}),
        told({"type": constant("reasoning"), "summary": array(anything()), "content": array(thought), **head}),
        told({"type": constant("function_call"), "call_id": text(), "name": text(), "arguments": text(), **head}),
    )


def response_answer() -> Schema:
    """A response."""
    maybe_text = nullable(text())
    return told(
        {
            "id": _RESPONSE_ID, "object": constant("response"), "created_at": integer(0),
            "completed_at": nullable(integer(0)), "status": words("completed", "incomplete"),
            "background": constant(False), "error": {"type": "null"},
            "incomplete_details": nullable(told({"reason": constant("max_output_tokens")})),
            "instructions": maybe_text, "model": text(), "output": array(output_item(), least=1),
            "previous_response_id": maybe_text, "store": flag(), "usage": reference("ResponseUsage"),
            "temperature": nullable(number(0, 2)), "top_p": nullable(number(0, 1)), "tools": array(anything()),
            "tool_choice": anything(), "parallel_tool_calls": flag(), "text": mapping(anything()),
            "reasoning": mapping(anything()), "max_output_tokens": nullable(integer(1)), "metadata": mapping(text(most=512), most=16),
            "truncation": words("auto", "disabled"), "service_tier": constant("default"), "top_logprobs": integer(0),
            "max_tool_calls": {"type": "null"}, "user": maybe_text, "safety_identifier": maybe_text,
            "prompt_cache_key": maybe_text,
        },
    )  # fmt: skip


def deleted(kind: str) -> Schema:
    """What deleting answers."""
    return told({"id": text(), "object": constant(kind), "deleted": constant(True)})


def input_items() -> Schema:
    """A page of input items."""
    return page(told({"id": text(), "type": text(), "status": _STATUS}))


def message_answer() -> Schema:
    """A message."""
    count = integer(0)
    block = either(
        told({"type": constant("text"), "text": text()}),
        told({"type": constant("thinking"), "thinking": text(), "signature": text()}),
        told({"type": constant("tool_use"), "id": text(), "name": text(), "input": mapping(anything())}),
    )
    usage = told({"input_tokens": count, "output_tokens": count, "cache_read_input_tokens": count,
                  "cache_creation_input_tokens": count, "service_tier": constant("standard")})  # fmt: skip
    return told({
        "id": text(), "type": constant("message"), "role": constant("assistant"), "model": text(),
        "content": array(block, least=1),
        "stop_reason": words("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": nullable(text()), "usage": usage,
    })  # fmt: skip


def count_answer() -> Schema:
    """A count."""
    return told({"input_tokens": integer(0)})


def message_error() -> Schema:
    """Anthropic's error."""
    return told({"type": constant("error"), "error": told({"type": text(), "message": text()})})


def embedding_answer() -> Schema:
    """Vectors."""
    vector = either(array(number(-1e30, 1e30)), text("Little-endian 32-bit floats in base64."))
    entry = told({"object": constant("embedding"), "index": integer(0), "embedding": vector})
    usage = told({"prompt_tokens": integer(0), "total_tokens": integer(0)})
    return told({"object": constant("list"), "data": array(entry), "model": text(), "usage": usage})


def tokenize_answer() -> Schema:
    """Tokens."""
    return told({"count": integer(0), "max_model_len": integer(1), "tokens": _TOKEN_IDS,
                 "token_strs": nullable(array(text()))})  # fmt: skip


def detokenize_answer() -> Schema:
    """Their text."""
    return told({"prompt": text()})


def upload() -> Schema:
    """The form of an upload."""
    return {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "JSON Lines."},
            "purpose": constant("batch"),
            "expires_after[anchor]": constant("created_at"),
            "expires_after[seconds]": integer(3600, 30 * 86_400),
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }


def file() -> Schema:
    """A file."""
    return told({
        "id": FILE_ID, "object": constant("file"), "bytes": integer(0), "created_at": integer(0),
        "expires_at": integer(0), "filename": text(), "purpose": words("batch", "batch_output"),
        "status": constant("processed"), "status_details": {"type": "null"},
    })  # fmt: skip


def batch() -> Schema:
    """A batch."""
    time, count, file_id = nullable(integer(0)), integer(0), nullable(text())
    times = {f"{name}_at": time for name in
             ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")}  # fmt: skip
    problem = told({"code": text(), "line": nullable(integer(1)), "message": text(), "param": nullable(text())})
    statuses = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
    return told({
        "id": text(), "object": constant("batch"), "endpoint": words(*ENDPOINTS), "model": nullable(text()),
        "errors": nullable(told({"object": constant("list"), "data": array(problem)})), "input_file_id": text(),
        "completion_window": text(), "status": words(*statuses), "output_file_id": file_id, "error_file_id": file_id,
        "created_at": count, "expires_at": count, **times,
        "request_counts": told({"total": count, "completed": count, "failed": count}),
        "metadata": nullable(mapping(text())),
        "usage": told({"input_tokens": count, "output_tokens": count, "total_tokens": count,
                       "input_tokens_details": told({"cached_tokens": count}),
                       "output_tokens_details": told({"reasoning_tokens": count})}),
    })  # fmt: skip
