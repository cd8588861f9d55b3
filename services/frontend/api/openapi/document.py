"""/openapi.json."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.frontend.api.anthropic.batches import MessageBatchRequest
from services.frontend.api.anthropic.read import CountRequest, MessageRequest
from services.frontend.api.batches.routes import BatchRequest
from services.frontend.api.openai.chat_request import ChatRequest
from services.frontend.api.openai.completion_request import CompletionRequest
from services.frontend.api.openai.embeddings import EmbeddingRequest
from services.frontend.api.openai.tokens import DetokenizeRequest, TokenizeRequest
from services.frontend.api.openapi.json_schema import Schema
from services.frontend.api.openapi.operations import OPERATIONS, TAGS
from services.frontend.api.openapi.response_schemas import RESPONSE_SCHEMAS
from services.frontend.api.request_body import Body
from services.frontend.api.responses.items import MessageItem
from services.frontend.api.responses.read import ResponseRequest

VERSION = "3.1.0"
ABOUT = (
    "Unknown and unsupported fields are refused, and the error names the field. A field that is null counts as absent."
)


def openapi_document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
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
    MessageBatchRequest,
    BatchRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def schemas() -> dict[str, Schema]:
    """Returns all named schemas; those of requests come from the classes that check them."""
    _, requests = msgspec.json.schema_components(REQUESTS, ref_template="#/components/schemas/{name}")
    # An item without a type is a message; the reader adds the type.
    item = requests[MessageItem.__name__]
    item["required"].remove("type")
    item["properties"]["type"]["enum"].append(None)
    return {**requests, **RESPONSE_SCHEMAS}
