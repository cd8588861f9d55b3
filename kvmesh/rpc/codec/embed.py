"""Embedding requests on the wire."""

from kvmesh.api.decode.v1 import decode_pb2 as pb
from kvmesh.checks import ADAPTER_BYTES_MAX, TRACEPARENT_BYTES_MAX, check_length, check_text
from kvmesh.rpc.clients import EmbedCall, EmbedResult
from kvmesh.rpc.codec.scalars import optional_field, required_text
from kvmesh.rpc.codec.types import from_usage, to_usage

INPUTS_MAX = 2048
REQUEST_ID_MAX = 120


def to_embed_request(call: EmbedCall) -> pb.EmbedRequest:
    """The wire form."""
    return pb.EmbedRequest(
        request_id=call.request_id,
        model=call.model,
        inputs=[pb.EmbedInput(token_ids=token_ids) for token_ids in call.inputs],
        dimensions=call.dimensions,
        adapter=call.adapter,
        priority=call.priority,
        traceparent=call.traceparent,
        reservation_id=call.reservation_id,
    )


def from_embed_request(message: pb.EmbedRequest, *, own_id: str) -> EmbedCall:
    """The value, checked but for what depends on the model. `own_id`: used when the caller gave none."""
    check_length(len(message.inputs), "inputs", 1, INPUTS_MAX, "entries")
    check_text(message.adapter, "adapter", ADAPTER_BYTES_MAX)
    check_text(message.traceparent, "traceparent", TRACEPARENT_BYTES_MAX)
    return EmbedCall(
        request_id=required_text(message.request_id or own_id, "request_id", REQUEST_ID_MAX),
        model=required_text(message.model, "model", 256),
        inputs=[list(each.token_ids) for each in message.inputs],
        dimensions=optional_field(message, "dimensions"),
        adapter=message.adapter,
        priority=message.priority,
        traceparent=message.traceparent,
        reservation_id=message.reservation_id,
    )


def to_embed_response(result: EmbedResult) -> pb.EmbedResponse:
    """The wire form."""
    return pb.EmbedResponse(
        vectors=[pb.EmbedVector(values=vector) for vector in result.vectors], usage=to_usage(result.usage)
    )


def from_embed_response(message: pb.EmbedResponse) -> EmbedResult:
    """The value."""
    return EmbedResult(vectors=[list(each.values) for each in message.vectors], usage=from_usage(message.usage))
