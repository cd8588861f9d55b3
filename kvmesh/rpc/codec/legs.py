"""Legs on the wire: prefill calls, decode submissions, finishes."""

import math
from dataclasses import replace

from kvmesh.api.decode.v1 import decode_pb2
from kvmesh.api.prefill.v1 import prefill_pb2
from kvmesh.checks import check_length
from kvmesh.core import FinishReason, Generation, KvHandle, Rendezvous, Usage
from kvmesh.errors import InternalError, InvalidRequestError
from kvmesh.rpc.clients import DecodeLeg, LegFinish, LegOutput, PrefillResult
from kvmesh.rpc.codec.scalars import (
    fill_positive_duration,
    from_duration,
    known_enum,
    optional_field,
    positive_duration,
    required_text,
)
from kvmesh.rpc.codec.types import (
    FINISH_REASON_NUMBERS,
    FINISH_REASONS,
    fill_generation,
    fill_handle,
    from_generation,
    from_handle,
    from_logprobs,
    from_rendezvous,
    from_usage,
    to_logprobs,
    to_rendezvous,
    to_usage,
)
from kvmesh.rpc.status import from_detail, to_detail

REQUEST_ID_MAX = 128
RESERVATION_ID_MAX = 128


def to_submission(slot: int, leg: DecodeLeg) -> decode_pb2.Submission:
    """A decode leg as a submission on `slot`."""
    message = decode_pb2.Submission()
    fill_submission(message, slot, leg)
    return message


def fill_submission(message: decode_pb2.Submission, slot: int, leg: DecodeLeg, *, packs_tokens: bool = False) -> None:
    """Writes a decode leg into a message's entry. `packs_tokens`: see `fill_generation`."""
    message.slot = slot
    message.request_id = leg.request_id
    message.reservation_id = leg.reservation_id
    fill_generation(message.generation, leg.generation, packs_tokens=packs_tokens)
    if leg.handle is not None:
        fill_handle(message.handle, leg.handle)
    if leg.rendezvous is not None:
        message.rendezvous.CopyFrom(to_rendezvous(leg.rendezvous))
    if not math.isinf(leg.timeout_s):
        fill_positive_duration(message.timeout, leg.timeout_s)


def fill_prefill_request(
    message: prefill_pb2.PrefillRequest,
    request_id: str,
    generation: Generation,
    rendezvous: Rendezvous | None,
    reservation_id: str,
    *,
    wants_output: bool = False,
    packs_tokens: bool = False,
) -> None:
    """Writes a prefill leg into a message's field. `packs_tokens`: see `fill_generation`."""
    message.request_id = request_id
    if wants_output:
        message.wants_output = True
    message.reservation_id = reservation_id
    fill_generation(message.generation, generation, packs_tokens=packs_tokens)
    if rendezvous is not None:
        message.rendezvous.CopyFrom(to_rendezvous(rendezvous))


def from_submission(message: decode_pb2.Submission) -> DecodeLeg:
    """A checked decode leg; the slot is the caller's to read."""
    timeout_s = positive_duration(message, "timeout", "timeout")
    check_length(len(message.reservation_id), "reservation_id", 0, RESERVATION_ID_MAX, "characters")
    return DecodeLeg(
        request_id=required_text(message.request_id, "request_id", REQUEST_ID_MAX),
        generation=generation_of(message),
        timeout_s=float("inf") if timeout_s is None else timeout_s,
        handle=handle_of(message),
        rendezvous=rendezvous_of(message),
        reservation_id=message.reservation_id,
    )


Leg = decode_pb2.Submission | decode_pb2.GenerateRequest | prefill_pb2.PrefillRequest


def generation_of(message: Leg) -> Generation:
    """The generation of any leg message; required."""
    if not message.HasField("generation"):
        raise InvalidRequestError("generation is required", field="generation")
    return from_generation(message.generation)


def handle_of(message: decode_pb2.Submission | decode_pb2.GenerateRequest) -> KvHandle | None:
    """The handle, if any."""
    return from_handle(message.handle) if message.HasField("handle") else None


