"""Encoding and decoding of the updates between routers."""

from dataclasses import fields, replace

import pytest

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.core import PeerReservation, PeerUpdate
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.peers import CHANGES_MAX, from_peer_update, to_peer_update

RESERVATION = PeerReservation(
    reservation_id="a-run-1",
    request_id="r",
    frontend_id="f",
    ask_id=7,
    decode_worker_id="d1",
    prefill_worker_id="p1",
    decode_rank=2,
    prefill_rank=1,
    uncached_tokens=100,
    kv_blocks=9,
    choices=3,
    is_prefilled=True,
    is_orphaned=True,
    ends_after_s=2.5,
    session_id="s",
    block_hashes=(1, 2**64 - 1),
    tenant="acme",
    model="m",
    priority=-3,
    charged_tokens=1234,
)
UPDATE = PeerUpdate(
    sequence=1,
    router_id="a",
    run_id="run",
    reservations=[RESERVATION, replace(RESERVATION, prefill_worker_id="", prefill_rank=0, block_hashes=())],
    prefilled_ids=("x",),
    settled_ids=("y", "z"),
    is_snapshot=True,
    is_complete=True,
)


def test_an_update_survives_encoding():
    """An update keeps every field through encoding and decoding."""
    for value in (UPDATE, RESERVATION):
        assert all(getattr(value, field.name) not in ("", 0, ()) for field in fields(value)), (
            "the test must set every field"
        )
    for update in (UPDATE, replace(UPDATE, is_complete=False)):
        assert from_peer_update(pb.PeerUpdate.FromString(to_peer_update(update).SerializeToString())) == update


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: setattr(m, "sequence", 0), "sequence"),
        (lambda m: setattr(m, "router_id", "x" * 129), "router_id"),
        (lambda m: setattr(m, "run_id", "x" * 65), "run_id"),
        (lambda m: m.settled_ids.extend(["x"] * (CHANGES_MAX + 1)), "settled_ids"),
        (lambda m: setattr(m.reservations[0], "ask_id", 0), "reservations.ask_id"),
        (lambda m: setattr(m.reservations[0], "tenant", "x" * 129), "reservations.tenant"),
        (lambda m: setattr(m.reservations[0], "model", "x" * 257), "reservations.model"),
        (lambda m: setattr(m.reservations[0], "priority", 101), "reservations.priority"),
        (lambda m: setattr(m.reservations[0], "charged_tokens", 2**63), "reservations.charged_tokens"),
        (lambda m: setattr(m.reservations[0], "reservation_id", ""), "reservations.reservation_id"),
        (lambda m: setattr(m.reservations[0], "frontend_id", "a\nb"), "reservations.frontend_id"),
        (lambda m: setattr(m.reservations[0], "decode_worker_id", ""), "reservations.decode_worker_id"),
        (lambda m: m.reservations[0].ClearField("ends_after"), "reservations.ends_after"),
    ],
)
def test_an_invalid_update_is_refused_by_field(change, field):
    """The error names the invalid field. Such an update may come from a peer of another version."""
    message: pb.PeerUpdate = to_peer_update(UPDATE)
    change(message)
    with pytest.raises(InvalidRequestError) as refused:
        from_peer_update(message)
    assert refused.value.field == field
