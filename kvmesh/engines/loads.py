"""Parts of load records: KV blocks counted by their holders, and the loads of several data-parallel ranks as one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvmesh.core import LoadRecord

INTERVAL_S = 1.0
"""Time between two counts while requests run. A count takes about a millisecond for 30 000 blocks."""
_NEWEST = ("step", "step_s", "failed_handoffs_total", "recomputed_tokens_total")
"""Of these the largest value counts: steps differ between ranks, and ranks count failed handoffs together."""
_IDENTITY = ("worker_id", "epoch", "sequence", "taken_at_s", "data_parallel_rank", "is_draining", "failing_kv_paths")
_UNKNOWN = "kv_blocks_unaccounted"
"""None while an engine does not report it."""
_SUMMED = [field.name for field in fields(LoadRecord) if field.name not in (*_NEWEST, *_IDENTITY, _UNKNOWN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCount:
    """`held`: different blocks of requests, handles and transfers. `cached`: free blocks with cached KV."""

    held: int
    cached: int


class HeldBlocks:
    """Keeps the newest count. It counts again after INTERVAL_S, and each time while no block is in use."""

    def __init__(self) -> None:
        self._counted_s = float("-inf")
        self._count = BlockCount(held=0, cached=0)
        self._unaccounted: int | None = None

    def load_fields(
        self, *, free: int, used: int, total: int, count: Callable[[], BlockCount], now_s: float
    ) -> Mapping[str, Any]:
        """Returns the counts as fields of a load record that is made now. `free`, `used` and `total`: what the block pool says."""
        if not used or now_s - self._counted_s >= INTERVAL_S:
            self._counted_s, self._count = now_s, count()
            self._unaccounted = total - free - self._count.held
        return {
            "kv_blocks_cached": self._count.cached,
            "kv_blocks_held": self._count.held,
            "kv_blocks_unaccounted": self._unaccounted,
        }


def sum_loads(loads: Sequence[LoadRecord]) -> LoadRecord:
    """Returns all ranks together. Failing paths are those of the first rank, since ranks share them."""
    sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMMED}
    newest = {name: max(getattr(load, name) for load in loads) for name in _NEWEST}
    unaccounted = [load.kv_blocks_unaccounted for load in loads if load.kv_blocks_unaccounted is not None]
    all_known = sum(unaccounted) if len(unaccounted) == len(loads) else None
    return replace(loads[0], **sums, **newest, kv_blocks_unaccounted=all_known)


def share_of_load(load: LoadRecord, rank: int, ranks: int) -> LoadRecord:
    """Returns an even share, for an engine that reports all its ranks together."""
    shares = {name: getattr(load, name) // ranks for name in _SUMMED}
    # Leaked blocks cannot be attributed to a rank.
    return replace(load, **shares, data_parallel_rank=rank, kv_blocks_unaccounted=None)
