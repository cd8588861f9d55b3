"""Recorded traffic on the wire."""

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.core.whatif import RecordedBatch, RecordedTraffic
from kvmesh.rpc.codec.scalars import from_timestamp, to_timestamp


def to_recorded(batch: RecordedBatch) -> pb.RecordRequestsResponse:
    return pb.RecordRequestsResponse(
        requests=[
            pb.FinishedRequest(
                arrived_at=to_timestamp(each.arrived_at_s),
                prompt_tokens=each.prompt_tokens,
                output_tokens=each.output_tokens,
                block_ids=each.block_ids,
            )
            for each in batch.requests
        ],
        lost_requests=batch.lost_requests,
    )


def from_recorded(message: pb.RecordRequestsResponse) -> RecordedBatch:
    return RecordedBatch(
        requests=tuple(
            RecordedTraffic(
                arrived_at_s=from_timestamp(each.arrived_at),
                prompt_tokens=each.prompt_tokens,
                output_tokens=each.output_tokens,
                block_ids=tuple(each.block_ids),
            )
            for each in message.requests
        ),
        lost_requests=message.lost_requests,
    )
