"""Legs on the wire: prefill calls, decode submissions, finishes."""

import math
from dataclasses import replace

from kvmesh.api.decode.v1 import decode_pb2
from kvmesh.api.prefill.v1 import prefill_pb2
from kvmesh.checks import check_length
from kvmesh.core import FinishReason, Generation, KvHandle, Rendezvous
from kvmesh.errors import InternalError, InvalidRequestError
from kvmesh.rpc.clients import DecodeLeg, LegFinish, PrefillResult
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
    from_rendezvous,
    from_usage,
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
    packs_tokens: bool = False,
) -> None:
    """Writes a prefill leg into a message's field. `packs_tokens`: see `fill_generation`."""
    message.request_id = request_id
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
    return PrefillResult(
        handle=from_handle(message.handle) if message.HasField("handle") else None,
        usage=from_usage(message.usage),
        queue_s=from_duration(message.queue_time),
        compute_s=from_duration(message.compute_time),
    )


def spend_lease(handle: KvHandle, spent_s: float) -> KvHandle:
    """The handle as it is to be passed on after `spent_s` seconds. A lease that is over becomes 1 us: too short to use."""
    if spent_s <= 0:
        return handle
    return replace(handle, lease_s=max(1e-6, handle.lease_s - spent_s))
