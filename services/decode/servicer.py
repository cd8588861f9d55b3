"""DecodeService: protobuf to worker and back, no decisions."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.decode.v1 import decode_pb2 as pb
from kvmesh.api.decode.v1 import decode_pb2_grpc
from kvmesh.checks import check_length
from kvmesh.core import FinishReason
from kvmesh.engines.base import EngineFinish, Leg
from kvmesh.errors import InternalError, InvalidRequestError, MeshError
from kvmesh.rpc.clients import LegFinish
from kvmesh.rpc.codec.embed import from_embed_request, to_embed_response
from kvmesh.rpc.codec.legs import (
    REQUEST_ID_MAX,
    from_submission,
    generation_of,
    handle_of,
    rendezvous_of,
    to_finish,
)
from kvmesh.rpc.codec.scalars import required_text, to_duration
from kvmesh.rpc.codec.types import to_logprobs
from kvmesh.rpc.deadline import remaining_s
from kvmesh.rpc.first_message import first_message
from kvmesh.worker.direct import DirectCalls, raise_failure
from kvmesh.worker.worker import Link, Submission, Worker
from services.decode.admit import DecodeAdmission
from services.decode.embedding import check_embed, embed_result, embed_submissions, first_failure
from services.decode.frames import FrameOutlet, engine_finish_to_pb

log = logging.getLogger(__name__)

SUBMISSIONS_PER_MESSAGE = 1024


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves one worker in the decode role."""

    def __init__(self, worker: Worker, admission: DecodeAdmission, *, embed_parallel_max: int = 64) -> None:
        self._worker = worker
        self._embed_parallel_max = embed_parallel_max
        self._admission = admission
        self._direct = DirectCalls(worker)
        self._numbers = itertools.count()

    def _own_id(self) -> str:
        return f"plain-{self._worker.identity.epoch:x}-{next(self._numbers)}"

    async def Attach(  # type: ignore[override]  # writes through the context, so that reading goes on beside it
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: ServicerContext[Any, Any]
    ) -> None:
        """All requests of one frontend; see the protocol in decode.proto."""
        first = await first_message(request_iterator)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message must be hello", field="hello")
        settings = self._worker.settings
        frontend_id = required_text(first.hello.frontend_id, "hello.frontend_id", 128)
        outlet = FrameOutlet(settings.link_buffer_frames, frontend_id)
        outlet.link = link = self._worker.open_link(outlet, settings.submissions_max)
        reader: asyncio.Task[None] | None = None
        try:
            await context.write(pb.AttachResponse(welcome=self._welcome()))
            reader = asyncio.create_task(self._read_requests(first, request_iterator, link, outlet))
            await outlet.write(context.write, settings.heartbeat_s, settings.frame_interval_s)
        finally:
            link.close_nowait()
            if reader is not None:
                reader.cancel()
                await asyncio.wait({reader})

    def _welcome(self) -> pb.Welcome:
        settings = self._worker.settings
        return pb.Welcome(
            worker_id=self._worker.identity.worker_id,
            epoch=self._worker.identity.epoch,
            heartbeat=to_duration(settings.heartbeat_s),
            submissions_max=settings.submissions_max,
            takes_packed_token_ids=True,
        )

    async def _read_requests(
        self, first: pb.AttachRequest, requests: AsyncIterator[pb.AttachRequest], link: Link, outlet: FrameOutlet
    ) -> None:
        try:
            self._take(first, link, outlet)
            async for request in requests:
                if request.HasField("hello"):
                    raise InvalidRequestError("hello may come once", field="hello")
                self._take(request, link, outlet)
        except MeshError as error:
            outlet.fail_nowait(error)
        except Exception:
            log.exception("attach_defect")
            outlet.fail_nowait(InternalError("a defect of the worker", where=self._worker.identity.worker_id))
        finally:
            outlet.close_nowait()

    def _take(self, request: pb.AttachRequest, link: Link, outlet: FrameOutlet) -> None:
        """Submissions before cancels, so that a message may hold both of one slot."""
        check_length(len(request.submissions), "submissions", 0, SUBMISSIONS_PER_MESSAGE, "entries")
        for submission in request.submissions:
            self._submit(submission, link, outlet)
        for slot in request.cancels:
            link.cancel_nowait(slot)

    def _submit(self, message: pb.Submission, link: Link, outlet: FrameOutlet) -> None:
        """Hands a submission to the worker; a refusal is the slot's finish.

        A slot in use ends the stream instead: its finish would be taken for that of the leg that has the slot.
        """
        if link.has_leg(message.slot):
            raise InvalidRequestError(f"slot {message.slot} is in use", field="slot", reason="slot_in_use")
        try:
            self._admission.check(self._worker.legs, self._worker.engine.load)
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
        self._admission.check(self._worker.legs, self._worker.engine.load)
        submission = Submission(
            slot=0,
            request_id=required_text(request.request_id or self._own_id(), "request_id", REQUEST_ID_MAX),
            leg=Leg.DECODE,
            generation=generation_of(request),
            timeout_s=remaining_s(context),
            handle=handle_of(request),
            rendezvous=rendezvous_of(request),
        )
        stream = self._direct.stream(submission)
        try:
            async for step in stream:
                if step.finish is not None:
                    raise_failure(step.finish)
                prompt = step.prompt_logprobs
                yield pb.GenerateResponse(
                    prompt_logprobs=None if prompt is None else to_logprobs(prompt),
                    token_ids=step.token_ids,
                    logprobs=None if step.logprobs is None else to_logprobs(step.logprobs),
                    finish=None if step.finish is None else engine_finish_to_pb(step.finish, slot=0),
                )
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext[Any, Any]) -> pb.EmbedResponse:
        """Many inputs at once, which the engine batches. The first failure ends the others."""
        call = from_embed_request(request, own_id=self._own_id())
        check_embed(self._worker.description)
        self._admission.check(self._worker.legs, self._worker.engine.load)
        timeout_s = remaining_s(context)
        room = asyncio.Semaphore(self._embed_parallel_max)

        async def run(submission: Submission) -> EngineFinish:
            async with room:
                return await self._direct.run(submission)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(each)) for each in embed_submissions(call, timeout_s)]
        except* MeshError as errors:
            failure = first_failure(errors)
        else:
            return to_embed_response(embed_result([task.result() for task in tasks]))
        raise failure
