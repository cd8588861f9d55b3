"""The operations: paths, parameters, bodies and responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.api.openapi.json_schema import Schema, constant, integer, one_of, reference, text

JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `body` and `answer` name schemas. `streams`: the response can be an event stream."""

    method: str
    path: str
    name: str
    help: str
    tag: str
    answer: str = ""
    body: str = ""
    body_type: str = JSON
    answer_type: str = JSON
    streams: bool = False
    query: Mapping[str, Schema] | None = None
    parameters: Mapping[str, Schema] | None = None
    errors: str = "Error"
    is_open: bool = False

    def described(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "operationId": self.name,
            "summary": self.help,
            "tags": [self.tag],
            "parameters": [*self._parameters("path", self.parameters), *self._parameters("query", self.query)],
            "responses": self._responses(),
        }
        if self.is_open:
            described["security"] = []
        if self.body:
            content = {self.body_type: {"schema": reference(self.body)}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def _parameters(self, place: str, schemas: Mapping[str, Schema] | None) -> list[dict[str, Any]]:
        return [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, schema in (schemas or {}).items()
        ]

    def _responses(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.answer_type: {"schema": reference(self.answer)} if self.answer else {}}
        if self.streams:
            content["text/event-stream"] = {"schema": {"description": "Server-sent events."}}
        error = {JSON: {"schema": reference(self.errors)}}
        return {
            "200": {"description": "Success.", "content": content},
            "4XX": {"description": "The request is refused; the error names the field.", "content": error},
            "5XX": {"description": "The mesh cannot answer; Retry-After says when to retry.", "content": error},
        }


_FILE = {"file_id": text(length_min=1)}
_RESPONSE = {"response_id": text(length_min=1)}
_BATCH = {"batch_id": text(length_min=1)}
_MESSAGE_BATCH = {"message_batch_id": text(length_min=1)}
_PAGE: dict[str, Schema] = {"limit": integer(low=1, high=100), "after": text()}
_ORDER = one_of("asc", "desc")

CHAT, RESPONSES, MESSAGES, FILES, OTHERS = (
    "Chat and completions",
    "Responses",
    "Messages",
    "Files and batches",
    "Others",
)
TAGS: Sequence[str] = (CHAT, RESPONSES, MESSAGES, FILES, OTHERS)


def _post(path: str, *, name: str, help: str, tag: str, body: str, answer: str, **more: Any) -> Operation:  # noqa: A002
    return Operation(method="post", path=path, name=name, help=help, tag=tag, body=body, answer=answer, **more)


def _get(path: str, *, name: str, help: str, tag: str, answer: str, **more: Any) -> Operation:  # noqa: A002
    return Operation(method="get", path=path, name=name, help=help, tag=tag, answer=answer, **more)


OPERATIONS: Sequence[Operation] = (
    _post("/v1/chat/completions", name="createChatCompletion", help="Answer a conversation", tag=CHAT, body="ChatRequest",
          answer="ChatCompletion", streams=True),
    _post("/v1/completions", name="createCompletion", help="Continue a text", tag=CHAT, body="CompletionRequest", answer="Completion",
          streams=True),
    _post("/v1/responses/input_tokens", name="countInputTokens", help="Count the tokens of a response's input", tag=RESPONSES,
          body="ResponseRequest", answer="InputTokens"),
    _post("/v1/responses", name="createResponse", help="Answer items and store the answer", tag=RESPONSES, body="ResponseRequest",
          answer="Response", streams=True),
    _get("/v1/responses/{response_id}", name="getResponse", help="A stored response", tag=RESPONSES, answer="Response",
         parameters=_RESPONSE, query={"stream": constant("false")}),
    Operation(method="delete", path="/v1/responses/{response_id}", name="deleteResponse", help="Delete a response",
              tag=RESPONSES, answer="DeletedResponse", parameters=_RESPONSE),
    _get("/v1/responses/{response_id}/input_items", name="listInputItems", help="The input items of a response", tag=RESPONSES,
         answer="InputItemList", parameters=_RESPONSE, query={**_PAGE, "order": _ORDER}),
    Operation(method="post", path="/v1/responses/{response_id}/cancel", name="cancelResponse",
              help="Refused: responses do not run in the background", tag=RESPONSES, answer="Response",
              parameters=_RESPONSE),
    _post("/v1/messages", name="createMessage", help="Answer messages, as Anthropic's API does", tag=MESSAGES, body="MessageRequest",
          answer="Message", streams=True, errors="MessageError"),
    _post("/v1/messages/count_tokens", name="countTokens", help="Count a message's tokens", tag=MESSAGES, body="CountRequest", answer="Count",
          errors="MessageError"),
    _post("/v1/messages/batches", name="createMessageBatch", help="Run requests to /v1/messages later", tag=MESSAGES,
          body="MessageBatchRequest", answer="MessageBatch", errors="MessageError"),
    _get("/v1/messages/batches", name="listMessageBatches", help="All message batches, the newest first", tag=MESSAGES,
         answer="MessageBatchList", query={"limit": integer(low=1, high=1000), "after_id": text(), "before_id": text()},
         errors="MessageError"),
    _get("/v1/messages/batches/{message_batch_id}", name="getMessageBatch", help="A message batch and its progress", tag=MESSAGES,
         answer="MessageBatch", parameters=_MESSAGE_BATCH, errors="MessageError"),
    Operation(method="delete", path="/v1/messages/batches/{message_batch_id}", name="deleteMessageBatch",
              help="Delete a message batch that has ended", tag=MESSAGES, answer="DeletedMessageBatch",
              parameters=_MESSAGE_BATCH, errors="MessageError"),
    Operation(method="post", path="/v1/messages/batches/{message_batch_id}/cancel", name="cancelMessageBatch",
              help="Cancel a message batch", tag=MESSAGES, answer="MessageBatch", parameters=_MESSAGE_BATCH,
              errors="MessageError"),
    _get("/v1/messages/batches/{message_batch_id}/results", name="getMessageBatchResults",
         help="The results of a message batch that has ended, one JSON object per line", tag=MESSAGES, answer="",
         answer_type="application/x-jsonl", parameters=_MESSAGE_BATCH, errors="MessageError"),
    Operation(method="post", path="/v1/files", name="createFile", help="Upload a file", tag=FILES, body="Upload",
              body_type="multipart/form-data", answer="File"),
    _get("/v1/files", name="listFiles", help="All files", tag=FILES, answer="FileList",
         query={"limit": integer(low=1, high=10_000), "after": text(), "order": _ORDER,
                "purpose": one_of("batch", "batch_output")}),
    _get("/v1/files/{file_id}", name="getFile", help="A file", tag=FILES, answer="File", parameters=_FILE),
    Operation(method="delete", path="/v1/files/{file_id}", name="deleteFile", help="Delete a file", tag=FILES,
              answer="DeletedFile", parameters=_FILE),
    _get("/v1/files/{file_id}/content", name="getFileContent", help="A file's bytes", tag=FILES, answer="", parameters=_FILE,
         answer_type="application/octet-stream"),
    _post("/v1/batches", name="createBatch", help="Run a file of requests", tag=FILES, body="BatchRequest", answer="Batch"),
    _get("/v1/batches", name="listBatches", help="All batches, the newest first", tag=FILES, answer="BatchList", query=_PAGE),
    _get("/v1/batches/{batch_id}", name="getBatch", help="A batch and its progress", tag=FILES, answer="Batch", parameters=_BATCH),
    Operation(method="post", path="/v1/batches/{batch_id}/cancel", name="cancelBatch", help="Cancel a batch", tag=FILES,
              answer="Batch", parameters=_BATCH),
    _post("/v1/embeddings", name="createEmbedding", help="Embeddings of texts", tag=OTHERS, body="EmbeddingRequest", answer="EmbeddingList"),
    _post("/tokenize", name="tokenize", help="Tokens of a text or a conversation", tag=OTHERS, body="TokenizeRequest", answer="Tokens"),
    _post("/detokenize", name="detokenize", help="Text of tokens", tag=OTHERS, body="DetokenizeRequest", answer="Detokenized"),
    _get("/v1/models", name="listModels", help="Available models", tag=OTHERS, answer="ModelList"),
    _get("/v1/models/{model}", name="getModel", help="A model", tag=OTHERS, answer="Model", parameters={"model": text(length_min=1)}),
    _get("/health", name="health", help="Whether the frontend can serve requests; 503 with the reasons if not", tag=OTHERS, answer="Health",
         errors="Health", is_open=True),
    _get("/version", name="version", help="The version of kvmesh", tag=OTHERS, answer="Version", is_open=True),
    _get("/live", name="live", help="Whether the process runs", tag=OTHERS, answer="Live", is_open=True),
    _get("/openapi.json", name="openapi", help="This description", tag=OTHERS, answer="", is_open=True),
    _get("/docs", name="docs", help="This description for people", tag=OTHERS, answer="", answer_type="text/html", is_open=True),
    _get("/metrics", name="metrics", help="Prometheus metrics", tag=OTHERS, answer="", answer_type="text/plain", is_open=True),
)  # fmt: skip
