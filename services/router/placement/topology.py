"""Which pairs of a pool can exchange KV, how far they are from each other, and the cheapest pair of all. Pure.

The prefill candidates of a group that can exchange KV stand side by side, and in it those of one zone, and in that those of one
host. The lowest cost of a pair then takes no look at all pairs: for each decode candidate it is the least of three, the best
prefill candidate of its host, of its zone, and of all, each with the transfer of that distance; since nearer is never slower
(`links.py`), counting a near candidate as a far one too can only lose.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from kvmesh.core import Handoff
from services.router.placement.links import Distance
from services.router.workers.board import Floats, Positions
from services.router.workers.target import Target


class Near:
    """Segments of prefill candidates at one distance or nearer: where each begins, and which is each decode candidate's.

    The last segment, one more than there are, is nobody's.
    """

    __slots__ = ("_lowest", "_lowest_of_segments", "_of_decode", "_segments", "_starts")

    def __init__(self, starts: Sequence[int], prefills: int, of_decode: Sequence[int]) -> None:
        self._starts: Positions = np.array(starts, dtype=np.intp)
        self._of_decode: Positions = np.array(of_decode, dtype=np.intp)
        self._segments = [slice(*ends) for ends in pairwise((*starts, prefills))]
        self._lowest: Floats = np.full(len(starts) + 1, np.inf)
        self._lowest_of_segments = self._lowest[:-1]

    def lowest(self, costs: Floats) -> Floats:
        """The lowest cost in each decode candidate's segment; infinite where it has none."""
        np.minimum.reduceat(costs, self._starts, 0, None, self._lowest_of_segments)
        return self._lowest.take(self._of_decode)

    def prefills_of(self, decode: int) -> slice | None:
        """The segment of a decode candidate; None: it has none."""
        segment = self._of_decode.item(decode)
        return self._segments[segment] if segment < len(self._segments) else None


@dataclass(slots=True, eq=False)
class Group:
    """Candidates that can exchange KV: a stretch of each side."""

    handoff: Handoff
    prefills: slice
    decodes: slice
    kv_bytes_per_token: float
    is_whole: bool = False
    """True when there is no other group and nobody outside of it."""
    near: Sequence[tuple[Distance, Near]] = field(default=())
    """For distances at which there are some pairs, but not all."""
    rest: Distance = Distance.FAR
    """Of all other pairs."""

    def distance(self, prefill: int, decode: int) -> Distance:
        """Between two by their places in the group."""
        for distance, near in self.near:
            segment = near.prefills_of(decode)
            if segment is not None and segment.start <= prefill < segment.stop:
                return distance
        return self.rest


def host(target: Target) -> str:
    """The machine of a worker, by its address."""
    return target.worker.address.rpartition(":")[0]


def zone(target: Target) -> str:
    """Its zone; without a label all workers are in one."""
    return target.worker.labels.get(target.cost.zone_label, "")


def order(target: Target) -> tuple[str, str, str, str, int]:
    """Sorts a side of a pool as groups need it."""
    pairs_as = target.worker.pairs_as
    return (
        "/".join(pairs_as) if pairs_as is not None else "\uffff",
        zone(target),
        host(target),
        target.worker.worker_id,
        target.rank,
    )


def groups(prefills: Sequence[Target], decodes: Sequence[Target]) -> list[Group]:
    """The groups of two sorted sides."""
    found = []
    right = dict(_stretches(decodes))
    for key, left in _stretches(prefills):
        if key is not None and key in right:
            found.append(_group(key[1], left, right[key], prefills[left], decodes[right[key]]))
    for group in found:
        group.is_whole = group.prefills == slice(0, len(prefills)) and group.decodes == slice(0, len(decodes))
    return found


def _stretches(targets: Sequence[Target]) -> list[tuple[tuple[str, Handoff] | None, slice]]:
    at, found = 0, []
    for key, members in groupby(targets, key=lambda target: target.worker.pairs_as):
        length = sum(1 for _ in members)
        found.append((key, slice(at, at + length)))
        at += length
    return found


def _group(handoff: Handoff, left: slice, right: slice, prefills: Sequence[Target], decodes: Sequence[Target]) -> Group:
    rest = Distance.FAR
    near: list[tuple[Distance, Near]] = []
    places: dict[Distance, tuple[Sequence[Hashable], Sequence[Hashable]]] = {
        Distance.ZONE: ([zone(t) for t in prefills], [zone(t) for t in decodes]),
        Distance.HOST: ([(zone(t), host(t)) for t in prefills], [(zone(t), host(t)) for t in decodes]),
    }
    for distance, (first, second) in places.items():
        shared = set(first) & set(second)
        if len(set(first) | set(second)) == 1:
            rest = distance
        elif shared:
            near.insert(0, (distance, _near(first, second)))
    kv_bytes = max(target.coefficients.kv_bytes_per_token for target in prefills)
    return Group(
        handoff=handoff, prefills=left, decodes=right, kv_bytes_per_token=kv_bytes, near=tuple(near), rest=rest
    )


def _near(first: Sequence[Hashable], second: Sequence[Hashable]) -> Near:
    numbers: dict[Hashable, int] = {}
    starts: list[int] = []
    for position, place in enumerate(first):
        if place not in numbers:
            numbers[place] = len(starts)
            starts.append(position)
    return Near(starts, len(first), [numbers.get(place, len(starts)) for place in second])
