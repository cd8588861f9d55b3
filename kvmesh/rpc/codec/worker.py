"""Descriptions, load records and KV events of workers."""

from dataclasses import fields

from kvmesh.api.types.v1 import kv_pb2, load_pb2, model_pb2
from kvmesh.api.worker.v1 import worker_pb2 as pb
from kvmesh.checks import check_length, check_range
from kvmesh.core import (
    Capabilities,
    Handoff,
    KvBatch,
    KvCleared,
    KvEvent,
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
from kvmesh.rpc.codec.scalars import (
    from_timestamp,
    known_enum,
    optional_duration,
    optional_field,
    required_text,
    to_duration,
    to_timestamp,
)
from kvmesh.rpc.codec.types import from_worker_ref, to_worker_ref

EVENTS_PER_STEP_MAX = 4096
BLOCKS_PER_EVENT_MAX = 65536
ROLES = {
    model_pb2.ROLE_PREFILL: Role.PREFILL,
    model_pb2.ROLE_DECODE: Role.DECODE,
    model_pb2.ROLE_ENCODE: Role.ENCODE,
}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}
HANDOFFS = {
    kv_pb2.HANDOFF_SEQUENTIAL: Handoff.SEQUENTIAL,
    kv_pb2.HANDOFF_RENDEZVOUS: Handoff.RENDEZVOUS,
    kv_pb2.HANDOFF_PUSH: Handoff.PUSH,
}
HANDOFF_NUMBERS = {handoff: number for number, handoff in HANDOFFS.items()}
TIERS = {
    kv_pb2.KV_TIER_DEVICE: KvTier.DEVICE,
    kv_pb2.KV_TIER_HOST: KvTier.HOST,
    kv_pb2.KV_TIER_DISK: KvTier.DISK,
    kv_pb2.KV_TIER_OBJECT: KvTier.OBJECT,
    kv_pb2.KV_TIER_PEER: KvTier.PEER,
}
TIER_NUMBERS = {tier: number for number, tier in TIERS.items()}

# Fields of LoadRecord that have the same name and form on both sides.
_LOAD_SCALARS = (
    "worker_id",
    "epoch",
    "sequence",
    "step",
    "running_requests",
    "waiting_requests",
    "waiting_prompt_tokens",
    "kv_blocks_used",
    "kv_blocks_free",
    "kv_blocks_total",
    "kv_blocks_leased",
    "running_requests_max",
    "step_s",
    "prompt_tokens_total",
    "output_tokens_total",
    "cached_tokens_total",
    "transferred_tokens_total",
    "data_parallel_rank",
    "is_draining",
    "preempted_requests_total",
)


_PROFILE_FIELDS = tuple(field.name for field in fields(PerformanceProfile))


def to_load(load: LoadRecord) -> load_pb2.LoadRecord:
    scalars = {name: getattr(load, name) for name in _LOAD_SCALARS}
    return load_pb2.LoadRecord(taken_at=to_timestamp(load.taken_at_s), **scalars)


def from_load(message: load_pb2.LoadRecord) -> LoadRecord:
    scalars = {name: getattr(message, name) for name in _LOAD_SCALARS}
    check_range(message.step_s, "load.step_s", low=0, high=86_400)
    return LoadRecord(taken_at_s=from_timestamp(message.taken_at), **scalars)


def to_model_card(card: ModelCard) -> model_pb2.ModelCard:
    return model_pb2.ModelCard(
        name=card.name,
        source=card.source,
        revision=card.revision,
        context_tokens_max=card.context_tokens_max,
        vocabulary_size=card.vocabulary_size,
        eos_token_ids=card.eos_token_ids,
        adapters=card.adapters,
    )


def from_model_card(message: model_pb2.ModelCard, *, prefix: str = "model.") -> ModelCard:
    check_range(message.context_tokens_max, f"{prefix}context_tokens_max", low=1, high=2**32 - 1)
    check_range(message.vocabulary_size, f"{prefix}vocabulary_size", low=1, high=2**32 - 1)
    return ModelCard(
        name=required_text(message.name, f"{prefix}name", 256),
        source=required_text(message.source, f"{prefix}source", 4096),
        revision=message.revision,
        context_tokens_max=message.context_tokens_max,
        vocabulary_size=message.vocabulary_size,
        eos_token_ids=tuple(message.eos_token_ids),
        adapters=tuple(message.adapters),
    )


def to_capabilities(capabilities: Capabilities) -> model_pb2.Capabilities:
    return model_pb2.Capabilities(
        engine=capabilities.engine,
        engine_version=capabilities.engine_version,
        handoffs=[HANDOFF_NUMBERS[handoff] for handoff in capabilities.handoffs],
        roles=[ROLE_NUMBERS[role] for role in capabilities.roles],
        features=capabilities.features,
        logprobs_max=capabilities.logprobs_max,
        data_parallel_size=capabilities.data_parallel_size,
    )


def from_capabilities(message: model_pb2.Capabilities, *, prefix: str = "capabilities.") -> Capabilities:
    """The value. Handoffs and roles of a newer contract are left out: this side could not use them."""
    return Capabilities(
        engine=required_text(message.engine, f"{prefix}engine", 64),
        engine_version=message.engine_version,
        handoffs=tuple(HANDOFFS[number] for number in message.handoffs if number in HANDOFFS),
        roles=tuple(ROLES[number] for number in message.roles if number in ROLES),
        features=tuple(message.features),
        logprobs_max=message.logprobs_max,
        data_parallel_size=max(1, message.data_parallel_size),
    )


def to_description(description: WorkerDescription) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        worker=to_worker_ref(description.worker),
        role=ROLE_NUMBERS[description.role],
        model=to_model_card(description.model),
        capabilities=to_capabilities(description.capabilities),
        kv_compatibility_hash=description.kv_compatibility_hash,
        block_size_tokens=description.block_size_tokens,
        kv_blocks_total=description.kv_blocks_total,
        lease=to_duration(description.lease_s) if description.lease_s is not None else None,
        rendezvous_address=description.rendezvous_address,
        is_draining=description.is_draining,
        profile=to_profile(description.profile) if description.profile is not None else None,
    )


def from_description(message: pb.DescribeResponse) -> WorkerDescription:
    required_text(message.worker.worker_id, "worker.worker_id", 128)
    check_range(message.block_size_tokens, "block_size_tokens", low=1, high=2**20)
    return WorkerDescription(
        worker=from_worker_ref(message.worker),
        role=known_enum(message.role, ROLES, "role"),
        model=from_model_card(message.model),
        capabilities=from_capabilities(message.capabilities),
        kv_compatibility_hash=message.kv_compatibility_hash,
        block_size_tokens=message.block_size_tokens,
        kv_blocks_total=message.kv_blocks_total,
        lease_s=optional_duration(message, "lease"),
        rendezvous_address=message.rendezvous_address,
        is_draining=message.is_draining,
        profile=from_profile(message.profile) if message.HasField("profile") else None,
    )


def to_profile(profile: PerformanceProfile) -> model_pb2.PerformanceProfile:
    return model_pb2.PerformanceProfile(**{name: getattr(profile, name) for name in _PROFILE_FIELDS})


def from_profile(message: model_pb2.PerformanceProfile) -> PerformanceProfile:
    values = {name: optional_field(message, name) for name in _PROFILE_FIELDS}
    for name, value in values.items():
        if value is not None:
            check_range(value, f"profile.{name}", low=0, high=1e18)
    return PerformanceProfile(**values)


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
