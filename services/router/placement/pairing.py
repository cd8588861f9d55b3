"""The cheapest pair and the cheapest of several, with what equal and nearly equal ones come to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from services.router.placement.links import Distance
from services.router.placement.topology import Group
from services.router.placement.weighed import WeighedLeg
from services.router.workers.board import Floats
from services.router.workers.cost_settings import CostSettings
from services.router.workers.target import Target

INFINITE = float("inf")
Lines = Sequence[tuple[float, float]]


class Selector:
    """Takes one by cost.

    Nearly equal ones with as many cached tokens are equal: one is drawn, and of it and the cheapest the one with fewer requests,
    else the one that got a request longer ago, is taken. So an idle fleet is used evenly, and several routers that see the same
    do not run to the same worker. With a temperature every one is taken with a chance that falls with its cost.
    """

    def __init__(self, settings: CostSettings, generator: Random, *, estimates: bool) -> None:
        self._random = generator.random
        self.tie_ratio = settings.tie_ratio if estimates else 0.0
        """Of the whole cost; `margin` is this part of it."""
        self._temperature = settings.temperature if estimates else 0.0
        self._limit: Floats = np.zeros(())

    def lowest(self, costs: Floats, held: Floats | None, targets: Sequence[Target], common: float = 0.0) -> int | None:
        """Its place, None when all cost infinitely much. `common`: what is part of every whole cost and not of these."""
        best = int(costs.argmin())
        least = costs.item(best)
        if least == INFINITE:
            return None
        return self.near(costs, best, least, self.tie_ratio * (least + common), held, targets)

    def near(
        self,
        costs: Floats,
        best: int,
        least: float,
        margin: float,
        held: Floats | None,
        targets: Sequence[Target],
        held_from: int = 0,
    ) -> int:
        """The place of the cheapest, or of one that is as good: `best` and `least` are the cheapest's place and cost.

        What the first has cached is at `held_from`.
        """
        if self._temperature:
            return self._by_chance(costs, least)
        # Handed over in an array: numpy takes as long to look at a plain number as to compare.
        self._limit[()] = least + margin
        (places,) = (costs <= self._limit).nonzero()
        count = len(places)
        if count == 1:
            return best
        place = places.item(int(self._random() * count))
        if held is not None and held.item(held_from + place) != held.item(held_from + best):
            return best
        cheapest, drawn = targets[best], targets[place]
        fewer = drawn.requests_in_flight - cheapest.requests_in_flight
        return place if fewer < 0 or (fewer == 0 and drawn.placed_last <= cheapest.placed_last) else best

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
    decode = selector.lowest(whole, held_second, second_targets, common_s)
    if decode is None:
        return None
    margin = selector.tie_ratio * (whole.item(decode) + common_s)
    lacking = prompt_tokens if held_second is None else prompt_tokens - held_second.item(decode)
    moved = lacking * group.kv_bytes_per_token if lines is not None else 0.0
    if lines is not None and group.near:
        firsts = firsts + _transfers(group, decode, moved, lines)
    best = int(firsts.argmin())
    prefill = selector.near(firsts, best, firsts.item(best), margin, held_first, first_targets)
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
        segment = near.prefills_of(decode)
        if segment is not None:
            base_s, s_per_byte = lines[distance]
            times[segment] = base_s + moved * s_per_byte
    return times
