"""Messages between routers."""

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.checks import PRIORITY_MAX, REQUEST_ID_CHARACTERS_MAX, check_length, check_range
from kvmesh.core import PeerReservation, PeerUpdate
from kvmesh.rpc.codec.message_codec import MessageCodec
from kvmesh.rpc.codec.router import BLOCKS_MAX, TENANT_CHARACTERS_MAX
from kvmesh.rpc.codec.scalars import positive_duration, required_text, to_positive_duration

ID_CHARACTERS_MAX = 512
CHARGED_TOKENS_MAX = 2**40
CHANGES_MAX = 8192
"""Of each kind in one message; routers send much smaller ones."""
_UPDATE = MessageCodec(pb.PeerUpdate, PeerUpdate)
_RESERVATION = MessageCodec(pb.Reservation, PeerReservation)


def to_peer_update(update: PeerUpdate) -> pb.PeerUpdate:
    return _UPDATE.encode(
        update,
        reservations=[
            _RESERVATION.encode(each, ends_after=to_positive_duration(each.ends_after_s))
            for each in update.reservations
        ],
    )


def from_peer_update(message: pb.PeerUpdate) -> PeerUpdate:
    """Returns the checked value. Only the stream knows whether the message must name its sender."""
    check_range(message.sequence, "sequence", low=1, high=2**64 - 1)
    check_length(len(message.router_id), "router_id", high=128, unit="characters")
    check_length(len(message.run_id), "run_id", high=64, unit="characters")
    for name in ("reservations", "prefilled_ids", "settled_ids"):
        check_length(len(getattr(message, name)), name, high=CHANGES_MAX)
    return _UPDATE.decode(message, reservations=[_from_reservation(each) for each in message.reservations])


def _from_reservation(message: pb.Reservation) -> PeerReservation:
    check_range(message.ask_id, "reservations.ask_id", low=1, high=2**64 - 1)
    check_length(len(message.block_hashes), "reservations.block_hashes", high=BLOCKS_MAX)
    required_text(message.reservation_id, field="reservations.reservation_id", characters_max=ID_CHARACTERS_MAX)
    required_text(message.request_id, field="reservations.request_id", characters_max=REQUEST_ID_CHARACTERS_MAX)
    required_text(message.frontend_id, field="reservations.frontend_id", characters_max=128)
    check_length(len(message.tenant), "reservations.tenant", high=TENANT_CHARACTERS_MAX, unit="characters")
    check_length(len(message.model), "reservations.model", high=256, unit="characters")
    check_range(message.priority, "reservations.priority", low=-PRIORITY_MAX, high=PRIORITY_MAX)
    check_range(message.charged_tokens, "reservations.charged_tokens", low=0, high=CHARGED_TOKENS_MAX)
    required_text(message.decode_worker_id, field="reservations.decode_worker_id", characters_max=ID_CHARACTERS_MAX)
    positive_duration(message, "ends_after", field="reservations.ends_after", required=True)
    return _RESERVATION.decode(message, choices=message.choices or min(1, message.kv_blocks))
