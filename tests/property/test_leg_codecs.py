"""Messages between frontend and workers survive encoding and decoding, or are refused with the field's name."""

import json
from array import array
from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.api.types.v1 import kv_pb2, output_pb2, prompt_pb2, sampling_pb2
from kvmesh.api.worker.v1 import legs_pb2
from kvmesh.checks import check_generation, check_range, check_sampling
from kvmesh.core import (
    Constraint,
    ConstraintKind,
    FinishReason,
    Generation,
    KvHandle,
    KvReader,
    Leg,
    LegFinish,
    LegTask,
    Media,
    MediaKind,
    Rendezvous,
    SamplingParams,
    TokenLogprob,
    Usage,
    WorkerRef,
)
from kvmesh.errors import InternalError, InvalidRequestError, LostError, OverloadedError
from kvmesh.kv.blocks import pack_tokens
from kvmesh.rpc.codec import legs, types
from kvmesh.rpc.codec.sampling import from_sampling, to_sampling
from kvmesh.rpc.codec.scalars import from_duration, to_duration, to_positive_duration
from tests.messages import to_generation, to_handle

COUNTS = st.integers(0, 2**32 - 1)
IDS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=128)
WORDS = st.text(st.characters(codec="utf-8", categories=["L", "N", "Zs"]), max_size=20)
TOKENS = st.lists(COUNTS, max_size=8).map(lambda ids: array("I", ids))


def floats(low: float, high: float) -> st.SearchStrategy[float | None]:
    """Generates None, and values that a 32-bit field holds exactly."""
    return st.none() | st.floats(low, high, width=32)


