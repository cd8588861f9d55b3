"""Which pairs of a pool can exchange KV, and at which distance. Pure.

The candidates of a group are sorted so that those of one zone stand side by side, and within a zone those of one host. The cheapest
prefill candidate of each decode candidate is then the cheapest of its host, of its zone, or of all: no decision looks at all pairs.
Since a nearer handoff is never slower (`handoff_times.py`), counting a near candidate as a far one too cannot win.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kvmesh.core import Handoff
from services.router.placement.bad_pairs import BadPairs
from services.router.workers.handoff_times import Distance
from services.router.workers.target_arrays import Floats, Positions
from services.router.workers.worker import Target

ZONE_LABEL = "zone"
"""Label that names the zone of a worker (`--worker-labels zone=...`)."""


class NearPairs:
    """The prefill candidates at one distance or nearer, as segments: all candidates of one host, or of one zone.

    `segment_of_decode` is the segment of each decode candidate; a number beyond the last one means none.
    """

    __slots__ = ("_segment_of_decode", "_segments", "_starts")

    def __init__(self, starts: Sequence[int], prefills: int, segment_of_decode: Sequence[int]) -> None:
        self._starts: Positions = np.array(starts, dtype=np.intp)
        self._segment_of_decode: Positions = np.array(segment_of_decode, dtype=np.intp)
        self._segments = [slice(*ends) for ends in pairwise((*starts, prefills))]

    def lowest(self, prefill_costs: Floats) -> Floats:
        """Returns the lowest cost in each decode candidate's segment; infinite where it has none."""
        # Each segment ends where the next one starts, as `reduceat` assumes. The value at the end is for decode candidates without a segment.
        lowest = np.append(np.minimum.reduceat(prefill_costs, self._starts), np.inf)
        return lowest.take(self._segment_of_decode)

    def prefills_of(self, decode: int) -> slice | None:
        segment = self._segment_of_decode.item(decode)
        return self._segments[segment] if segment < len(self._segments) else None


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Candidates that can exchange KV: a slice of either side of the pool."""

    handoff: Handoff
    prefills: slice
    decodes: slice
    kv_bytes_per_token: float
    near: Sequence[tuple[Distance, NearPairs]]
    """For distances at which some pairs are, but not all; the nearest first."""
    rest: Distance
    """Distance of all other pairs."""
    bad_pairs: BadPairs | None = None
    """None: KV passes between all pairs, in the time of their distance."""

    def distance(self, prefill: int, decode: int) -> Distance:
        """Returns the distance of two candidates, given their positions in the group."""
        for distance, near in self.near:
            segment = near.prefills_of(decode)
            if segment is not None and segment.start <= prefill < segment.stop:
                return distance
        return self.rest

    def distances_to(self, decode: int) -> Positions:
        """Returns the distance of each prefill candidate to a decode candidate, by their positions in the group."""
        distances: Positions = np.full(self.prefills.stop - self.prefills.start, self.rest, dtype=np.intp)
        # From far to near: the candidates of a host are in its zone too, and the nearest distance counts.
        for distance, near in reversed(self.near):
            segment = near.prefills_of(decode)
            if segment is not None:
                distances[segment] = distance
        return distances


def host_of(target: Target) -> str:
    return target.worker.address.rpartition(":")[0]


def zone_of(target: Target) -> str:
    """Returns the zone by the worker's label; workers without it are in one zone."""
    return target.worker.labels.get(ZONE_LABEL, "")


def sort_key(target: Target) -> tuple[str, str, str, str, int]:
    """Sorts one side of a pool as `make_groups` needs it."""
    exchange_key = target.worker.exchange_key
    return (
        # Those that cannot exchange KV are last.
        "/".join(exchange_key) if exchange_key is not None else "\uffff",
        zone_of(target),
        host_of(target),
        target.worker.worker_id,
        target.rank,
    )


def make_groups(prefills: Sequence[Target], decodes: Sequence[Target]) -> list[Group]:
    decode_slices = dict(_slices(decodes))
    return [
        _make_group(key[1], prefills, decodes, prefills=prefill_slice, decodes=decode_slices[key])
        for key, prefill_slice in _slices(prefills)
        if key is not None and key in decode_slices
    ]


def _slices(targets: Sequence[Target]) -> list[tuple[tuple[str, Handoff] | None, slice]]:
    start, found = 0, []
    for key, members in groupby(targets, key=lambda target: target.worker.exchange_key):
        length = sum(1 for _ in members)
        found.append((key, slice(start, start + length)))
        start += length
    return found


def _make_group(
    handoff: Handoff, all_prefills: Sequence[Target], all_decodes: Sequence[Target], *, prefills: slice, decodes: slice
) -> Group:
    rest = Distance.FAR
    near: list[tuple[Distance, NearPairs]] = []
    sides = all_prefills[prefills], all_decodes[decodes]
    places: dict[Distance, Sequence[Sequence[Hashable]]] = {
        Distance.ZONE: [[zone_of(target) for target in side] for side in sides],
        Distance.HOST: [[(zone_of(target), host_of(target)) for target in side] for side in sides],
    }
    # From far to near: `rest` ends as the nearest distance that all pairs have in common, and `near` starts with the nearest one.
    for distance, (of_prefills, of_decodes) in places.items():
        if len({*of_prefills, *of_decodes}) == 1:
            rest = distance
        elif set(of_prefills) & set(of_decodes):
            near.insert(0, (distance, _near_pairs(of_prefills, of_decodes)))
    return Group(
        handoff=handoff,
        prefills=prefills,
        decodes=decodes,
        kv_bytes_per_token=max(target.coefficients.kv_bytes_per_token for target in sides[0]),
        near=tuple(near),
        rest=rest,
    )


def _near_pairs(of_prefills: Sequence[Hashable], of_decodes: Sequence[Hashable]) -> NearPairs:
    segments: dict[Hashable, int] = {}
    starts: list[int] = []
    for position, place in enumerate(of_prefills):
        if place not in segments:
            segments[place] = len(starts)
            starts.append(position)
    return NearPairs(starts, len(of_prefills), [segments.get(place, len(starts)) for place in of_decodes])
