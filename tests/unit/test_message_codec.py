"""Codecs that convert fields by their names."""

from dataclasses import fields, replace

import pytest

from kvmesh.api.types.v1 import model_pb2
from kvmesh.core import Capabilities, Handoff, KvTier, Role, WorkerDescription
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec import peers, planner, router, types, worker
from kvmesh.rpc.codec.message_codec import MessageCodec, enum_table
from tests.unit.router_fleets import description

CODECS = {
    types.WORKER_REF_CODEC: set(),
    types._MEDIA: set(),
    types._RENDEZVOUS: set(),
    worker.LOAD_CODEC: set(),
    worker._PROFILE: set(),
    worker._MODEL_CARD: set(),
    worker._CAPABILITIES: set(),
    worker._DESCRIPTION: set(),
    planner._POOL: set(),
    planner._LATENCY: set(),
    planner._PLAN: set(),
    peers._RESERVATION: set(),
    peers._UPDATE: {"reservations"},
    router._COEFFICIENT: set(),
    router._CANDIDATE: set(),
    router._WORKER_VIEW: {"tiers", "blocks_by_tier"},
    router._EXPLANATION: {"ask_id", "placement", "reports"},
}
"""Codecs, and the fields that are converted by hand."""


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec._value.__name__)
def test_every_field_is_converted(codec: MessageCodec) -> None:
    """A field that only one side has would be lost without an error."""
    converted, others = codec._fields, CODECS[codec]
    assert {each.value_name for each in converted} | others >= {each.name for each in fields(codec._value)}
    assert {each.name for each in converted} | others >= set(codec._message.DESCRIPTOR.fields_by_name)


def test_a_description_survives_encoding_and_decoding() -> None:
    """The description may lack optional messages and durations."""
    full: WorkerDescription = replace(description("w", "decode", rendezvous="h:1"), lease_s=30.5, is_draining=True)
    for value in (full, description("w", "prefill")):
        assert worker.from_description(worker.to_description(value)) == value


def test_enum_tables_are_complete() -> None:
    """Every value of the enum has a number."""
    for table, kind in ((worker.ROLES, Role), (worker.HANDOFFS, Handoff), (worker.TIERS, KvTier)):
        assert set(table.values()) == set(kind)
    assert enum_table(model_pb2.Role, str)[model_pb2.ROLE_PREFILL] == "prefill"


def test_unknown_numbers_of_enums() -> None:
    """Unknown numbers of enums are skipped in a list, and otherwise refused with the field's name."""
    capabilities = model_pb2.Capabilities(engine="e", roles=[model_pb2.ROLE_DECODE, 99])
    assert worker._CAPABILITIES.decode(capabilities).roles == (Role.DECODE,)
    assert isinstance(worker._CAPABILITIES.decode(capabilities), Capabilities)
    message = worker.to_description(description("w", "decode"))
    message.role = 99
    with pytest.raises(InvalidRequestError) as refused:
        worker.from_description(message)
    assert refused.value.field == "role"