JSON_KINDS = ("json_schema", "structural_tag")
STRUCTURED_KINDS = ("choice", "json_object", *JSON_KINDS)
CONSTRAINTS = st.one_of(
    st.builds(
        Constraint,
        kind=st.sampled_from([kind for kind in ConstraintKind if kind.value not in STRUCTURED_KINDS]),
        text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30),
    ),
    st.just(Constraint(kind=ConstraintKind.JSON_OBJECT)),
    st.builds(
        Constraint,
        kind=st.sampled_from([kind for kind in ConstraintKind if kind.value in JSON_KINDS]),
        text=st.dictionaries(WORDS, WORDS, max_size=3).map(json.dumps),
    ),
    st.builds(
        Constraint,
        kind=st.just(ConstraintKind.CHOICE),
        options=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), min_size=1, max_size=4).map(
            tuple
        ),
    ),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=floats(0, 2),
    top_p=floats(0.0625, 1),
    top_k=st.none() | st.integers(0, 2**31 - 1),
    min_p=floats(0, 1),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    repetition_penalty=floats(0.0625, 10),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1000, 2**31 - 1),
    min_tokens=st.none() | st.integers(0, 1000),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(COUNTS, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.lists(st.tuples(COUNTS, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    constraint=st.none() | CONSTRAINTS,
    skip_special_tokens=st.booleans(),
)
MEDIA = st.builds(
    Media,
    kind=st.sampled_from(MediaKind),
    content_hash=st.binary(min_size=16, max_size=64),
    position=COUNTS,
    length=st.integers(1, 2**32 - 1),
).flatmap(
    lambda media: st.one_of(
        st.just(media),
        st.binary(max_size=9).map(lambda data: replace(media, data=data)),
        WORDS.map(lambda url: replace(media, url=url)),
        st.binary(max_size=9).map(lambda handle: replace(media, encoder_handle=handle)),
    )
)
GENERATIONS = st.builds(
    Generation,
    model=IDS,
    token_ids=TOKENS,
    sampling=SAMPLING,
    emitted_token_ids=TOKENS,
    adapter=WORDS,
    cache_salt=WORDS,
    priority=st.integers(-100, 100),
    media=st.lists(MEDIA, max_size=2).map(tuple),
    traceparent=st.sampled_from(["", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]),
    data_parallel_rank=st.none() | COUNTS,
)
HANDLES = st.builds(
    KvHandle,
    handle_id=IDS,
    format=IDS,
    compatibility_hash=IDS,
    payload=st.binary(max_size=40),
    worker_id=IDS,
    worker_epoch=st.integers(0, 2**64 - 1),
    tokens=st.integers(1, 2**32 - 1),
    lease_s=st.floats(1e-6, 1e6),
    kv_bytes=st.none() | st.integers(0, 2**64 - 1),
    first_token_ids=st.lists(COUNTS, max_size=3).map(tuple),
    seal=st.binary(max_size=64),
)
RENDEZVOUS = st.builds(
    Rendezvous,
    host=IDS,
    port=st.integers(1, 65535),
    room=st.integers(0, 2**63 - 1),
    prefill_data_parallel_rank=st.none() | COUNTS,
)
USAGES = st.builds(
    Usage,
    prompt_tokens=COUNTS,
    output_tokens=COUNTS,
    cached_tokens=COUNTS,
    transferred_tokens=COUNTS,
    reasoning_tokens=COUNTS,
)
LEGS = st.builds(
    Leg,
    leg_id=IDS,
    task=st.sampled_from(LegTask),
    generation=GENERATIONS,
    handle=st.none() | HANDLES,
    rendezvous=st.none() | RENDEZVOUS,
    reader=st.none() | st.builds(KvReader, worker_id=IDS, leg_id=IDS),
    dimensions=st.none() | COUNTS,
)


def reparsed(message: Message) -> Message:
    """Returns the message after serialising and parsing it."""
    return type(message).FromString(message.SerializeToString())


def with_rounded_lease(handle: KvHandle | None) -> KvHandle | None:
    """Returns the handle with its lease rounded to nanoseconds, the resolution of a Duration."""
    return None if handle is None else replace(handle, lease_s=from_duration(to_duration(handle.lease_s)))


@given(params=SAMPLING)
def test_sampling_survives(params: SamplingParams) -> None:
    """None stays absent, and zero stays zero."""
    assert from_sampling(reparsed(to_sampling(params))) == params  # type: ignore[arg-type]


@given(generation=GENERATIONS)
def test_a_generation_survives(generation: Generation) -> None:
    """The generation keeps its prompt, emitted tokens, media and options."""
    message = reparsed(to_generation(generation))
    assert types.from_generation(message) == generation  # type: ignore[arg-type]


@given(handle=HANDLES)
def test_a_handle_survives(handle: KvHandle) -> None:
    """The lease survives to the nanosecond, and all other fields exactly."""
    assert types.from_handle(reparsed(to_handle(handle))) == with_rounded_lease(handle)  # type: ignore[arg-type]


@given(rendezvous=RENDEZVOUS, usage=USAGES)
def test_small_records_survive(rendezvous: Rendezvous, usage: Usage) -> None:
    assert types.from_rendezvous(reparsed(types.to_rendezvous(rendezvous))) == rendezvous  # type: ignore[arg-type]
    assert types.from_usage(reparsed(types.to_usage(usage))) == usage  # type: ignore[arg-type]


@given(ref=st.builds(WorkerRef, worker_id=IDS, address=IDS, epoch=COUNTS, data_parallel_rank=st.none() | COUNTS))
def test_a_worker_reference_survives(ref: WorkerRef) -> None:
    """Rank 0 differs from the absent rank, which means any rank."""
    assert types.WORKER_REF_CODEC.decode(reparsed(types.WORKER_REF_CODEC.encode(ref))) == ref  # type: ignore[arg-type]


@given(
    entries=st.lists(
        st.builds(
            TokenLogprob,
            logprob=st.floats(-100, 0, width=32),
            alternatives=st.lists(st.tuples(COUNTS, st.floats(-100, 0, width=32)), max_size=3).map(tuple),
        ),
        max_size=4,
    )
)
def test_log_probabilities_survive_packing(entries: list[TokenLogprob]) -> None:
    """Each token keeps its own alternatives."""
    assert types.from_logprobs(reparsed(types.to_logprobs(entries))) == entries  # type: ignore[arg-type]


@given(leg=LEGS)
def test_a_leg_survives(leg: Leg) -> None:
    """The leg may have any task, and lack optional fields."""
    message = reparsed(legs.to_leg(leg))
    assert legs.from_leg(message) == replace(leg, handle=with_rounded_lease(leg.handle))  # type: ignore[arg-type]


@given(
    slot=st.integers(0, 2**31 - 1),
    finish=st.builds(
        LegFinish,
        reason=st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.ERROR]),
        usage=USAGES,
        stop_token_id=st.none() | COUNTS,
        was_recomputed=st.booleans(),
        handle=HANDLES,
    )
    | st.builds(
        LegFinish,
        reason=st.just(FinishReason.STOP),
        embedding=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9),
    ),
)
def test_a_finish_survives(slot: int, finish: LegFinish) -> None:
    """The finish may have any reason except an error, with a handle, an embedding or neither."""
    message = reparsed(legs.to_finish(slot, finish))
    assert isinstance(message, legs_pb2.Finish) and message.slot == slot
    assert legs.from_finish(message) == replace(finish, handle=with_rounded_lease(finish.handle))


def test_a_failed_finish_keeps_its_error() -> None:
    """The error keeps its class, reason, field and retry delay. A failed finish without an error becomes an InternalError."""
    sent = OverloadedError("full", reason="worker_full", field="slot", retry_after_s=1.5, where="d1")
    error = legs.from_finish(legs.to_finish(3, LegFinish(reason=FinishReason.ERROR, error=sent))).error
    assert isinstance(error, OverloadedError)
    assert (error.reason, error.field, error.retry_after_s, error.where) == ("worker_full", "slot", 1.5, "d1")
    bare = legs.from_finish(legs.to_finish(3, LegFinish(reason=FinishReason.ERROR)))
    assert isinstance(bare.error, InternalError) and not isinstance(bare.error, LostError)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4 * 7 + 1])
