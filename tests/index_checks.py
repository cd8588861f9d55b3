"""Reads the router's indexes in a form that tests can compare."""

from collections.abc import Sequence
from typing import NamedTuple

from services.router.index.holder_index import HolderIndex
from services.router.index.lazy_index import LazyIndex
from services.router.index.predicted_index import PredictedIndex


class Match(NamedTuple):
    """A bit set of holders whose longest cached prefix has `depth` blocks."""

    depth: int
    holders: int


def matches(index: HolderIndex | PredictedIndex, block_hashes: Sequence[int]) -> list[Match]:
    """Returns the longest prefix of each holder, in order of depth."""
    return list(map(Match, *index.prefixes(block_hashes)))


def flush_all(index: LazyIndex) -> None:
    """Adds all pending blocks to the dictionaries."""
    for bit in list(index._pending):
        index._flush_holder(bit)
