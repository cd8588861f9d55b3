"""Generations, KV handles, usage and log-probabilities."""

from array import array
from collections.abc import Sequence

from kvmesh.api.types.v1 import kv_pb2, output_pb2, prompt_pb2
from kvmesh.api.types.v1.model_pb2 import WorkerRef as WorkerRefPb
from kvmesh.checks import MEDIA_MAX, TRACEPARENT_BYTES_MAX, check_length, check_range, check_text
from kvmesh.core import (
    FinishReason,
    Generation,
    KvHandle,
    KvReader,
    Media,
    MediaKind,
    Rendezvous,
    SamplingParams,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.errors import InvalidRequestError
from kvmesh.kv.blocks import pack_tokens, unpack_tokens
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from kvmesh.rpc.codec.sampling import fill_sampling, from_sampling
from kvmesh.rpc.codec.scalars import (
    fill_positive_duration,
    known_enum,
    optional_field,
    packed_ids,
    positive_duration,
    required_text,
)

MEDIA_BYTES_MAX = 16 << 20
PAYLOAD_BYTES_MAX = 1 << 20
SEAL_BYTES_MAX = 64
FIRST_TOKENS_MAX = 1024
FINISH_REASONS = enum_table(output_pb2.FinishReason, FinishReason)
FINISH_REASON_NUMBERS = {reason: number for number, reason in FINISH_REASONS.items()}
WORKER_REF_CODEC = MessageCodec(WorkerRefPb, WorkerRef)
MEDIA_KINDS = enum_table(prompt_pb2.MediaKind, MediaKind)
_MEDIA = MessageCodec(prompt_pb2.Media, Media, kind=MEDIA_KINDS)
_RENDEZVOUS = MessageCodec(kv_pb2.Rendezvous, Rendezvous)
to_media, to_rendezvous = _MEDIA.encode, _RENDEZVOUS.encode


def fill_generation(message: prompt_pb2.Generation, generation: Generation) -> None:
    """Writes into a message's field: to build a message that is then copied takes twice as long."""
    message.model = generation.model
    message.token_ids = pack_tokens(generation.token_ids)
    fill_sampling(message.sampling, generation.sampling)
    message.adapter = generation.adapter
    message.cache_salt = generation.cache_salt
    message.priority = generation.priority
    message.traceparent = generation.traceparent
    if generation.emitted_token_ids:
        message.emitted_token_ids.extend(generation.emitted_token_ids)
    if generation.data_parallel_rank is not None:
        message.data_parallel_rank = generation.data_parallel_rank
    if generation.media:
        message.media.extend(to_media(item) for item in generation.media)


def from_generation(message: prompt_pb2.Generation) -> Generation:
    """Returns the value. The worker checks what depends on the model: vocabulary and context."""
    check_length(len(message.media), "generation.media", high=MEDIA_MAX)
    check_text(message.traceparent, field="generation.traceparent", bytes_max=TRACEPARENT_BYTES_MAX)
    sampling = from_sampling(message.sampling, prefix="generation.sampling.")
    return Generation(
        model=required_text(message.model, field="generation.model", characters_max=256),
        token_ids=_prompt_ids(message.token_ids, "generation.token_ids"),
        sampling=sampling if message.HasField("sampling") else SamplingParams(),
        emitted_token_ids=packed_ids(message.emitted_token_ids),
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        priority=message.priority,
        media=tuple(from_media(item, f"generation.media[{i}].") for i, item in enumerate(message.media)),
        traceparent=message.traceparent,
        data_parallel_rank=optional_field(message, "data_parallel_rank"),
    )


def _prompt_ids(packed: bytes, field: str) -> "array[int]":
    """Returns the prompt's token ids, up to 10^6 of them, without a Python integer for each."""
    if len(packed) % 4:
        raise InvalidRequestError(f"{field} must have four bytes per token id, not {len(packed)} in all", field=field)
    return unpack_tokens(packed)


def from_media(message: prompt_pb2.Media, prefix: str) -> Media:
    check_length(len(message.content_hash), f"{prefix}content_hash", low=16, high=64, unit="bytes")
    check_length(len(message.data), f"{prefix}data", high=MEDIA_BYTES_MAX, unit="bytes")
    check_range(message.length, f"{prefix}length", low=1, high=2**32 - 1)
    known_enum(message.kind, MEDIA_KINDS, f"{prefix}kind")
    return _MEDIA.decode(message)


def fill_handle(message: kv_pb2.KvHandle, handle: KvHandle) -> None:
    message.handle_id = handle.handle_id
    message.format = handle.format
    message.compatibility_hash = handle.compatibility_hash
    message.payload = handle.payload
    message.worker_id = handle.worker_id
    message.worker_epoch = handle.worker_epoch
    message.tokens = handle.tokens
    if handle.kv_bytes is not None:
        message.kv_bytes = handle.kv_bytes
    fill_positive_duration(message.lease, handle.lease_s)
    message.first_token_ids.extend(handle.first_token_ids)
    message.seal = handle.seal


def from_handle(message: kv_pb2.KvHandle, *, prefix: str = "handle.") -> KvHandle:
    lease_s = positive_duration(message, "lease", field=f"{prefix}lease", required=True)
    assert lease_s is not None
    check_range(message.tokens, f"{prefix}tokens", low=1, high=2**32 - 1)
    check_length(len(message.payload), f"{prefix}payload", high=PAYLOAD_BYTES_MAX, unit="bytes")
    check_length(len(message.first_token_ids), f"{prefix}first_token_ids", high=FIRST_TOKENS_MAX)
    check_length(len(message.seal), f"{prefix}seal", high=SEAL_BYTES_MAX, unit="bytes")
    return KvHandle(
        handle_id=required_text(message.handle_id, field=f"{prefix}handle_id", characters_max=128),
        format=required_text(message.format, field=f"{prefix}format", characters_max=128),
        compatibility_hash=required_text(
            message.compatibility_hash, field=f"{prefix}compatibility_hash", characters_max=128
        ),
        payload=message.payload,
        worker_id=required_text(message.worker_id, field=f"{prefix}worker_id", characters_max=128),
        worker_epoch=message.worker_epoch,
        tokens=message.tokens,
        lease_s=lease_s,
        kv_bytes=optional_field(message, "kv_bytes"),
        first_token_ids=tuple(message.first_token_ids),
        seal=message.seal,
    )


def from_reader(message: kv_pb2.KvReader) -> KvReader:
    return KvReader(
        worker_id=required_text(message.worker_id, field="reader.worker_id", characters_max=128),
        leg_id=required_text(message.leg_id, field="reader.leg_id", characters_max=128),
    )


def from_rendezvous(message: kv_pb2.Rendezvous) -> Rendezvous:
    required_text(message.host, field="rendezvous.host", characters_max=255)
    check_range(message.port, "rendezvous.port", low=1, high=65_535)
    check_range(message.room, "rendezvous.room", low=0, high=2**63 - 1)
    return _RENDEZVOUS.decode(message)


def to_usage(usage: Usage) -> output_pb2.Usage:
    return output_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        transferred_tokens=usage.transferred_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def from_usage(message: output_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        transferred_tokens=message.transferred_tokens,
        reasoning_tokens=message.reasoning_tokens,
    )


def to_logprobs(logprobs: Sequence[TokenLogprob]) -> output_pb2.Logprobs:
    """Packed, one entry per token."""
    alternatives = [pair for entry in logprobs for pair in entry.alternatives]
    return output_pb2.Logprobs(
        token_logprobs=[entry.logprob for entry in logprobs],
        alternatives_counts=[len(entry.alternatives) for entry in logprobs],
        alternative_token_ids=[token_id for token_id, _ in alternatives],
        alternative_logprobs=[value for _, value in alternatives],
    )


def from_logprobs(message: output_pb2.Logprobs) -> list[TokenLogprob]:
    """Returns one value per token. Raises ValueError if the lengths of the arrays do not match."""
    # The protobuf library copies a slice in one call; iterating makes one call per number.
    alternatives = tuple(zip(message.alternative_token_ids[:], message.alternative_logprobs[:], strict=True))
    logprobs, counts = message.token_logprobs[:], message.alternatives_counts[:]
    if len(logprobs) == 1 and counts == [len(alternatives)]:
        return [TokenLogprob(logprob=logprobs[0], alternatives=alternatives)]
    entries: list[TokenLogprob] = []
    start = 0
    for logprob, count in zip(logprobs, counts, strict=True):
        entries.append(TokenLogprob(logprob=logprob, alternatives=alternatives[start : start + count]))
        start += count
    if start != len(alternatives):
        raise ValueError(f"{len(alternatives)} alternatives for {start} places")
    return entries


def fill_worker_ref(message: WorkerRefPb, ref: WorkerRef) -> None:
    """Writes into a message's field: to build a message that is then copied takes twice as long."""
    message.worker_id = ref.worker_id
    message.address = ref.address
    message.epoch = ref.epoch
    if ref.data_parallel_rank is not None:
        message.data_parallel_rank = ref.data_parallel_rank


def from_worker_ref(message: WorkerRefPb) -> WorkerRef:
    return WorkerRef(
        worker_id=message.worker_id,
        address=message.address,
        epoch=message.epoch,
        data_parallel_rank=optional_field(message, "data_parallel_rank"),
    )