def test_truncated_token_ids_are_refused(length: int) -> None:
    """Token ids take four bytes each, so any other length is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        types.from_generation(prompt_pb2.Generation(model="m", token_ids=bytes(length)))
    assert caught.value.field == "generation.token_ids"


@given(seconds=st.floats(-1e-3, 1e9))
def test_a_positive_duration_is_above_zero(seconds: float) -> None:
    """An expired time becomes slightly more than zero, so that the receiver treats it as late and not as malformed."""
    assert 0 < from_duration(to_positive_duration(seconds)) <= max(seconds, 1e-9) * (1 + 1e-6) + 1e-9


GOOD = KvHandle(
    handle_id="h", format="f", compatibility_hash="c", payload=b"", worker_id="w", worker_epoch=1, tokens=4, lease_s=1.0
)
HANDLE_FAULTS = [
    ({"handle_id": ""}, "handle.handle_id"),
    ({"handle_id": "x" * 129}, "handle.handle_id"),
    ({"handle_id": "a\nb"}, "handle.handle_id"),
    ({"format": ""}, "handle.format"),
    ({"compatibility_hash": ""}, "handle.compatibility_hash"),
    ({"worker_id": ""}, "handle.worker_id"),
    ({"tokens": 0}, "handle.tokens"),
    ({"payload": bytes((1 << 20) + 1)}, "handle.payload"),
    ({"first_token_ids": (1,) * 1025}, "handle.first_token_ids"),
    ({"seal": bytes(65)}, "handle.seal"),
]


@pytest.mark.parametrize(("change", "field"), HANDLE_FAULTS, ids=[str(field) for _, field in HANDLE_FAULTS])
def test_an_invalid_handle_is_refused_by_field(change: dict[str, object], field: str) -> None:
    """There is a case for each rule of the contract's KvHandle."""
    with pytest.raises(InvalidRequestError) as caught:
        types.from_handle(to_handle(replace(GOOD, **change)))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("lease", [None, to_duration(0), to_duration(-1)])
def test_a_lease_is_required_and_positive(lease: object) -> None:
    """A handle with an absent, zero or negative lease is refused."""
    message = to_handle(GOOD)
    message.ClearField("lease")
    if lease is not None:
        message.lease.CopyFrom(lease)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        types.from_handle(message)
    assert caught.value.field == "handle.lease"


CONSTRAINT_FAULTS = [
    sampling_pb2.Constraint(),
    sampling_pb2.Constraint(json_object=False),
    sampling_pb2.Constraint(json_schema=""),
    sampling_pb2.Constraint(json_schema="x" * ((256 << 10) + 1)),
    sampling_pb2.Constraint(regex="x" * ((16 << 10) + 1)),
    sampling_pb2.Constraint(choice=sampling_pb2.Choice()),
    sampling_pb2.Constraint(choice=sampling_pb2.Choice(options=[""])),
    sampling_pb2.Constraint(choice=sampling_pb2.Choice(options=["a"] * 1025)),
    sampling_pb2.Constraint(choice=sampling_pb2.Choice(options=["a" * 4097])),
]


@pytest.mark.parametrize("constraint", CONSTRAINT_FAULTS, ids=range(len(CONSTRAINT_FAULTS)))
def test_an_invalid_constraint_is_refused(constraint: sampling_pb2.Constraint) -> None:
    """Constraints that are empty, false or too long, or have too many options, are refused."""
    with pytest.raises(InvalidRequestError) as caught:
        from_sampling(sampling_pb2.SamplingParams(constraint=constraint))
    assert caught.value.field.startswith("sampling.constraint")


def leg_message(**changes: object) -> legs_pb2.Leg:
    """Returns a valid leg with some fields changed, or removed if the value is None."""
    message = legs_pb2.Leg(
        leg_id="r",
        task=legs_pb2.LEG_TASK_GENERATE,
        generation=prompt_pb2.Generation(model="m", token_ids=pack_tokens([1, 2, 3])),
    )
    for name, value in changes.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        elif value is not None:
            setattr(message, name, value)
    return message


