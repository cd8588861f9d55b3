"""Schemas of responses, and of the form of an upload. The schemas of JSON requests come from their classes."""

from collections.abc import Mapping

from services.frontend.api.batches.line_runner import ENDPOINTS
from services.frontend.api.openapi.json_schema import (
    Schema,
    any_of,
    array,
    boolean,
    constant,
    integer,
    mapping,
    nullable,
    number,
    one_of,
    page,
    reference,
    response_object,
    text,
)
from services.frontend.api.responses.read import RESPONSE_ID_PATTERN

_ANYTHING: Schema = {}
_NULL: Schema = {"type": "null"}
_COUNT = integer(0)
_ITEM_STATUS = one_of("in_progress", "completed", "incomplete")
_TOKEN_IDS = array(integer(low=0, high=2**31 - 1))
# Fields that choices of chat and completions share.
_CHOICE: Mapping[str, Schema] = {
    "index": _COUNT, "logprobs": {"type": ["object", "null"]}, "finish_reason": one_of("stop", "length", "tool_calls"),
    "stop_reason": {"type": ["string", "integer", "null"]}, "token_ids": _TOKEN_IDS,
}  # fmt: skip
_FUNCTION_CALL = response_object({
    "id": text(), "type": constant("function"), "function": response_object({"name": text(), "arguments": text()}),
})  # fmt: skip
_CHAT_MESSAGE = response_object(
    {"role": constant("assistant"), "content": nullable(text()), "refusal": _NULL, "reasoning_content": text(),
     "reasoning": text("Same as reasoning_content."), "tool_calls": array(_FUNCTION_CALL)},
    "reasoning_content", "reasoning", "tool_calls",
)  # fmt: skip
_ITEM: Mapping[str, Schema] = {"id": text(), "status": _ITEM_STATUS}
_OUTPUT_TEXT = response_object(
    {"type": constant("output_text"), "text": text(), "annotations": array(_ANYTHING), "logprobs": array(_ANYTHING)},
    "logprobs",
)  # fmt: skip
_REASONING_TEXT = response_object({"type": constant("reasoning_text"), "text": text()})
_OUTPUT_ITEM = any_of(
    response_object({"type": constant("message"), "role": constant("assistant"), "content": array(_OUTPUT_TEXT), **_ITEM}),
    response_object({
        "type": constant("reasoning"), "summary": array(_ANYTHING), "content": array(_REASONING_TEXT), **_ITEM,
    }),
    response_object({
        "type": constant("function_call"), "call_id": text(), "name": text(), "arguments": text(), **_ITEM,
    }),
)  # fmt: skip
_RESPONSE_USAGE: Mapping[str, Schema] = {
    "input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT,
    "output_tokens_details": response_object({"reasoning_tokens": _COUNT}),
}  # fmt: skip
_MESSAGE_BLOCK = any_of(
    response_object({"type": constant("text"), "text": text()}),
    response_object({"type": constant("thinking"), "thinking": text(), "signature": text()}),
    response_object({"type": constant("tool_use"), "id": text(), "name": text(), "input": mapping(_ANYTHING)}),
)
_BATCH_STATUSES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip
_BATCH_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_BATCH_PROBLEM = response_object({
    "code": text(), "line": nullable(integer(1)), "message": text(), "param": nullable(text()),
})  # fmt: skip


def _deleted(kind: str) -> Schema:
    return response_object({"id": text(), "object": constant(kind), "deleted": constant(True)})


