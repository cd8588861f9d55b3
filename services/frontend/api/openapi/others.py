"""Files, batches, embeddings, tokens, models, and errors."""

from services.frontend.api.batches.answer import ENDPOINTS
from services.frontend.api.openai.embeddings import FORMATS, read_embeddings
from services.frontend.api.openai.sampling import TOKENS_MAX
from services.frontend.api.openapi.chat import TOKEN_IDS, message, tool
from services.frontend.api.openapi.fields import with_untyped
from services.frontend.api.openapi.responses import metadata
from services.frontend.api.openapi.shapes import (
    Schema,
    anything,
    array,
    asked,
    constant,
    either,
    flag,
    integer,
    mapping,
    nullable,
    number,
    text,
    told,
    words,
)

FILE_ID = {"type": "string", "pattern": "^file-[0-9a-f]{32}$"}


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


def embedding_request() -> Schema:
    """The body."""
    properties = {
        "model": text(least=1, most=256),
        "input": either(text(), array(text(), least=1), {**TOKEN_IDS, "minItems": 1}, array(TOKEN_IDS, least=1)),
        "dimensions": integer(1, TOKENS_MAX),
        "encoding_format": words(*FORMATS),
        "user": text(most=512),
        "priority": integer(-100, 100),
        "truncate_prompt_tokens": either(integer(1, TOKENS_MAX), constant(-1)),
        "add_special_tokens": flag(),
    }
    smallest = {"model": "m", "input": "i"}
    return asked(with_untyped(properties, lambda body: read_embeddings(body, ""), smallest), "input")


def embedding_answer() -> Schema:
    """Vectors."""
    vector = either(array(number(-1e30, 1e30)), text("Little-endian 32-bit floats in base64."))
    entry = told({"object": constant("embedding"), "index": integer(0), "embedding": vector})
    usage = told({"prompt_tokens": integer(0), "total_tokens": integer(0)})
    return told({"object": constant("list"), "data": array(entry), "model": text(), "usage": usage})


def tokenize_request() -> Schema:
    """A text or a conversation."""
    named = {"model": text(least=1, most=256), "return_token_strs": flag(), "add_special_tokens": flag()}
    return either(
        asked({**named, "prompt": text(), "messages": {"type": "null"}}, "prompt"),
        asked(
            {**named, "prompt": {"type": "null"}, "messages": array(message(), least=1, most=4096),
             "tools": array(tool(), most=128), "documents": array(mapping(anything()), most=1024),
             "chat_template_kwargs": mapping(anything()), "add_generation_prompt": flag(),
             "continue_final_message": flag(), "reasoning_effort": anything()},
            "messages",
        ),
    )  # fmt: skip


def tokenize_answer() -> Schema:
    """Tokens."""
    return told({"count": integer(0), "max_model_len": integer(1), "tokens": TOKEN_IDS,
                 "token_strs": nullable(array(text()))})  # fmt: skip


def detokenize_request() -> Schema:
    """Tokens."""
    return asked({"model": text(least=1, most=256), "tokens": TOKEN_IDS}, "tokens")


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


def batch_request() -> Schema:
    """The body."""
    return asked(
        {
            "input_file_id": FILE_ID,
            "endpoint": words(*ENDPOINTS),
            "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,6}[smhd]$",
                                  "description": "OpenAI's 24h, or another time up to the server's limit."},
            "metadata": metadata(),
            "output_expires_after": asked(
                {"anchor": constant("created_at"), "seconds": integer(3600, 30 * 86_400)}, "anchor", "seconds"
            ),
        },
        "input_file_id", "endpoint", "completion_window",
    )  # fmt: skip


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