BIG_MEDIA = prompt_pb2.Media(
    kind=prompt_pb2.MEDIA_KIND_IMAGE, content_hash=bytes(16), length=1, data=bytes((16 << 20) + 1)
)
LEG_FAULTS = [
    ({"leg_id": ""}, "leg_id"),
    ({"leg_id": "r\x00"}, "leg_id"),
    ({"leg_id": "r" * 129}, "leg_id"),
    ({"task": None}, "task"),
    ({"task": legs_pb2.LEG_TASK_ENCODE}, "task"),
    ({"task": 99}, "task"),
    ({"generation": None}, "generation"),
    ({"generation": prompt_pb2.Generation(token_ids=bytes(4))}, "generation.model"),
    ({"generation": prompt_pb2.Generation(model="m", traceparent="0" * 300)}, "generation.traceparent"),
    ({"generation": prompt_pb2.Generation(model="m", media=[prompt_pb2.Media()] * 65)}, "generation.media"),
    ({"generation": prompt_pb2.Generation(model="m", media=[prompt_pb2.Media()])}, "generation.media[0].content_hash"),
    ({"generation": prompt_pb2.Generation(model="m", media=[BIG_MEDIA])}, "generation.media[0].data"),
    ({"rendezvous": kv_pb2.Rendezvous(host="h", port=0)}, "rendezvous.port"),
    ({"rendezvous": kv_pb2.Rendezvous(host="h", port=70000)}, "rendezvous.port"),
    ({"rendezvous": kv_pb2.Rendezvous(host="", port=1)}, "rendezvous.host"),
    ({"rendezvous": kv_pb2.Rendezvous(host="h", port=1, room=2**63)}, "rendezvous.room"),
]


@pytest.mark.parametrize(("change", "field"), LEG_FAULTS, ids=range(len(LEG_FAULTS)))
def test_an_invalid_leg_is_refused_by_field(change: dict[str, object], field: str) -> None:
    """Absent, empty, malformed and too large fields are reported with their path."""
    legs.from_leg(leg_message())
    with pytest.raises(InvalidRequestError) as caught:
        legs.from_leg(leg_message(**change))
    assert caught.value.field == field


@pytest.mark.parametrize("reason", [0, 99])
def test_an_unknown_finish_reason_is_an_internal_error(reason: int) -> None:
    """The reason is unspecified, or one of a newer contract."""
    finish = legs.from_finish(legs_pb2.Finish(slot=1, reason=reason))  # type: ignore[arg-type]
    assert isinstance(finish.error, InternalError)


def test_a_handle_without_a_lease_is_an_internal_error() -> None:
    """The worker is at fault, so the error is not the InvalidRequestError of a bad request."""
    message = legs_pb2.Finish(reason=output_pb2.FINISH_REASON_HANDED_OFF, handle=kv_pb2.KvHandle(handle_id="h"))
    assert isinstance(legs.from_finish(message).error, InternalError)


VOCABULARY_FAULTS = [
    (Generation(model="m", token_ids=[10]), "generation.token_ids"),
    (Generation(model="m", token_ids=[]), "generation.token_ids"),
    (Generation(model="m", token_ids=[1], emitted_token_ids=[10]), "generation.emitted_token_ids"),
    (
        Generation(model="m", token_ids=[1], sampling=SamplingParams(stop_token_ids=[10])),
        "generation.sampling.stop_token_ids",
    ),
    (
        Generation(model="m", token_ids=[1], sampling=SamplingParams(logit_bias=[(10, 1.0)])),
        "generation.sampling.logit_bias",
    ),
    (Generation(model="m", token_ids=[1], cache_salt="\ud800"), "generation.cache_salt"),
    (Generation(model="m", token_ids=[1], cache_salt="s" * 257), "generation.cache_salt"),
    (Generation(model="m", token_ids=[1], adapter="a" * 2000), "generation.adapter"),
    (Generation(model="m", token_ids=[1] * 16), "generation.token_ids"),
    (
        Generation(model="m", token_ids=[1], emitted_token_ids=[1] * 4, sampling=SamplingParams(max_tokens=4)),
        "generation.emitted_token_ids",
    ),
]


@pytest.mark.parametrize(("generation", "field"), VOCABULARY_FAULTS, ids=range(len(VOCABULARY_FAULTS)))
def test_ids_outside_the_vocabulary_are_refused(generation: Generation, field: str) -> None:
    """An engine that gets such an id anywhere could crash, and end all its requests. A generation that is complete is refused too."""
    with pytest.raises(InvalidRequestError) as caught:
        check_generation(generation, vocabulary_size=10, context_tokens_max=16)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)])
def test_extreme_numbers_are_refused(value: float) -> None:
    """JSON and Python allow NaN, infinities, and integers that exceed any float."""
    with pytest.raises(InvalidRequestError):
        check_range(value, "x", low=0, high=1)
    with pytest.raises(InvalidRequestError):
        check_sampling(SamplingParams(seed=value))  # type: ignore[arg-type]


def test_absent_sampling_fields_have_their_defaults() -> None:
    """Absent differs from false: special tokens are omitted from the text unless the client sets the field to false."""
    assert from_sampling(sampling_pb2.SamplingParams()) == SamplingParams()
    assert not from_sampling(sampling_pb2.SamplingParams(skip_special_tokens=False)).skip_special_tokens