RESPONSE_SCHEMAS: Mapping[str, Schema] = {
    "Error": response_object({
        "error": response_object({
            "message": text(), "type": text(), "param": nullable(text()), "code": nullable(text()),
        }),
    }),
    "Usage": response_object({
        "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT,
        "prompt_tokens_details": response_object({"cached_tokens": _COUNT}),
        "completion_tokens_details": response_object({"reasoning_tokens": _COUNT}),
    }),
    "ChatCompletion": response_object(
        {"id": text(), "object": constant("chat.completion"), "created": _COUNT, "model": text(),
         "choices": array(response_object({**_CHOICE, "message": _CHAT_MESSAGE}, "token_ids"), items_min=1),
         "usage": reference("Usage"), "prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _ANYTHING},
        "prompt_token_ids",
    ),
    "Completion": response_object({
        "id": text(), "object": constant("text_completion"), "created": _COUNT, "model": text(),
        "choices": array(
            response_object(
                {**_CHOICE, "text": text(), "prompt_token_ids": _TOKEN_IDS, "prompt_logprobs": _ANYTHING},
                "token_ids", "prompt_token_ids",
            ),
            items_min=1,
        ),
        "usage": reference("Usage"),
    }),
    "Response": response_object({
        "id": {"type": "string", "pattern": RESPONSE_ID_PATTERN}, "object": constant("response"), "created_at": _COUNT,
        "completed_at": nullable(_COUNT), "status": one_of("completed", "incomplete"), "background": constant(False),
        "error": _NULL, "incomplete_details": nullable(response_object({"reason": constant("max_output_tokens")})),
        "instructions": nullable(text()), "model": text(), "output": array(_OUTPUT_ITEM, items_min=1),
        "previous_response_id": nullable(text()), "store": boolean(), "usage": reference("ResponseUsage"),
        "temperature": nullable(number(low=0, high=2)), "top_p": nullable(number(low=0, high=1)), "tools": array(_ANYTHING),
        "tool_choice": _ANYTHING, "parallel_tool_calls": boolean(), "text": mapping(_ANYTHING),
        "reasoning": mapping(_ANYTHING), "max_output_tokens": nullable(integer(1)),
        "metadata": mapping(text(length_max=512), properties_max=16), "truncation": one_of("auto", "disabled"),
        "service_tier": constant("default"), "top_logprobs": _COUNT, "max_tool_calls": _NULL, "user": nullable(text()),
        "safety_identifier": nullable(text()), "prompt_cache_key": nullable(text()),
    }),
    "ResponseUsage": response_object({
        **_RESPONSE_USAGE,
        "input_tokens_details": response_object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
    }),
    "DeletedResponse": _deleted("response"),
    "InputItemList": page(response_object({"id": text(), "type": text(), "status": _ITEM_STATUS})),
    "Message": response_object({
        "id": text(), "type": constant("message"), "role": constant("assistant"), "model": text(),
        "content": array(_MESSAGE_BLOCK, items_min=1),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"), "stop_sequence": nullable(text()),
        "usage": response_object({
            "input_tokens": _COUNT, "output_tokens": _COUNT, "cache_read_input_tokens": _COUNT,
            "cache_creation_input_tokens": _COUNT, "service_tier": constant("standard"),
        }),
    }),
    "Count": response_object({"input_tokens": _COUNT}),
    "MessageError": response_object({
        "type": constant("error"), "error": response_object({"type": text(), "message": text()}),
    }),
    "MessageBatch": response_object({
        "id": text(), "type": constant("message_batch"), "processing_status": one_of("in_progress", "canceling", "ended"),
        "request_counts": response_object(
            dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), _COUNT)
        ),
        "created_at": text(), "expires_at": text(), "ended_at": nullable(text()),
        "cancel_initiated_at": nullable(text()), "archived_at": _NULL, "results_url": nullable(text()),
    }),
    "MessageBatchList": response_object({
        "data": array(reference("MessageBatch")), "has_more": boolean(), "first_id": nullable(text()),
        "last_id": nullable(text()),
    }),
    "DeletedMessageBatch": response_object({"id": text(), "type": constant("message_batch_deleted")}),
    "Upload": {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "JSON Lines."},
            "purpose": constant("batch"),
            "expires_after[anchor]": constant("created_at"),
            "expires_after[seconds]": integer(low=3600, high=30 * 86_400),
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    },
    "File": response_object({
        "id": {"type": "string", "pattern": "^file-[0-9a-f]{32}$"}, "object": constant("file"), "bytes": _COUNT,
        "created_at": _COUNT, "expires_at": _COUNT, "filename": text(), "purpose": one_of("batch", "batch_output"),
        "status": constant("processed"), "status_details": _NULL,
    }),
    "FileList": page(reference("File")),
    "DeletedFile": _deleted("file"),
    "Batch": response_object({
        "id": text(), "object": constant("batch"), "endpoint": one_of(*ENDPOINTS), "model": nullable(text()),
        "errors": nullable(response_object({"object": constant("list"), "data": array(_BATCH_PROBLEM)})),
        "input_file_id": text(), "completion_window": text(), "status": one_of(*_BATCH_STATUSES),
        "output_file_id": nullable(text()), "error_file_id": nullable(text()), "created_at": _COUNT, "expires_at": _COUNT,
        **{f"{name}_at": nullable(_COUNT) for name in _BATCH_TIMES},
        "request_counts": response_object({"total": _COUNT, "completed": _COUNT, "failed": _COUNT}),
        "metadata": nullable(mapping(text())),
        "usage": response_object({**_RESPONSE_USAGE, "input_tokens_details": response_object({"cached_tokens": _COUNT})}),
    }),
    "BatchList": page(reference("Batch")),
    "EmbeddingList": response_object({
        "object": constant("list"),
        "data": array(response_object({
            "object": constant("embedding"), "index": _COUNT,
            "embedding": any_of(array(number(low=-1e30, high=1e30)), text("Little-endian 32-bit floats in base64.")),
        })),
        "model": text(), "usage": response_object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
    }),
    "Tokens": response_object({
        "count": _COUNT, "max_model_len": integer(1), "tokens": _TOKEN_IDS, "token_strs": nullable(array(text())),
    }),
    "Detokenized": response_object({"prompt": text()}),
    "Model": response_object({
        "id": text(), "object": constant("model"), "created": _COUNT, "owned_by": text(), "max_model_len": integer(1),
        "root": text(), "parent": nullable(text()),
    }),
    "ModelList": response_object({"object": constant("list"), "data": array(reference("Model"))}),
    "Health": response_object({"status": text(), "models": array(text()), "problems": mapping(text())}),
    "Live": response_object({"status": constant("ok")}),
    "InputTokens": response_object({"object": constant("response.input_tokens"), "input_tokens": integer(0)}),
    "Version": response_object({"version": text()}),
}  # fmt: skip
