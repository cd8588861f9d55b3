"""The cheapest pair and the cheapest of several, with what equal and nearly equal ones come to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from services.router.board import Floats
from services.router.cost import CostSettings
from services.router.links import Distance
from services.router.target import Target
from services.router.topology import Group
from services.router.weighed import WeighedLeg

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
        self,
        costs: Floats,
        held: Floats | None,
        targets: Sequence[Target],
        *,
        common: float = 0.0,
        of: float | None = None,
    ) -> int | None:
        """Its place, None when all cost infinitely much.

        `common`: what is part of every cost and left out of these. `of`: the whole cost of which these are a part.
        """
        best = int(costs.argmin())
        least = costs.item(best)
        if least == INFINITE:
            return None
        if self._temperature:
            return self._by_chance(costs, least)
        margin = self._tie_ratio * (least + common if of is None else of)
        near = (costs <= least + margin).nonzero()[0]
        if len(near) == 1:
            return best
        places: list[int] = near.tolist()
        if held is not None:
            as_many = held.item(best)
            places = [place for place in places if held.item(place) == as_many]
        return best if len(places) == 1 else self._of_two(places, targets)

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
    firsts, held_first, first_targets = _stretch(left, group.prefills, group.is_whole)
    seconds, held_second, second_targets = _stretch(right, group.decodes, group.is_whole)
    least_first = firsts.item(firsts.argmin())
    if least_first == INFINITE:
        return None
    base_s, s_per_token = 0.0, 0.0
    if lines is not None:
        base_s, s_per_byte = lines[group.rest]
        s_per_token = s_per_byte * group.kv_bytes_per_token
    # What all decode candidates have in common does not change which is the cheapest: it is added to that one only.
    whole = seconds if held_second is None or lines is None else seconds - held_second * s_per_token
    common_s = least_first + base_s + prompt_tokens * s_per_token
    if lines is not None and group.near:
        whole = _with_near(group, whole + common_s, firsts, seconds, held_second, prompt_tokens, lines)
        common_s = 0.0
    decode = selector.lowest(whole, held_second, second_targets, common=common_s)
    if decode is None:
        return None
    cost = whole.item(decode) + common_s
    lacking = prompt_tokens if held_second is None else prompt_tokens - held_second.item(decode)
    moved = lacking * group.kv_bytes_per_token if lines is not None else 0.0
    if lines is not None and group.near:
        firsts = firsts + _transfers(group, decode, moved, lines)
    prefill = selector.lowest(firsts, held_first, first_targets, of=cost)
    assert prefill is not None
    distance, transfer_s = group.distance(prefill, decode), 0.0
    if lines is not None:
        base_s, s_per_byte = lines[distance]
        transfer_s = base_s + moved * s_per_byte
    first, second = prefill + group.prefills.start, decode + group.decodes.start
    # Nearly equal ones may have been taken instead of the cheapest: the cost is that of the pair itself.
    cost = left.costs.item(first) + right.costs.item(second) + transfer_s
    return Pair(group, first, second, cost, transfer_s, moved, distance)


def _stretch(leg: WeighedLeg, stretch: slice, is_whole: bool) -> tuple[Floats, Floats | None, Sequence[Target]]:
    """A group's costs, held tokens and targets of a leg."""
    candidates = leg.candidates
    if is_whole:
        return leg.costs, candidates.held, candidates.targets
    held = None if candidates.held is None else candidates.held[stretch]
    return leg.costs[stretch], held, candidates.targets[stretch]


def _with_near(
    group: Group,
    costs: Floats,
    firsts: Floats,
    seconds: Floats,
    held: Floats | None,
    prompt_tokens: int,
    lines: Lines,
) -> Floats:
    """The lowest cost of each decode candidate, now that prefill candidates may be nearer than the rest."""
    lacking = prompt_tokens if held is None else prompt_tokens - held
    for distance, near in group.near:
        base_s, s_per_byte = lines[distance]
        costs = np.minimum(
            costs, seconds + near.lowest(firsts) + (lacking * (s_per_byte * group.kv_bytes_per_token) + base_s)
        )
    return costs


def _transfers(group: Group, decode: int, moved: float, lines: Lines) -> Floats:
    """Time of the handoff from each prefill candidate of the group to one decode candidate."""
    base_s, s_per_byte = lines[group.rest]
    times = np.full(group.prefills.stop - group.prefills.start, base_s + moved * s_per_byte)
    for distance, near in reversed(group.near):
        base_s, s_per_byte = lines[distance]
        times[near.of_prefill == near.of_decode[decode]] = base_s + moved * s_per_byte
    return times
