"""Descriptions, load records and KV events of workers."""

from kvmesh.api.types.v1 import kv_pb2, load_pb2, model_pb2
from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.checks import check_length, check_range
from kvmesh.core import (
    Capabilities,
    FailingKvPath,
    Handoff,
    KvBatch,
    KvCleared,
    KvEvent,
    KvPath,
    KvPathCheck,
    KvRemoved,
    KvStored,
    KvTier,
    LoadRecord,
    ModelCard,
    PerformanceProfile,
    Role,
    WorkerDescription,
)
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.scalars import known_enum, optional_field, required_text
from kvmesh.rpc.codec.types import WORKER_REF_CODEC

EVENTS_PER_STEP_MAX = 4096
BLOCKS_PER_EVENT_MAX = 65536
ROLES = enum_table(model_pb2.Role, Role)
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}
HANDOFFS = enum_table(kv_pb2.Handoff, Handoff)
HANDOFF_NUMBERS = {handoff: number for number, handoff in HANDOFFS.items()}
TIERS = enum_table(kv_pb2.KvTier, KvTier)
TIER_NUMBERS = {tier: number for number, tier in TIERS.items()}
_FAILING_PATH = MessageCodec(load_pb2.FailingKvPath, FailingKvPath)
LOAD_CODEC = MessageCodec(load_pb2.LoadRecord, LoadRecord, failing_kv_paths=_FAILING_PATH)
KV_PATH_CODEC = MessageCodec(pb.KvPath, KvPath)
KV_PATH_CHECK_CODEC = MessageCodec(pb.CheckKvPathResponse, KvPathCheck)
_PROFILE = MessageCodec(model_pb2.PerformanceProfile, PerformanceProfile)
_MODEL_CARD = MessageCodec(model_pb2.ModelCard, ModelCard)
_CAPABILITIES = MessageCodec(model_pb2.Capabilities, Capabilities, handoffs=HANDOFFS, roles=ROLES)
_DESCRIPTION = MessageCodec(
    pb.DescribeResponse,
    WorkerDescription,
    worker=WORKER_REF_CODEC,
    role=ROLES,
    model=_MODEL_CARD,
    capabilities=_CAPABILITIES,
    profile=_PROFILE,
)
to_load, to_description = LOAD_CODEC.encode, _DESCRIPTION.encode


def from_load(message: load_pb2.LoadRecord) -> LoadRecord:
    check_range(message.step_s, "load.step_s", low=0, high=86_400)
    return LOAD_CODEC.decode(message)


def from_description(message: pb.DescribeResponse) -> WorkerDescription:
    """Returns the checked value. Handoffs and roles that this version does not know are left out."""
    required_text(message.worker.worker_id, field="worker.worker_id", characters_max=128)
    required_text(message.model.name, field="model.name", characters_max=256)
    required_text(message.model.source, field="model.source", characters_max=4096)
    required_text(message.capabilities.engine, field="capabilities.engine", characters_max=64)
    check_range(message.model.context_tokens_max, "model.context_tokens_max", low=1, high=2**32 - 1)
    check_range(message.model.vocabulary_size, "model.vocabulary_size", low=1, high=2**32 - 1)
    check_range(message.block_size_tokens, "block_size_tokens", low=1, high=2**20)
    for descriptor, value in message.profile.ListFields():
        check_range(value, f"profile.{descriptor.name}", low=0, high=1e18)
    return _DESCRIPTION.decode(message)


def to_kv_event(event: KvEvent) -> kv_pb2.KvEvent:
    message = kv_pb2.KvEvent(data_parallel_rank=event.data_parallel_rank)
    match event:
        case KvStored():
            message.stored.block_hashes.extend(event.block_hashes)
            message.stored.tier = TIER_NUMBERS[event.tier]
            if event.parent_hash is not None:
                message.stored.parent_hash = event.parent_hash
        case KvRemoved():
            message.removed.block_hashes.extend(event.block_hashes)
            message.removed.tier = TIER_NUMBERS[event.tier]
        case KvCleared():
            message.cleared.SetInParent()
    return message


def from_kv_event(message: kv_pb2.KvEvent) -> KvEvent:
    rank = message.data_parallel_rank
    match message.WhichOneof("kind"):
        case "stored":
            stored = message.stored
            check_length(len(stored.block_hashes), "stored.block_hashes", low=1, high=BLOCKS_PER_EVENT_MAX)
            return KvStored(
                # A slice is read in one go, which takes two thirds of the time of going through the field.
                block_hashes=tuple(stored.block_hashes[:]),
                parent_hash=optional_field(stored, "parent_hash"),
                tier=known_enum(stored.tier, TIERS, "stored.tier"),
                data_parallel_rank=rank,
            )
        case "removed":
            removed = message.removed
            check_length(len(removed.block_hashes), "removed.block_hashes", low=1, high=BLOCKS_PER_EVENT_MAX)
            tier = known_enum(removed.tier, TIERS, "removed.tier")
            return KvRemoved(block_hashes=tuple(removed.block_hashes[:]), tier=tier, data_parallel_rank=rank)
        case "cleared":
            return KvCleared(data_parallel_rank=rank)
        case _:
            raise InvalidRequestError("event.kind must be set", field="event.kind")


def to_kv_batch(step: KvBatch) -> pb.WatchKvResponse:
    return pb.WatchKvResponse(
        epoch=step.epoch,
        sequence=step.sequence,
        is_snapshot=step.is_snapshot,
        is_complete=step.is_complete,
        part=step.part,
        events=[to_kv_event(event) for event in step.events],
    )


def from_kv_batch(message: pb.WatchKvResponse) -> KvBatch:
    check_length(len(message.events), "events", high=EVENTS_PER_STEP_MAX)
    return KvBatch(
        epoch=message.epoch,
        sequence=message.sequence,
        is_snapshot=message.is_snapshot,
        is_complete=message.is_complete,
        part=message.part,
        events=tuple(from_kv_event(event) for event in message.events),
    )
