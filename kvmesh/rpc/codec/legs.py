"""Legs and their finishes on the wire."""

from dataclasses import replace

from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.core import FinishReason, KvHandle, Leg, LegFinish, LegTask
from kvmesh.errors import InternalError, InvalidRequestError
from kvmesh.rpc.codec.scalars import fill_positive_duration, known_enum, optional_field, required_text
from kvmesh.rpc.codec.types import (
    FINISH_REASON_NUMBERS,
    FINISH_REASONS,
    fill_generation,
    fill_handle,
    from_generation,
    from_handle,
    from_reader,
    from_rendezvous,
    from_usage,
    to_rendezvous,
    to_usage,
)
from kvmesh.rpc.status import from_detail, to_detail

LEG_ID_CHARACTERS_MAX = 128
LEG_TASKS = {
    pb.LEG_TASK_PREFILL: LegTask.PREFILL,
    pb.LEG_TASK_GENERATE: LegTask.GENERATE,
    pb.LEG_TASK_EMBED: LegTask.EMBED,
}
LEG_TASK_NUMBERS = {task: number for number, task in LEG_TASKS.items()}


def fill_leg(message: pb.Leg, leg: Leg) -> None:
    """Writes a leg into a message's field."""
    message.leg_id = leg.leg_id
    message.task = LEG_TASK_NUMBERS[leg.task]
    fill_generation(message.generation, leg.generation)
    if leg.handle is not None:
        fill_handle(message.handle, leg.handle)
    if leg.rendezvous is not None:
        message.rendezvous.CopyFrom(to_rendezvous(leg.rendezvous))
    if leg.dimensions is not None:
        message.dimensions = leg.dimensions
    if leg.reader is not None:
        message.reader.worker_id, message.reader.leg_id = leg.reader.worker_id, leg.reader.leg_id


def to_leg(leg: Leg) -> pb.Leg:
    message = pb.Leg()
    fill_leg(message, leg)
    return message


def from_leg(message: pb.Leg, *, default_id: str = "") -> Leg:
    """Returns the value; what depends on the model or the engine is checked by the worker. `default_id` replaces an empty id."""
    if not message.HasField("generation"):
        raise InvalidRequestError("generation is required", field="generation")
    return Leg(
        leg_id=required_text(message.leg_id or default_id, field="leg_id", characters_max=LEG_ID_CHARACTERS_MAX),
        task=known_enum(message.task, LEG_TASKS, "task"),
        generation=from_generation(message.generation),
        handle=from_handle(message.handle) if message.HasField("handle") else None,
        rendezvous=from_rendezvous(message.rendezvous) if message.HasField("rendezvous") else None,
        dimensions=optional_field(message, "dimensions"),
        reader=from_reader(message.reader) if message.HasField("reader") else None,
    )


def to_finish(slot: int, finish: LegFinish, *, lease_s: float | None = None) -> pb.Finish:
    """`lease_s` is the time left of the handle's lease, if it differs from that in the handle."""
    message = pb.Finish(
        slot=slot,
        reason=FINISH_REASON_NUMBERS[finish.reason],
        stop_token_id=finish.stop_token_id,
        error=None if finish.error is None else to_detail(finish.error),
        usage=to_usage(finish.usage),
        was_recomputed=finish.was_recomputed,
    )
    if finish.handle is not None:
        fill_handle(message.handle, finish.handle)
        if lease_s is not None:
            fill_positive_duration(message.handle.lease, lease_s)
    if finish.embedding is not None:
        message.embedding.values.extend(finish.embedding)
    return message


def from_finish(message: pb.Finish) -> LegFinish:
    """Returns the value. A finish that the contract forbids is an InternalError: the client's request is not to blame."""
    try:
        reason = known_enum(message.reason, FINISH_REASONS, "finish.reason")
        handle = from_handle(message.handle, prefix="finish.handle.") if message.HasField("handle") else None
    except InvalidRequestError as problem:
        return LegFinish(
            reason=FinishReason.ERROR, error=InternalError(f"the worker's finish is invalid: {problem.message}")
        )
    error = from_detail(message.error) if message.HasField("error") else None
    if reason is FinishReason.ERROR and error is None:
        error = InternalError("the worker gave no reason")
    return LegFinish(
        reason=reason,
        usage=from_usage(message.usage),
        stop_token_id=optional_field(message, "stop_token_id"),
        error=error,
        was_recomputed=message.was_recomputed,
        handle=handle,
        embedding=message.embedding.values[:] if message.HasField("embedding") else None,
    )


def spend_lease(handle: KvHandle, spent_s: float) -> KvHandle:
    """Returns the handle with its lease reduced by `spent_s` seconds. An expired lease becomes 1 us, which is too short to use."""
    if spent_s <= 0:
        return handle
    return replace(handle, lease_s=max(1e-6, handle.lease_s - spent_s))
