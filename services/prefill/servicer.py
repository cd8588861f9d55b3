"""PrefillService: protobuf to worker and back, no decisions."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.api.prefill.v1 import prefill_pb2_grpc
from kvmesh.clock import Clock
from kvmesh.core import FinishReason
from kvmesh.engines.base import Leg
from kvmesh.errors import InternalError, InvalidRequestError, LostError, MeshError
from kvmesh.rpc.codec.legs import REQUEST_ID_MAX, generation_of, rendezvous_of, wants_output
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.deadline import remaining_s
from kvmesh.rpc.first_message import first_message
from kvmesh.worker.direct import DirectCalls
from kvmesh.worker.worker import Submission, Worker
from services.prefill.admit import PrefillAdmission
from services.prefill.answer import to_response
from services.prefill.stream import PrefillStream
from services.prefill.whole import answers_single_tokens, leg_for, run_whole

log = logging.getLogger(__name__)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one worker in the prefill role."""

    def __init__(self, worker: Worker, admission: PrefillAdmission, clock: Clock) -> None:
        self._worker = worker
        self._admission = admission
        self._clock = clock
        self._direct = DirectCalls(worker)

    async def Prefill(self, request: pb.PrefillRequest, context: ServicerContext[Any, Any]) -> pb.PrefillResponse:
        """Computes one prompt; cancelling the call stops it and frees its blocks."""
        generation = generation_of(request)
        submission = Submission(
            slot=0,
            request_id=required_text(request.request_id, "request_id", REQUEST_ID_MAX),
            leg=leg_for(self._worker, wants_output=wants_output(request, generation)),
            generation=generation,
            timeout_s=remaining_s(context),
            rendezvous=rendezvous_of(request),
        )
        prompt_tokens = len(generation.token_ids) + len(generation.emitted_token_ids)
        self._admission.check(self._worker.legs, self._worker.engine.load, prompt_tokens)
        started_s = self._clock.now()
        finish, gathered = await run_whole(self._direct, submission)
        if finish.reason is FinishReason.CANCELLED:
            # A caller who cancels does not wait for this; somebody else has stopped the engine.
            raise LostError("the prefill was cancelled", where=self._worker.identity.worker_id)
        is_whole = submission.leg is Leg.DECODE
        return to_response(self._worker, finish, self._clock.now() - started_s, gathered if is_whole else None)

    async def Attach(  # type: ignore[override]  # writes through the context, so that reading goes on beside it
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: ServicerContext[Any, Any]
    ) -> None:
        """All prompts of one frontend; see the protocol in prefill.proto."""
        first = await first_message(request_iterator)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message must be hello", field="hello")
        frontend_id = required_text(first.hello.frontend_id, "hello.frontend_id", 128)
        stream = PrefillStream(self._worker, self._admission, self._clock, frontend_id)
        reader: asyncio.Task[None] | None = None
        try:
            identity = self._worker.identity
            welcome = pb.Welcome(
                worker_id=identity.worker_id,
                epoch=identity.epoch,
                takes_packed_token_ids=True,
                answers_single_tokens=answers_single_tokens(self._worker),
            )
            await context.write(pb.AttachResponse(welcome=welcome))
            reader = asyncio.create_task(self._read(first, request_iterator, stream), name="prefill-stream-read")
            async for response in stream.responses():
                await context.write(response)
        finally:
            stream.close_nowait()
            if reader is not None:
                reader.cancel()
                await asyncio.wait({reader})

    async def _read(
        self, first: pb.AttachRequest, requests: AsyncIterator[pb.AttachRequest], stream: PrefillStream
    ) -> None:
        try:
            stream.take(first)
            async for request in requests:
                if request.HasField("hello"):
                    raise InvalidRequestError("hello may come once", field="hello")
                stream.take(request)
        except MeshError as error:
            stream.fail_nowait(error)
        except Exception:
            log.exception("attach_defect")
            stream.fail_nowait(InternalError("a defect of the worker", where=self._worker.identity.worker_id))
        finally:
            stream.end_nowait()

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: ServicerContext[Any, Any]) -> pb.ReleaseKvResponse:
        """Gives a handle's blocks back."""
        handle_id = required_text(request.handle_id, "handle_id", 128)
        return pb.ReleaseKvResponse(was_held=self._worker.release_nowait(handle_id))
