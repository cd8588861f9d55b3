"""The load of several data-parallel ranks as one record."""

from collections.abc import Sequence
from dataclasses import fields, replace

from kvmesh.core import LoadRecord

_NEWEST = ("step", "step_s", "failed_handoffs_total", "recomputed_tokens_total")
"""Of these the largest value counts: steps differ between ranks, and ranks count failed handoffs together."""
_IDENTITY = ("worker_id", "epoch", "sequence", "taken_at_s", "data_parallel_rank", "is_draining", "failing_kv_paths")
_UNKNOWN = "kv_blocks_unaccounted"
"""None while an engine cannot tell."""
_SUMMED = [field.name for field in fields(LoadRecord) if field.name not in (*_NEWEST, *_IDENTITY, _UNKNOWN)]


def sum_loads(loads: Sequence[LoadRecord]) -> LoadRecord:
    """All ranks together. Failing paths are those of the first rank, since ranks share them."""
    sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMMED}
    newest = {name: max(getattr(load, name) for load in loads) for name in _NEWEST}
    unaccounted = [load.kv_blocks_unaccounted for load in loads if load.kv_blocks_unaccounted is not None]
    all_known = sum(unaccounted) if len(unaccounted) == len(loads) else None
    return replace(loads[0], **sums, **newest, kv_blocks_unaccounted=all_known)


def share_of_load(load: LoadRecord, rank: int, ranks: int) -> LoadRecord:
    """An even share, for an engine that reports all its ranks together."""
    shares = {name: getattr(load, name) // ranks for name in _SUMMED}
    # Leaked blocks cannot be attributed to a rank.
    return replace(load, **shares, data_parallel_rank=rank, kv_blocks_unaccounted=None)
