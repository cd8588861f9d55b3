"""Messages between routers. Both directions of SyncPeers carry the same fields."""

from typing import TypeVar

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.checks import REQUEST_ID_CHARACTERS_MAX, check_length, check_range
from kvmesh.core import PeerNews, ReservationNews
from kvmesh.rpc.codec.router import BLOCKS_MAX
from kvmesh.rpc.codec.scalars import positive_duration, required_text, to_positive_duration

ID_CHARACTERS_MAX = 512
CHANGES_MAX = 8192
"""Of each kind in one message; a sender flushes long before."""
_Sync = TypeVar("_Sync", pb.SyncPeersRequest, pb.SyncPeersResponse)


def to_sync_request(news: PeerNews) -> pb.SyncPeersRequest:
    """What the router that opened the stream says."""
    return _to_sync(pb.SyncPeersRequest, news)


def to_sync_response(news: PeerNews) -> pb.SyncPeersResponse:
    return _to_sync(pb.SyncPeersResponse, news)


def _to_sync(message: type[_Sync], news: PeerNews) -> _Sync:
    return message(
        router_id=news.router_id,
        run_id=news.run_id,
        reservations=[_to_reservation(reservation) for reservation in news.reservations],
        prefilled_reservation_ids=news.prefilled_ids,
        settled_reservation_ids=news.settled_ids,
        sequence=news.sequence,
        is_snapshot=news.is_snapshot,
        is_complete=news.is_complete,
    )


def from_sync(message: pb.SyncPeersRequest | pb.SyncPeersResponse) -> PeerNews:
    """The value, checked. Whether the first message names its sender is for the stream to say."""
    check_range(message.sequence, "sequence", 1, 2**64 - 1)
    check_length(len(message.router_id), "router_id", 0, 128, "characters")
    check_length(len(message.run_id), "run_id", 0, 64, "characters")
    check_length(len(message.reservations), "reservations", 0, CHANGES_MAX, "entries")
    check_length(len(message.prefilled_reservation_ids), "prefilled_reservation_ids", 0, CHANGES_MAX, "entries")
    check_length(len(message.settled_reservation_ids), "settled_reservation_ids", 0, CHANGES_MAX, "entries")
    return PeerNews(
        sequence=message.sequence,
        router_id=message.router_id,
        run_id=message.run_id,
        reservations=[_from_reservation(reservation) for reservation in message.reservations],
        prefilled_ids=tuple(message.prefilled_reservation_ids),
        settled_ids=tuple(message.settled_reservation_ids),
        is_snapshot=message.is_snapshot,
        is_complete=message.is_complete,
    )


def _to_reservation(news: ReservationNews) -> pb.Reservation:
    return pb.Reservation(
        reservation_id=news.reservation_id,
        request_id=news.request_id,
        frontend_id=news.frontend_id,
        ask_id=news.ask_id,
        prefill_worker_id=news.prefill_worker_id,
        decode_worker_id=news.decode_worker_id,
        prefill_data_parallel_rank=news.prefill_rank or None,
        decode_data_parallel_rank=news.decode_rank or None,
        uncached_prompt_tokens=news.uncached_tokens,
        kv_blocks=news.kv_blocks,
        choices=news.choices,
        is_prefilled=news.is_prefilled,
        is_orphaned=news.is_orphaned,
        ends_after=to_positive_duration(news.ends_after_s),
        session_id=news.session_id,
        block_hashes=news.block_hashes,
    )


def _from_reservation(message: pb.Reservation) -> ReservationNews:
    field = "reservations"
    check_range(message.ask_id, f"{field}.ask_id", 1, 2**64 - 1)
    check_length(len(message.block_hashes), f"{field}.block_hashes", 0, BLOCKS_MAX, "entries")
    return ReservationNews(
        reservation_id=required_text(message.reservation_id, f"{field}.reservation_id", ID_CHARACTERS_MAX),
        request_id=required_text(message.request_id, f"{field}.request_id", REQUEST_ID_CHARACTERS_MAX),
        frontend_id=required_text(message.frontend_id, f"{field}.frontend_id", 128),
        ask_id=message.ask_id,
        prefill_worker_id=message.prefill_worker_id,
        decode_worker_id=required_text(message.decode_worker_id, f"{field}.decode_worker_id", ID_CHARACTERS_MAX),
        prefill_rank=message.prefill_data_parallel_rank,
        decode_rank=message.decode_data_parallel_rank,
        uncached_tokens=message.uncached_prompt_tokens,
        kv_blocks=message.kv_blocks,
        choices=message.choices or min(1, message.kv_blocks),
        is_prefilled=message.is_prefilled,
        is_orphaned=message.is_orphaned,
        ends_after_s=positive_duration(message, "ends_after", f"{field}.ends_after", required=True) or 0.0,
        session_id=message.session_id,
        block_hashes=tuple(message.block_hashes),
    )
