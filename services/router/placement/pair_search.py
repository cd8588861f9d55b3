"""The cheapest pair of workers, and the choice among candidates of nearly equal cost. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from services.router.placement.policies import Candidates
from services.router.placement.topology import Group
from services.router.workers.cost_settings import CostSettings
from services.router.workers.handoff_times import Distance, HandoffTimes
from services.router.workers.target_arrays import Floats
from services.router.workers.worker import Target

INFINITE = float("inf")
TIE_RATIO = 0.05
"""Candidates whose cost is within this ratio of the lowest are equivalent: coefficients are accurate to a few percent at best."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScoredLeg:
    """One leg of a request with the cost of every candidate, and the terms that the cost is the sum of. Infinite: full."""

    candidates: Candidates
    terms: Mapping[str, Floats]
    costs: Floats


@dataclass(slots=True, kw_only=True)
class Pair:
    """Positions in the two legs, the cost, and the handoff."""

    group: Group
    prefill: int
    decode: int
    cost: float
    transfer_s: float
    transfer_bytes: float
    distance: Distance


class Selector:
    """Chooses one candidate by cost.

    Candidates of nearly equal cost with as many cached tokens are equal, since coefficients are not known better. One of them is drawn;
    of it and the cheapest, the one with fewer requests is taken, else the one whose newest placement is older. So an idle fleet is used
    evenly, and routers that see the same fleet do not all take the same worker. With a temperature every candidate has a chance that
    falls with its cost.
    """

    def __init__(self, settings: CostSettings, generator: Random, *, estimates_time: bool) -> None:
        self._random = generator.random
        self._tie_ratio = TIE_RATIO if estimates_time else 0.0
        self._temperature = settings.temperature if estimates_time else 0.0

    def choose(
        self, costs: Floats, cached_tokens: Floats, targets: Sequence[Target], *, first_target: int = 0
    ) -> int | None:
        """Returns the position of the chosen candidate. None: all are full. `costs` must be the whole cost, of which ties are a ratio.

        `first_target`: position of the first candidate in `targets`, so that no part of them is copied.
        """
        cheapest = int(costs.argmin())
        lowest = costs.item(cheapest)
        if lowest == INFINITE:
            return None
        if self._temperature:
            # Costs relative to the lowest one do not overflow. A full candidate weighs exp(-inf) = 0, and `side="right"` never returns it.
            weights = np.exp((lowest - costs) / self._temperature).cumsum()
            return int(weights.searchsorted(self._random() * weights[-1], side="right"))
        (equal,) = (costs <= lowest + self._tie_ratio * lowest).nonzero()
        if len(equal) == 1:
            return cheapest
        drawn = equal.item(int(self._random() * len(equal)))
        if cached_tokens.item(drawn) != cached_tokens.item(cheapest):
            return cheapest
        best, other = targets[first_target + cheapest], targets[first_target + drawn]
        fewer = other.requests_in_flight - best.requests_in_flight
        return drawn if fewer < 0 or (fewer == 0 and other.placed_last <= best.placed_last) else cheapest


def find_pair(
    selector: Selector,
    groups: Sequence[Group],
    *,
    prefill_leg: ScoredLeg,
    decode_leg: ScoredLeg,
    prompt_tokens: int,
    handoff_times: HandoffTimes,
) -> Pair | None:
    """Returns the cheapest pair of all groups. None: one of the two is full in every pair."""
    best = None
    for group in groups:
        pair = _find_pair_of_group(
            selector,
            group,
            prefill_leg=prefill_leg,
            decode_leg=decode_leg,
            prompt_tokens=prompt_tokens,
            handoff_times=handoff_times,
        )
        if pair is not None and (best is None or pair.cost < best.cost):
            best = pair
    return best


def _find_pair_of_group(
    selector: Selector,
    group: Group,
    *,
    prefill_leg: ScoredLeg,
    decode_leg: ScoredLeg,
    prompt_tokens: int,
    handoff_times: HandoffTimes,
) -> Pair | None:
    """Chooses the decode candidate first, each with its cheapest prefill candidate; then the prefill candidate for it."""
    bytes_per_token = group.kv_bytes_per_token
    prefill_costs, decode_costs = prefill_leg.costs[group.prefills], decode_leg.costs[group.decodes]
    prefills, decodes = prefill_leg.candidates, decode_leg.candidates
    cached_tokens = decodes.cached_tokens[group.decodes]
    # item(argmin()) takes a third of the time of min().
    lowest_prefill_cost = prefill_costs.item(prefill_costs.argmin())
    time = handoff_times[group.rest]
    # The terms that all candidates have in common are one number: adding it to an array takes longer than adding two arrays.
    costs = decode_costs - time.s_per_byte * bytes_per_token * cached_tokens
    costs += lowest_prefill_cost + time.seconds(prompt_tokens, bytes_per_token=bytes_per_token)
    for distance, near in group.near:
        near_s = handoff_times[distance].seconds(prompt_tokens - cached_tokens, bytes_per_token=bytes_per_token)
        costs = np.minimum(costs, near_s + near.lowest(prefill_costs) + decode_costs)
    if (bad := group.bad_pairs) is not None:
        # All pairs of the few decode candidates that are in a bad one.
        transfers_s = bad.transfer_s(
            prompt_tokens - cached_tokens[bad.decodes], handoff_times, bytes_per_token=bytes_per_token
        )
        # Replaces the costs from above, which may be those of a bad pair.
        costs[bad.decodes] = (prefill_costs[:, np.newaxis] + transfers_s).min(0) + decode_costs[bad.decodes]
    decode = selector.choose(costs, cached_tokens, decodes.targets, first_target=group.decodes.start)
    if decode is None:
        return None
    moved_tokens = prompt_tokens - cached_tokens.item(decode)
    transfer_s = _transfer_s(group, decode, moved_tokens, handoff_times=handoff_times)
    costs = prefill_costs + (transfer_s + decode_costs.item(decode))
    cached_tokens = prefills.cached_tokens[group.prefills]
    prefill = selector.choose(costs, cached_tokens, prefills.targets, first_target=group.prefills.start)
    assert prefill is not None  # The cost of `decode` was finite with one of them.
    return Pair(
        group=group,
        prefill=prefill + group.prefills.start,
        decode=decode + group.decodes.start,
        cost=costs.item(prefill),
        transfer_s=transfer_s if isinstance(transfer_s, float) else transfer_s.item(prefill),
        transfer_bytes=moved_tokens * bytes_per_token,
        distance=group.distance(prefill=prefill, decode=decode),
    )


def _transfer_s(group: Group, decode: int, moved_tokens: float, *, handoff_times: HandoffTimes) -> Floats | float:
    """Returns the time of the handoff from each prefill candidate to one decode candidate; infinite where KV does not pass."""
    bad = group.bad_pairs
    if bad is not None and (column := bad.column_of.get(decode)) is not None:
        moved = np.full(len(bad.decodes), moved_tokens)
        return bad.transfer_s(moved, handoff_times, bytes_per_token=group.kv_bytes_per_token)[:, column]
    rest_s = handoff_times[group.rest].seconds(moved_tokens, bytes_per_token=group.kv_bytes_per_token)
    if not group.near:
        return rest_s
    times = np.full(group.prefills.stop - group.prefills.start, rest_s)
    for distance, near in reversed(group.near):
        segment = near.prefills_of(decode)
        if segment is not None:
            times[segment] = handoff_times[distance].seconds(moved_tokens, bytes_per_token=group.kv_bytes_per_token)
    return times
