"""PrefillService: protobuf to worker and back, no decisions."""

from dataclasses import replace
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.api.prefill.v1 import prefill_pb2_grpc
from kvmesh.clock import Clock
from kvmesh.core import FinishReason
from kvmesh.engines.base import EngineFinish, Leg
from kvmesh.errors import LostError
from kvmesh.rpc.codec.legs import REQUEST_ID_MAX, generation_of, rendezvous_of
from kvmesh.rpc.codec.scalars import required_text, to_duration
from kvmesh.rpc.codec.types import to_handle, to_usage
from kvmesh.rpc.deadline import remaining_s
from kvmesh.worker.direct import DirectCalls
from kvmesh.worker.worker import Submission, Worker
from services.prefill.admit import PrefillAdmission


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one worker in the prefill role."""

    def __init__(self, worker: Worker, admission: PrefillAdmission, clock: Clock) -> None:
        self._worker = worker
        self._admission = admission
        self._clock = clock
        self._direct = DirectCalls(worker)

    async def Prefill(self, request: pb.PrefillRequest, context: ServicerContext[Any, Any]) -> pb.PrefillResponse:
        """Computes one prompt; cancelling the call stops it and frees its blocks."""
        submission = Submission(
            slot=0,
            request_id=required_text(request.request_id, "request_id", REQUEST_ID_MAX),
            leg=Leg.PREFILL,
            generation=generation_of(request),
            timeout_s=remaining_s(context),
            rendezvous=rendezvous_of(request),
        )
        generation = submission.generation
        prompt_tokens = len(generation.token_ids) + len(generation.emitted_token_ids)
        self._admission.check(self._worker.engine.load(), prompt_tokens)
        started_s = self._clock.now()
        finish = await self._direct.run(submission)
        if finish.reason is not FinishReason.HANDED_OFF:
            # A caller who cancels does not wait for this; somebody else has stopped the engine.
            raise LostError("the prefill was cancelled", where=self._worker.identity.worker_id)
        return self._response(finish, self._clock.now() - started_s)

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: ServicerContext[Any, Any]) -> pb.ReleaseKvResponse:
        """Gives a handle's blocks back."""
        handle_id = required_text(request.handle_id, "handle_id", 128)
        return pb.ReleaseKvResponse(was_held=self._worker.release_nowait(handle_id))

    def _response(self, finish: EngineFinish, elapsed_s: float) -> pb.PrefillResponse:
        handle = finish.handle
        if handle is not None:
            # What the answer spent between the engine and here.
            handle = replace(handle, lease_s=self._worker.lease_left_s(handle.handle_id))
        queue_s = min(elapsed_s, finish.queue_s)
        return pb.PrefillResponse(
            handle=None if handle is None else to_handle(handle),
            usage=to_usage(finish.usage),
            queue_time=to_duration(queue_s),
            compute_time=to_duration(elapsed_s - queue_s),
        )
