"""Batches of InferenceService, for the frontend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.checks import check_length
from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.scalars import known_enum, positive_duration, required_text, to_timestamp
from kvmesh.rpc.codec.types import to_usage

WINDOW_S = 86_400.0
ID_CHARACTERS_MAX = 128
METADATA_MAX = 16
ENDPOINTS: Mapping[int, str] = {
    pb.BATCH_ENDPOINT_CHAT_COMPLETIONS: "/v1/chat/completions",
    pb.BATCH_ENDPOINT_COMPLETIONS: "/v1/completions",
    pb.BATCH_ENDPOINT_EMBEDDINGS: "/v1/embeddings",
    pb.BATCH_ENDPOINT_RESPONSES: "/v1/responses",
}
ENDPOINT_NUMBERS: Mapping[str, Any] = {path: number for number, path in ENDPOINTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall:
    """A batch to create. `lines` are pairs of a custom id and a JSON body; None: they are in the file."""

    endpoint: str
    input_file_id: str = ""
    lines: Sequence[tuple[str, str]] | None = None
    window_s: float = WINDOW_S
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The response to one line. `status_code` 0: it was not run. `body` is a JSON object."""

    custom_id: str
    status_code: int
    body: str


def from_create_batch(message: pb.CreateBatchRequest, *, lines_max: int) -> BatchCall:
    """Returns the value. Checks the counts before it builds the lists: a message of 8 MB has room for millions of entries."""
    check_length(len(message.metadata), "metadata", high=METADATA_MAX)
    kind = message.WhichOneof("input")
    if kind == "lines":
        check_length(len(message.lines.lines), "lines.lines", low=1, high=lines_max)
    if kind is None:
        raise InvalidRequestError("input_file_id or lines must be given", field="input")
    window_s = positive_duration(message, "completion_window", field="completion_window")
    return BatchCall(
        endpoint=known_enum(message.endpoint, ENDPOINTS, "endpoint"),
        input_file_id=message.input_file_id,
        lines=[(line.custom_id, line.body) for line in message.lines.lines] if kind == "lines" else None,
        window_s=WINDOW_S if window_s is None else window_s,
        metadata=dict(message.metadata),
    )


def batch_id_of(message: pb.GetBatchRequest | pb.CancelBatchRequest | pb.ListBatchResultsRequest) -> str:
    return required_text(message.batch_id, field="batch_id", characters_max=ID_CHARACTERS_MAX)


def to_batch(body: Mapping[str, Any], *, created_s: float, expires_s: float) -> pb.Batch:
    """`body`: the batch as the HTTP API shows it."""
    counts, usage = body["request_counts"], body["usage"]
    status: Any = pb.BatchStatus.Value(f"BATCH_STATUS_{body['status'].upper()}")
    problems = (body["errors"] or {"data": ()})["data"]
    return pb.Batch(
        id=body["id"],
        endpoint=ENDPOINT_NUMBERS[body["endpoint"]],
        status=status,
        input_file_id=body["input_file_id"],
        output_file_id=body["output_file_id"] or "",
        error_file_id=body["error_file_id"] or "",
        lines_total=counts["total"],
        lines_completed=counts["completed"],
        lines_failed=counts["failed"],
        usage=to_usage(
            Usage(
                prompt_tokens=usage["input_tokens"],
                output_tokens=usage["output_tokens"],
                cached_tokens=usage["input_tokens_details"]["cached_tokens"],
                reasoning_tokens=usage["output_tokens_details"]["reasoning_tokens"],
            )
        ),
        problems=[
            pb.BatchProblem(
                reason=each["code"], message=each["message"], line=each["line"] or 0, field=each["param"] or ""
            )
            for each in problems
        ],
        created_at=to_timestamp(created_s),
        expires_at=to_timestamp(expires_s),
        metadata=body["metadata"] or {},
    )


def to_batch_result(result: BatchResult) -> pb.ListBatchResultsResponse:
    return pb.ListBatchResultsResponse(custom_id=result.custom_id, status_code=result.status_code, body=result.body)
