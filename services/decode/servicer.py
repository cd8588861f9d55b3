"""DecodeService: protobuf to worker and back, no decisions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.decode.v1 import decode_pb2 as pb
from kvmesh.api.decode.v1 import decode_pb2_grpc
from kvmesh.core import FinishReason
from kvmesh.engines.base import Leg
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.rpc.clients import LegFinish
from kvmesh.rpc.codec.legs import from_submission, generation_of, handle_of, rendezvous_of, to_finish
from kvmesh.rpc.codec.scalars import required_text, to_duration
from kvmesh.rpc.codec.types import to_logprobs
from kvmesh.rpc.deadline import remaining_s
from kvmesh.worker.direct import DirectCalls
from kvmesh.worker.worker import Link, Submission, Worker
from services.decode.admit import DecodeAdmission
from services.decode.frames import FrameOutlet, engine_finish_to_pb


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one worker in the decode role."""

    def __init__(self, worker: Worker, admission: DecodeAdmission) -> None:
        self._worker = worker
        self._admission = admission
        self._direct = DirectCalls(worker)

    async def Attach(  # type: ignore[override]  # writes through the context, so that reading goes on beside it
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: ServicerContext[Any, Any]
    ) -> None:
        """All requests of one frontend; see the protocol in decode.proto."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message must be hello", field="hello")
        required_text(first.hello.frontend_id, "hello.frontend_id", 128)
        settings = self._worker.settings
        outlet = FrameOutlet(settings.link_buffer_frames)
        outlet.link = link = self._worker.open_link(outlet)
        await context.write(pb.AttachResponse(welcome=self._welcome()))
        reader = asyncio.create_task(self._read_requests(request_iterator, link, outlet))
        try:
            async for response in outlet.frames(settings.heartbeat_s):
                await context.write(response)
        finally:
            link.close_nowait()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _welcome(self) -> pb.Welcome:
        settings = self._worker.settings
        return pb.Welcome(
            worker_id=self._worker.identity.worker_id,
            epoch=self._worker.identity.epoch,
            heartbeat=to_duration(settings.heartbeat_s),
            submissions_max=settings.submissions_max,
        )

    async def _read_requests(self, requests: AsyncIterator[pb.AttachRequest], link: Link, outlet: FrameOutlet) -> None:
        try:
            async for request in requests:
                for submission in request.submissions:
                    self._submit(submission, link, outlet)
                for slot in request.cancels:
                    link.cancel_nowait(slot)
        finally:
            outlet.close_nowait()

    def _submit(self, message: pb.Submission, link: Link, outlet: FrameOutlet) -> None:
        """Hands a submission to the worker; a refusal is the slot's finish."""
        try:
            self._admission.check(self._worker.engine.load())
            leg = from_submission(message)
            link.submit_nowait(
                Submission(
                    slot=message.slot,
                    request_id=leg.request_id,
                    leg=Leg.DECODE,
                    generation=leg.generation,
                    timeout_s=leg.timeout_s,
                    handle=leg.handle,
                    rendezvous=leg.rendezvous,
                )
            )
        except MeshError as error:
            finish = LegFinish(reason=FinishReason.ERROR, error=error)
            outlet.put_nowait(pb.StepFrame(finishes=[to_finish(message.slot, finish)]))

    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One request of a plain client."""
        self._admission.check(self._worker.engine.load())
        submission = Submission(
            slot=0,
            request_id=request.request_id or f"plain-{id(context):x}-{self._worker.identity.epoch:x}",
            leg=Leg.DECODE,
            generation=generation_of(request),
            timeout_s=remaining_s(context),
            handle=handle_of(request),
            rendezvous=rendezvous_of(request),
        )
        stream = self._direct.stream(submission)
        try:
            async for step in stream:
                if step.finish is not None and step.finish.error is not None:
                    raise step.finish.error
                yield pb.GenerateResponse(
                    token_ids=step.token_ids,
                    logprobs=None if step.logprobs is None else to_logprobs(step.logprobs),
                    finish=None if step.finish is None else engine_finish_to_pb(step.finish, slot=0),
                )
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
