"""KV blocks: handles and cache events."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class KvTier(StrEnum):
    """Where a block is stored."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"
    PEER = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHandle:
    """KV blocks held under a lease until pulled. Only the adapter that wrote `payload` reads it.

    `lease_s` is the time left when this value was made or received; a process that forwards the handle subtracts the time that it kept it.
    """

    handle_id: str
    format: str
    compatibility_hash: str
    payload: bytes
    worker_id: str
    worker_epoch: int
    tokens: int
    lease_s: float
    kv_bytes: int | None = None
    first_token_ids: Sequence[int] = ()
    seal: bytes = b""
    """See `kvmesh/kv/seals.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReader:
    """The leg that will read a handle, and its worker."""

    worker_id: str
    leg_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting point of two legs that start at the same time."""

    host: str
    port: int
    room: int
    prefill_data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStored:
    """A run of blocks was cached, each the child of the one before. The parent of the first one is `parent_hash`."""

    block_hashes: Sequence[int]
    parent_hash: int | None = None
    tier: KvTier = KvTier.DEVICE
    data_parallel_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRemoved:
    """Blocks left a tier."""

    block_hashes: Sequence[int]
    tier: KvTier = KvTier.DEVICE
    data_parallel_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCleared:
    """All blocks of the rank are gone, in all tiers."""

    data_parallel_rank: int = 0


KvEvent = KvStored | KvRemoved | KvCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBatch:
    """One step of a worker's KV watch: a part of a snapshot, or changes (see `WatchKvResponse`).

    Snapshot parts hold KvStored runs only, parents before their children.
    """

    epoch: int
    sequence: int
    events: Sequence[KvEvent] = ()
    is_snapshot: bool = False
    is_complete: bool = True
    part: int = 0
    """Number of the snapshot's part, from 1; 0: not a snapshot, or from a worker that does not count them."""