def rendezvous_of(message: Leg) -> Rendezvous | None:
    """The rendezvous, if any."""
    return from_rendezvous(message.rendezvous) if message.HasField("rendezvous") else None


def wants_output(message: prefill_pb2.PrefillRequest, generation: Generation) -> bool:
    """Whether a prompt's caller wants the one token that follows. InvalidRequestError when it is not one."""
    if not message.wants_output:
        return False
    if generation.sampling.max_tokens != len(generation.emitted_token_ids) + 1:
        raise InvalidRequestError(
            "max_tokens must leave one token when the output is wanted", field="generation.sampling.max_tokens"
        )
    if message.HasField("rendezvous"):
        raise InvalidRequestError("an output is given without a handoff", field="rendezvous")
    return True


def to_output(output: LegOutput) -> prefill_pb2.Output:
    """The wire form; its usage is told beside it."""
    return prefill_pb2.Output(
        token_ids=output.token_ids,
        logprobs=None if output.logprobs is None else to_logprobs(output.logprobs),
        prompt_logprobs=None if output.prompt_logprobs is None else to_logprobs(output.prompt_logprobs),
        reason=FINISH_REASON_NUMBERS[output.finish.reason],
        stop_token_id=output.finish.stop_token_id,
    )


def _output(message: prefill_pb2.Output, usage: Usage) -> LegOutput:
    reason = known_enum(message.reason, FINISH_REASONS, "output.reason")
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise InvalidRequestError(f"an output cannot end with {reason.value}", field="output.reason")
    check_length(len(message.token_ids), "output.token_ids", 1, 1, "entries")
    try:
        logprobs = from_logprobs(message.logprobs) if message.HasField("logprobs") else None
        prompt = from_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
    except ValueError as error:
        raise InvalidRequestError(str(error), field="output.logprobs") from error
    return LegOutput(
        token_ids=message.token_ids[:],
        finish=LegFinish(reason=reason, usage=usage, stop_token_id=optional_field(message, "stop_token_id")),
        logprobs=logprobs,
        prompt_logprobs=prompt,
    )


def to_finish(slot: int, finish: LegFinish) -> decode_pb2.Finish:
    """The wire form."""
    return decode_pb2.Finish(
        slot=slot,
        reason=FINISH_REASON_NUMBERS[finish.reason],
        stop_token_id=finish.stop_token_id,
        error=None if finish.error is None else to_detail(finish.error),
        usage=to_usage(finish.usage),
        was_recomputed=finish.was_recomputed,
    )


def from_finish(message: decode_pb2.Finish) -> LegFinish:
    """The value; an ERROR finish without a detail is a defect of the worker and is told as such."""
    reason = known_enum(message.reason, FINISH_REASONS, "finish.reason")
    error = from_detail(message.error) if message.HasField("error") else None
    if reason is FinishReason.ERROR and error is None:
        error = InternalError("the worker gave no reason")
    return LegFinish(
        reason=reason,
        usage=from_usage(message.usage),
        stop_token_id=optional_field(message, "stop_token_id"),
        error=error,
        was_recomputed=message.was_recomputed,
    )


def from_prefill_response(message: prefill_pb2.PrefillResponse) -> PrefillResult:
    """The value. InternalError when a worker answers what the contract forbids: the client's request is not to blame."""
    try:
        return _prefill_result(message)
    except InvalidRequestError as error:
        raise InternalError(f"the prefill worker's answer cannot be used: {error.message}") from error


def _prefill_result(message: prefill_pb2.PrefillResponse) -> PrefillResult:
    usage = from_usage(message.usage)
    return PrefillResult(
        handle=from_handle(message.handle) if message.HasField("handle") else None,
        usage=usage,
        queue_s=from_duration(message.queue_time),
        compute_s=from_duration(message.compute_time),
        output=_output(message.output, usage) if message.HasField("output") else None,
    )


def spend_lease(handle: KvHandle, spent_s: float) -> KvHandle:
    """The handle as it is to be passed on after `spent_s` seconds. A lease that is over becomes 1 us: too short to use."""
    if spent_s <= 0:
        return handle
    return replace(handle, lease_s=max(1e-6, handle.lease_s - spent_s))
