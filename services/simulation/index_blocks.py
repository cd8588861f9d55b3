"""Reads the blocks that a router's index lists for a worker."""

from services.router.index.holder_index import HolderIndex
from services.router.index.lazy_index import LazyIndex


def blocks_of(index: HolderIndex, bit: int) -> set[int]:
    """All cached blocks of a holder."""
    stored = {block for block, holders in index.holders.items() if holders & index._live & 1 << bit}
    if not isinstance(index, LazyIndex) or bit not in index._pending:
        return stored
    return stored.union(*[run.blocks for run in index._pending[bit].runs.values()])
