"""Batches of InferenceService, for clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.batch import ENDPOINT_NUMBERS, ENDPOINTS
from kvmesh.rpc.codec.message_codec import MessageCodec
from kvmesh.rpc.codec.scalars import from_timestamp, to_positive_duration
from kvmesh.rpc.codec.types import from_usage

_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProblem:
    """A problem of a batch's requests. `line`: 1 up; 0: all lines."""

    reason: str
    message: str
    line: int
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The state of a batch. `status`: as in OpenAI's API. File ids are empty if there is no file."""

    id: str
    endpoint: str
    status: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    lines_total: int
    lines_completed: int
    lines_failed: int
    usage: Usage
    problems: Sequence[BatchProblem]
    created_s: float
    expires_s: float
    metadata: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """True when the batch no longer changes."""
        return self.status in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """The response to one request: the HTTP API's body, or `{"error": ...}`. `status_code` 0: it was not run."""

    custom_id: str
    status_code: int
    body: Mapping[str, Any]


_BATCH = MessageCodec(pb.Batch, Batch, problems=MessageCodec(pb.BatchProblem, BatchProblem))


def create_batch_message(
    endpoint: str,
    requests: Mapping[str, Mapping[str, Any]] | None,
    *,
    input_file_id: str,
    window_s: float | None,
    metadata: Mapping[str, str] | None,
) -> pb.CreateBatchRequest:
    """`requests`: bodies of the HTTP API by custom id. None: they are in the file."""
    if endpoint not in ENDPOINT_NUMBERS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINT_NUMBERS)}", field="endpoint")
    if (requests is None) != bool(input_file_id):
        raise InvalidRequestError("either requests or input_file_id must be given", field="input")
    lines = None
    if requests is not None:
        bodies = [(custom_id, orjson.dumps(body).decode()) for custom_id, body in requests.items()]
        lines = pb.BatchLines(lines=[pb.BatchLine(custom_id=custom_id, body=body) for custom_id, body in bodies])
    return pb.CreateBatchRequest(
        endpoint=ENDPOINT_NUMBERS[endpoint],
        input_file_id=None if lines is not None else input_file_id,
        lines=lines,
        completion_window=None if window_s is None else to_positive_duration(window_s),
        metadata=metadata or {},
    )


def get_batch_message(batch_id: str) -> pb.GetBatchRequest:
    return pb.GetBatchRequest(batch_id=batch_id)


def list_batches_message(limit: int, after: str) -> pb.ListBatchesRequest:
    return pb.ListBatchesRequest(page_size=limit, after=after)


def cancel_batch_message(batch_id: str) -> pb.CancelBatchRequest:
    return pb.CancelBatchRequest(batch_id=batch_id)


def batch_results_message(batch_id: str) -> pb.ListBatchResultsRequest:
    return pb.ListBatchResultsRequest(batch_id=batch_id)


def from_batch(message: pb.Batch) -> Batch:
    return _BATCH.decode(
        message,
        endpoint=ENDPOINTS.get(message.endpoint, ""),
        status=pb.BatchStatus.Name(message.status).removeprefix("BATCH_STATUS_").lower(),
        usage=from_usage(message.usage),
        created_s=from_timestamp(message.created_at),
        expires_s=from_timestamp(message.expires_at),
        metadata=dict(message.metadata),
    )


def from_batch_result(message: pb.ListBatchResultsResponse) -> BatchAnswer:
    return BatchAnswer(
        custom_id=message.custom_id, status_code=message.status_code, body=orjson.loads(message.body or "{}")
    )
