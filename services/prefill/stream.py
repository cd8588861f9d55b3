"""One Attach stream: calls in, results out, as many in a message as there are."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.checks import check_length
from kvmesh.clock import Clock
from kvmesh.core import FinishReason, TokenLogprob
from kvmesh.engines.base import EngineFinish, Leg
from kvmesh.errors import InvalidRequestError, LostError, MeshError, OverloadedError
from kvmesh.rpc.codec.legs import REQUEST_ID_MAX, generation_of, rendezvous_of, wants_output
from kvmesh.rpc.codec.scalars import positive_duration, required_text
from kvmesh.rpc.status import to_detail
from kvmesh.worker.slots import SLOT_MASK, SLOTS_MAX, LinkStep, key_of
from kvmesh.worker.worker import Submission, Worker
from services.prefill.admit import PrefillAdmission
from services.prefill.answer import to_response
from services.prefill.whole import Gathered, leg_for

log = logging.getLogger(__name__)
CALLS_PER_MESSAGE = 1024


@dataclass(slots=True, kw_only=True)
class _Call:
    """A prompt in the engine."""

    number: int
    began_s: float
    is_wanted: bool = True
    gathered: Gathered | None = None
    """Of one whose output is wanted."""


class PrefillStream:
    """The worker's link of one frontend.

    1. Every call gets one result, unless it was cancelled or the stream ended first.
    2. A handle is told to the frontend or released at once.
    """

    def __init__(self, worker: Worker, admission: PrefillAdmission, clock: Clock, frontend_id: str) -> None:
        self._worker = worker
        self._admission = admission
        self._clock = clock
        self._frontend_id = frontend_id
        self._calls: dict[int, _Call] = {}
        self._slots: dict[int, int] = {}
        self._last_slot = 0
        self._results: list[pb.Result] = []
        self._long_results: deque[pb.Result] = deque()
        """Those with log-probabilities of a prompt, which are as long as it: together they would reach gRPC's limit."""
        self._wakeup = asyncio.Event()
        self._error: MeshError | None = None
        self._is_ended = False
        self._link = worker.open_link(self, worker.settings.submissions_max)

    def take(self, message: pb.AttachRequest) -> None:
        """What the frontend says. InvalidRequestError ends the stream."""
        check_length(len(message.calls), "calls", 0, CALLS_PER_MESSAGE, "entries")
        for call in message.calls:
            self._begin(call)
        for number in message.cancels:
            self._cancel(number)
        for handle_id in message.releases:
            self._worker.release_nowait(required_text(handle_id, "releases", 128))

    def _begin(self, call: pb.Call) -> None:
        """Hands a prompt to the engine; a refusal is its result."""
        if call.number in self._slots:
            # Its result would be taken for that of the call which has the number.
            raise InvalidRequestError(f"number {call.number} is in use", field="number", reason="number_in_use")
        try:
            submission = self._submission(call)
            generation = submission.generation
            tokens = len(generation.token_ids) + len(generation.emitted_token_ids)
            self._admission.check(self._worker.legs, self._worker.engine.load, tokens)
            self._link.submit_nowait(submission)
        except MeshError as error:
            self._put(pb.Result(number=call.number, error=to_detail(error)))
            return
        gathered = Gathered() if submission.leg is Leg.DECODE else None
        self._calls[submission.slot] = _Call(number=call.number, began_s=self._clock.now(), gathered=gathered)
        self._slots[call.number] = submission.slot

    def _submission(self, call: pb.Call) -> Submission:
        request = call.request
        generation = generation_of(request)
        return Submission(
            slot=self._free_slot(),
            request_id=required_text(request.request_id, "request_id", REQUEST_ID_MAX),
            leg=leg_for(self._worker, wants_output=wants_output(request, generation)),
            generation=generation,
            timeout_s=positive_duration(call, "timeout", "timeout"),
            rendezvous=rendezvous_of(request),
        )

    def _free_slot(self) -> int:
        self._last_slot = (self._last_slot + 1) % SLOTS_MAX
        return self._last_slot

    def _cancel(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._calls[slot].is_wanted = False
            self._link.cancel_nowait(slot)

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """Finishes become results; of prompts that are handed on they are all there is."""
        if share.slots or share.prompt_logprobs:
            self._gather(share, logprobs)
        for finish in share.finishes:
            call = self._calls.pop(finish.key & SLOT_MASK, None)
            if call is not None and call.is_wanted:
                del self._slots[call.number]
                self._put(self._result(call, finish))
            elif finish.handle is not None:
                self._worker.release_nowait(finish.handle.handle_id)

    def _gather(self, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """Keeps what a step gave to answers that are told whole."""
        for slot, prompt in share.prompt_logprobs.items():
            if (call := self._calls.get(slot)) is not None and call.gathered is not None:
                call.gathered.prompt_logprobs = prompt
        start = 0
        for position, slot in enumerate(share.slots):
            end = start + (1 if share.counts is None else share.counts[position])
            if (call := self._calls.get(slot)) is not None and call.gathered is not None:
                call.gathered.token_ids += share.token_ids[start:end]
                call.gathered.logprobs += logprobs.get(key_of(self._link.number, slot), ())
            start = end

    def _result(self, call: _Call, finish: EngineFinish) -> pb.Result:
        if finish.reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            response = to_response(self._worker, finish, self._clock.now() - call.began_s, call.gathered)
            return pb.Result(number=call.number, response=response)
        where = self._worker.identity.worker_id
        # A frontend that cancels does not wait for this; somebody else has stopped the engine.
        error = finish.error or LostError("the prefill was cancelled", where=where)
        return pb.Result(number=call.number, error=to_detail(error))

    def _put(self, result: pb.Result) -> None:
        waiting = len(self._results) + len(self._long_results)
        if self._error is None and waiting >= self._worker.settings.link_buffer_frames:
            log.warning("link_stalled", extra={"data": {"frontend": self._frontend_id, "results": waiting}})
            self.fail_nowait(OverloadedError("the frontend does not read its results", reason="link_stalled"))
            self.close_nowait()
        if self._error is not None:
            self._give_back(result)
            return
        is_long = result.response.output.HasField("prompt_logprobs")
        (self._long_results if is_long else self._results).append(result)
        self._wakeup.set()

    def _give_back(self, result: pb.Result) -> None:
        if result.response.HasField("handle"):
            self._worker.release_nowait(result.response.handle.handle_id)

    def on_lost(self, error: MeshError) -> None:
        """The engine died or the worker stops."""
        self.fail_nowait(error)

    def fail_nowait(self, error: MeshError) -> None:
        """Ends the stream after what is queued."""
        self._error = self._error or error
        self._wakeup.set()

    def end_nowait(self) -> None:
        """The frontend has said its last; what it asked for is not wanted any more."""
        self._is_ended = True
        self._wakeup.set()

    def close_nowait(self) -> None:
        """Cancels what is in the engine; handles that were not told are released. Idempotent."""
        self._link.close_nowait()
        results, self._results = self._results, []
        for result in results:
            self._give_back(result)
        self._long_results.clear()

    async def responses(self) -> AsyncIterator[pb.AttachResponse]:
        """Messages as they come, until the stream ends. Raises the failure that ended it."""
        while True:
            while self._results:
                results, self._results = self._results, []
                yield pb.AttachResponse(results=results)
            if self._long_results:
                yield pb.AttachResponse(results=[self._long_results.popleft()])
                continue
            if self._error is not None:
                raise self._error
            if self._is_ended:
                return
            self._wakeup.clear()
            await self._wakeup.wait()
