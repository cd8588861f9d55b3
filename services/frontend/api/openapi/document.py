"""/openapi.json."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.frontend.api.anthropic.read import CountRequest, MessageRequest
from services.frontend.api.batches.routes import BatchRequest
from services.frontend.api.openai.chat_request import ChatRequest
from services.frontend.api.openai.completion_request import CompletionRequest
from services.frontend.api.openai.embeddings import EmbeddingRequest
from services.frontend.api.openai.tokens import DetokenizeRequest, TokenizeRequest
from services.frontend.api.openapi import response_schemas
from services.frontend.api.openapi.json_schema import Schema, constant, page, reference, text, told
from services.frontend.api.openapi.operations import OPERATIONS, TAGS, Operation
from services.frontend.api.request_body import Body
from services.frontend.api.responses.items import MessageItem
from services.frontend.api.responses.read import ResponseRequest

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


REQUESTS: Sequence[type[Body]] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    MessageRequest,
    CountRequest,
    BatchRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def schemas() -> dict[str, Schema]:
    """All named schemas. Those of requests and of what is in them come from the classes that read them."""
    _, requests = msgspec.json.schema_components(REQUESTS, ref_template="#/components/schemas/{name}")
    # An item without a type is a message; the reader adds it.
    item = requests[MessageItem.__name__]
    item["required"].remove("type")
    item["properties"]["type"]["enum"].append(None)
    models = told({"object": constant("list"), "data": {"type": "array", "items": reference("Model")}})
    return {
        **requests,
        "Error": response_schemas.error(),
        "Usage": response_schemas.usage(),
        "ChatCompletion": response_schemas.chat_answer(),
        "Completion": response_schemas.completion_answer(),
        "Response": response_schemas.response_answer(),
        "ResponseUsage": response_schemas.response_usage(),
        "DeletedResponse": response_schemas.deleted("response"),
        "InputItemList": response_schemas.input_items(),
        "Message": response_schemas.message_answer(),
        "Count": response_schemas.count_answer(),
        "MessageError": response_schemas.message_error(),
        "Upload": response_schemas.upload(),
        "File": response_schemas.file(),
        "FileList": page(reference("File")),
        "DeletedFile": response_schemas.deleted("file"),
        "Batch": response_schemas.batch(),
        "BatchList": page(reference("Batch")),
        "EmbeddingList": response_schemas.embedding_answer(),
        "Tokens": response_schemas.tokenize_answer(),
        "Detokenized": response_schemas.detokenize_answer(),
        "Model": response_schemas.model(),
        "ModelList": models,
        "Health": response_schemas.health(),
        "Live": told({"status": constant("ok")}),
        "Version": told({"version": text()}),
    }
