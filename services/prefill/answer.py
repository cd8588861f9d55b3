"""A computed prompt, or the token after it, as it is told."""

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.engines.base import EngineFinish
from kvmesh.rpc.codec.legs import to_output
from kvmesh.rpc.codec.scalars import fill_positive_duration, to_duration
from kvmesh.rpc.codec.types import fill_handle, to_usage
from kvmesh.worker.worker import Worker
from services.prefill.whole import Gathered


def to_response(
    worker: Worker, finish: EngineFinish, elapsed_s: float, gathered: Gathered | None = None
) -> pb.PrefillResponse:
    """The answer to a prompt that took so long, its lease as it is now. `gathered`: of a leg whose output is wanted."""
    queue_s = min(elapsed_s, finish.queue_s)
    response = pb.PrefillResponse(
        usage=to_usage(finish.usage),
        queue_time=to_duration(queue_s),
        compute_time=to_duration(elapsed_s - queue_s),
        output=None if gathered is None else to_output(gathered.output(finish)),
    )
    if (handle := finish.handle) is not None:
        fill_handle(response.handle, handle)
        # Less by what the answer spent between the engine and here.
        fill_positive_duration(response.handle.lease, worker.lease_left_s(handle.handle_id))
    return response
