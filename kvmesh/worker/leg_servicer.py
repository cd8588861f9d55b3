"""PrefillService and DecodeService: protobuf to the worker and back, no decisions. The two differ in role and `RoleAdmission`."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext

from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.checks import check_length
from kvmesh.constraint_costs import judge_long
from kvmesh.core import Leg, Role
from kvmesh.errors import InternalError, InvalidRequestError, MeshError, UnavailableError, UnsupportedError
from kvmesh.event_log import event_logger
from kvmesh.rpc.codec.legs import LEG_TASK_NUMBERS, from_leg, to_finish
from kvmesh.rpc.codec.sampling import from_constraint
from kvmesh.rpc.codec.scalars import positive_duration, required_text, to_duration
from kvmesh.rpc.codec.types import to_logprobs
from kvmesh.rpc.deadline import remaining_s
from kvmesh.worker.admission import RoleAdmission
from kvmesh.worker.frames import FrameOutlet
from kvmesh.worker.single_leg import stream_leg
from kvmesh.worker.worker import Worker

_log = event_logger(__name__)

SUBMISSIONS_PER_MESSAGE = 1024
RELEASES_PER_MESSAGE = 1024
ID_CHARACTERS_MAX = 128
HELLO_TIMEOUT_S = 10.0
"""Longest time from the start of a stream to its first message."""


class LegServicer:
    """Serves one worker in one role. Refuses legs while the worker has another role."""

    def __init__(self, worker: Worker, role: Role, admission: RoleAdmission) -> None:
        self._worker = worker
        self._role = role
        self._admission = admission
        self._numbers = itertools.count()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: ServicerContext[Any, Any]
    ) -> None:
        """All legs of one frontend; see the protocol in legs.proto. Writes through the context, so that reading continues."""
        first = await _first_message(request_iterator)
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message must be hello", field="hello")
        settings = self._worker.settings
        outlet = FrameOutlet(
            self._worker,
            required_text(first.hello.frontend_id, field="hello.frontend_id", characters_max=ID_CHARACTERS_MAX),
            steps_max=settings.link_buffer_frames,
            legs_max=settings.submissions_max,
        )
        reader: asyncio.Task[None] | None = None
        try:
            await context.write(pb.AttachResponse(welcome=self._welcome()))
            reader = asyncio.create_task(self._read_requests(first, request_iterator, outlet), name="attach-read")
            await outlet.write_frames(context.write, heartbeat_s=settings.heartbeat_s)
        finally:
            outlet.close_nowait()
            if reader is not None:
                reader.cancel()
                # `wait` does not raise the reader's own CancelledError.
                await asyncio.wait({reader})

    def _welcome(self) -> pb.Welcome:
        settings = self._worker.settings
        return pb.Welcome(
            worker_id=self._worker.identity.worker_id,
            epoch=self._worker.identity.epoch,
            heartbeat=to_duration(settings.heartbeat_s),
            submissions_max=settings.submissions_max,
            tasks=[LEG_TASK_NUMBERS[task] for task in self._admission.tasks(self._worker.description.capabilities)],
        )

    async def _read_requests(
        self, first: pb.AttachRequest, requests: AsyncIterator[pb.AttachRequest], outlet: FrameOutlet
    ) -> None:
        try:
            await self._take(first, outlet)
            async for request in requests:
                if request.HasField("hello"):
                    raise InvalidRequestError("hello may be sent only once", field="hello")
                await self._take(request, outlet)
        except MeshError as error:
            outlet.fail_nowait(error)
        except DecodeError:
            # The peer's error. Of the first message the server's error boundary says the same.
            _log.warning("attach_message_invalid", frontend_id=first.hello.frontend_id)
            outlet.fail_nowait(InvalidRequestError("the message cannot be decoded", reason="invalid_message"))
        except Exception as error:  # noqa: BLE001  # A defect ends this stream, not the worker.
            _log.error("attach_defect", exc_info=error)
            outlet.fail_nowait(InternalError("internal error of the worker", where=self._worker.identity.worker_id))
        finally:
            outlet.end_nowait()

    async def _take(self, request: pb.AttachRequest, outlet: FrameOutlet) -> None:
        """Submissions before cancels, so that a message may hold both of one slot."""
        check_length(len(request.submissions), "submissions", high=SUBMISSIONS_PER_MESSAGE)
        check_length(len(request.releases), "releases", high=RELEASES_PER_MESSAGE)
        for submission in request.submissions:
            await _judge_long_constraint(submission.leg)
            self._submit(submission, outlet)
        for slot in request.cancels:
            outlet.link.cancel_nowait(slot)
        for handle_id in request.releases:
            self._worker.release_nowait(required_text(handle_id, field="releases", characters_max=ID_CHARACTERS_MAX))

    def _submit(self, message: pb.Submission, outlet: FrameOutlet) -> None:
        """Hands a submission to the worker; a refusal is the slot's finish.

        A slot in use ends the stream instead: its finish would be taken for that of the leg that has the slot.
        """
        if outlet.link.has_leg(message.slot):
            raise InvalidRequestError(f"slot {message.slot} is in use", field="slot", reason="slot_in_use")
        try:
            leg = from_leg(message.leg)
            timeout_s = positive_duration(message, "timeout", field="timeout")
            self._admit(leg)
            outlet.link.submit_nowait(message.slot, leg, timeout_s)
        except MeshError as error:
            outlet.refuse_nowait(message.slot, error)

    def _admit(self, leg: Leg) -> None:
        description = self._worker.description
        if description.role is not self._role:
            raise UnavailableError(
                f"the worker's role is {description.role.value} now",
                reason="role_changed",
                where=self._worker.identity.worker_id,
            )
        if leg.task not in self._admission.tasks(description.capabilities):
            raise UnsupportedError(
                f"this {self._role.value} worker does not run {leg.task.value} legs",
                field="task",
                reason="task_unsupported",
            )
        self._admission.check(leg, self._worker.legs, self._worker.engine.load)

    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One leg of a plain client."""
        await _judge_long_constraint(request.leg)
        own_id = f"plain-{self._worker.identity.epoch:x}-{next(self._numbers)}"
        leg = from_leg(request.leg, default_id=own_id)
        self._admit(leg)
        steps = stream_leg(self._worker, leg, timeout_s=remaining_s(context))
        try:
            async for step in steps:
                yield pb.GenerateResponse(
                    token_ids=step.token_ids,
                    logprobs=None if step.logprobs is None else to_logprobs(step.logprobs),
                    prompt_logprobs=None if step.prompt_logprobs is None else to_logprobs(step.prompt_logprobs),
                    finish=None
                    if step.finish is None
                    else to_finish(0, step.finish, lease_s=self._worker.lease_left_s(step.finish.handle)),
                )
        finally:
            # Now, not when the garbage collector finds the generator: this cancels the leg.
            await steps.aclose()  # type: ignore[attr-defined]

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: ServicerContext[Any, Any]) -> pb.ReleaseKvResponse:
        """Gives a handle's blocks back."""
        if request.leg_id:
            if request.handle_id:
                raise InvalidRequestError("set handle_id or leg_id, not both", field="leg_id")
            leg_id = required_text(request.leg_id, field="leg_id", characters_max=ID_CHARACTERS_MAX)
            return pb.ReleaseKvResponse(was_held=self._worker.release_leg_nowait(leg_id))
        handle_id = required_text(request.handle_id, field="handle_id", characters_max=ID_CHARACTERS_MAX)
        return pb.ReleaseKvResponse(was_held=self._worker.release_nowait(handle_id))


async def _first_message(messages: AsyncIterator[pb.AttachRequest]) -> pb.AttachRequest | None:
    """Returns None if the stream ended without one. Raises UnavailableError on timeout, so that a paused caller opens it again."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise UnavailableError(f"no hello within {HELLO_TIMEOUT_S:g} s", reason="no_hello") from None


async def _judge_long_constraint(leg: pb.Leg) -> None:
    """An invalid constraint is left to the checks of the leg."""
    if not leg.generation.sampling.HasField("constraint"):
        return
    with suppress(InvalidRequestError):
        await judge_long(from_constraint(leg.generation.sampling.constraint, prefix=""))
