"""/openapi.json."""

from collections.abc import Sequence
from typing import Any

from services.frontend.api.openapi import anthropic, chat, others, responses
from services.frontend.api.openapi.operations import OPERATIONS, TAGS, Operation
from services.frontend.api.openapi.shapes import Schema, constant, page, reference, told

VERSION = "3.1.0"
ABOUT = (
    "Fields that are not listed are refused with their name, and so are listed ones that ask for what cannot be done. "
    "A field that is null counts as absent."
)


def openapi_document(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = each.described()
    return {
        "openapi": VERSION,
        "info": {"title": "kvmesh", "version": "1", "description": ABOUT},
        "tags": [{"name": tag} for tag in TAGS],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # A key is needed where the server was started with keys.
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def schemas() -> dict[str, Schema]:
    """All named schemas."""
    models = told({"object": constant("list"), "data": {"type": "array", "items": reference("Model")}})
    return {
        "Error": others.error(),
        "Usage": chat.usage(),
        "ChatRequest": chat.chat_request(),
        "ChatCompletion": chat.chat_answer(),
        "CompletionRequest": chat.completion_request(),
        "Completion": chat.completion_answer(),
        "ResponseRequest": responses.response_request(),
        "Response": responses.response_answer(),
        "ResponseUsage": responses.response_usage(),
        "DeletedResponse": responses.deleted("response"),
        "InputItemList": responses.input_items(),
        "MessageRequest": anthropic.message_request(),
        "Message": anthropic.message_answer(),
        "CountRequest": anthropic.count_request(),
        "Count": anthropic.count_answer(),
        "MessageError": anthropic.error(),
        "Upload": others.upload(),
        "File": others.file(),
        "FileList": page(reference("File")),
        "DeletedFile": responses.deleted("file"),
        "BatchRequest": others.batch_request(),
        "Batch": others.batch(),
        "BatchList": page(reference("Batch")),
        "EmbeddingRequest": others.embedding_request(),
        "EmbeddingList": others.embedding_answer(),
        "TokenizeRequest": others.tokenize_request(),
        "Tokens": others.tokenize_answer(),
        "DetokenizeRequest": others.detokenize_request(),
        "Detokenized": others.detokenize_answer(),
        "Model": others.model(),
        "ModelList": models,
        "Health": others.health(),
        "Live": told({"status": constant("ok")}),
    }
