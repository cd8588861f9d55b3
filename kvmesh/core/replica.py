"""What routers tell each other of their work in flight."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationNews:
    """A reservation as a peer tells of it. `ends_after_s` counts from the moment of telling."""

    reservation_id: str
    request_id: str
    frontend_id: str
    ask_id: int
    decode_worker_id: str
    prefill_worker_id: str = ""
    decode_rank: int = 0
    prefill_rank: int = 0
    uncached_tokens: int = 0
    kv_blocks: int = 0
    choices: int = 1
    is_prefilled: bool = False
    is_orphaned: bool = False
    ends_after_s: float = 0.0
    session_id: str = ""
    block_hashes: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNews:
    """One message between routers. `router_id` and `run_id` are empty except in the first of a stream."""

    sequence: int
    router_id: str = ""
    run_id: str = ""
    reservations: Sequence[ReservationNews] = ()
    prefilled_ids: Sequence[str] = ()
    settled_ids: Sequence[str] = ()
    is_snapshot: bool = False
    is_complete: bool = True
