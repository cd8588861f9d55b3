"""The cheapest pair and the cheapest of several, with what equal and nearly equal ones come to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from services.router.board import Floats
from services.router.choice import WeighedLeg
from services.router.cost import CostSettings
from services.router.links import Distance
from services.router.target import Target
from services.router.topology import Group

INFINITE = float("inf")
Lines = Sequence[tuple[float, float]]


class Selector:
    """Takes one by cost.

    Nearly equal ones with as many cached tokens are equal: two of them are drawn and the one with fewer requests, then the one
    that got a request longer ago, is taken. So an idle fleet is used evenly, and several routers that see the same do not run
    to the same worker. With a temperature every one is taken with a chance that falls with its cost.
    """

    def __init__(self, settings: CostSettings, generator: Random, *, estimates: bool) -> None:
        self._random = generator.random
        self._tie_ratio = settings.tie_ratio if estimates else 0.0
        self._temperature = settings.temperature if estimates else 0.0

    def lowest(
        self, costs: Floats, held: Floats | None, targets: Sequence[Target], *, of: float | None = None
    ) -> int | None:
        """Its place, None when all cost infinitely much. `of`: the whole cost of which these are a part."""
        best = int(costs.argmin())
        least = costs.item(best)
        if least == INFINITE:
            return None
        if self._temperature:
            return self._by_chance(costs, least)
        margin = self._tie_ratio * (least if of is None else of)
        near = (costs <= least + margin).nonzero()[0]
        if len(near) > 1 and held is not None:
            near = near[held[near] == held[best]]
        return best if len(near) == 1 else self._of_two(near.tolist(), targets)

    def _of_two(self, near: Sequence[int], targets: Sequence[Target]) -> int:
        i = int(self._random() * len(near))
        j = int(self._random() * (len(near) - 1))
        first, second = near[i], near[j + 1 if j >= i else j]
        one, other = targets[first], targets[second]
        if one.requests_in_flight == other.requests_in_flight:
            return second if other.placed_last < one.placed_last else first
        return second if other.requests_in_flight < one.requests_in_flight else first

    def _by_chance(self, costs: Floats, least: float) -> int:
        weights = np.exp((least - costs) / self._temperature).cumsum()
        return int(weights.searchsorted(self._random() * weights[-1], side="right"))


@dataclass(slots=True)
class Pair:
    """Places in the two sides, and what the handoff takes."""

    group: Group
    prefill: int
    decode: int
    cost: float
    transfer_s: float
    transfer_bytes: float
    distance: Distance


def best_pair(
    selector: Selector,
    groups: Sequence[Group],
    left: WeighedLeg,
    right: WeighedLeg,
    prompt_tokens: int,
    lines: Lines | None,
) -> Pair | None:
    """The cheapest pair over all groups; None when every pair has a full half. `lines` None: the handoff counts nothing."""
    best = None
    for group in groups:
        pair = _best_of(selector, group, left, right, prompt_tokens, lines)
        if pair is not None and (best is None or pair.cost < best.cost):
            best = pair
    return best


def _best_of(
    selector: Selector, group: Group, left: WeighedLeg, right: WeighedLeg, prompt_tokens: int, lines: Lines | None
) -> Pair | None:
    firsts, seconds = left.costs[group.prefills], right.costs[group.decodes]
    lowest_first = firsts.item(firsts.argmin())
    if lowest_first == INFINITE:
        return None
    held = right.held
    held_there = None if held is None else held[group.decodes]
    bytes_there: Floats | float = 0.0
    if lines is None:
        costs = seconds + lowest_first
    else:
        lacking = prompt_tokens if held_there is None else prompt_tokens - held_there
        bytes_there = lacking * group.kv_bytes_per_token
        base_s, s_per_byte = lines[group.rest]
        costs = seconds + (bytes_there * s_per_byte + (base_s + lowest_first))
        for distance, near in group.near:
            near_base_s, near_s_per_byte = lines[distance]
            nearer = seconds + near.lowest(firsts) + (bytes_there * near_s_per_byte + near_base_s)
            costs = np.minimum(costs, nearer)
    decode = selector.lowest(costs, held_there, right.targets[group.decodes])
    if decode is None:
        return None
    cost = costs.item(decode)
    moved = bytes_there if isinstance(bytes_there, (int, float)) else bytes_there.item(decode)
    if lines is not None and group.near:
        firsts = firsts + _transfers(group, decode, moved, lines)
    held_first = None if left.held is None else left.held[group.prefills]
    prefill = selector.lowest(firsts, held_first, left.targets[group.prefills], of=cost)
    assert prefill is not None
    distance = group.distance(prefill, decode)
    transfer_s = 0.0
    if lines is not None:
        base_s, s_per_byte = lines[distance]
        transfer_s = base_s + moved * s_per_byte
    if group.near:
        # A nearly equal one may have been taken, at another distance.
        first = left.costs.item(prefill + group.prefills.start)
        cost = first + seconds.item(decode) + transfer_s
    else:
        cost = seconds.item(decode) + firsts.item(prefill) + transfer_s
    return Pair(
        group,
        prefill + group.prefills.start,
        decode + group.decodes.start,
        cost,
        transfer_s,
        moved,
        distance,
    )


def _transfers(group: Group, decode: int, moved: float, lines: Lines) -> Floats:
    """Time of the handoff from each prefill candidate of the group to one decode candidate."""
    base_s, s_per_byte = lines[group.rest]
    times = np.full(group.prefills.stop - group.prefills.start, base_s + moved * s_per_byte)
    for distance, near in reversed(group.near):
        base_s, s_per_byte = lines[distance]
        times[near.of_prefill == near.of_decode[decode]] = base_s + moved * s_per_byte
    return times
