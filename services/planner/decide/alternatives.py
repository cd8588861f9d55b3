"""The alternatives of a decision, with the expected goodput and cost of each. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvmesh.core.planning import Alternative, DecisionAction, Shape
from services.planner.decide.settings import DecideSettings
from services.planner.sizing.demand import Demand
from services.planner.sizing.size import Sizer

DEFLECT_TOKENS_MIN = 256
FLIP_WORKERS_MAX = 2
"""Most workers that flip at the same time: while they flip, neither pool has them."""
FIXED_BOUND = (DecisionAction.KEEP, DecisionAction.DEFLECT)
TOLERANCE = 0.005
"""Shares of goodput that differ by less count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What alternatives start from: `now` is the present load with its backlog, `coming` the largest one within the horizon.

    `ready` and `wanted` differ while workers start or stop.
    """

    now: Demand
    coming: Demand
    ready: Shape
    wanted: Shape


class Evaluator:
    """Evaluates alternatives in one situation.

    Goodput is the mean of two times: soon, when the present load meets the workers that are ready, and later, when the coming load meets
    the pools with all that starts now.
    """

    def __init__(self, sizer: Sizer, settings: DecideSettings, situation: Situation) -> None:
        self._sizer = sizer
        self._settings = settings
        self._situation = situation
        self._shares: dict[tuple[float, Shape], float] = {}
        """Known shares by rate and shape: alternatives have many in common."""

    def keep(self) -> Alternative:
        """Changes nothing; workers that start become ready."""
        return self._alternative(DecisionAction.KEEP, self._situation.wanted, [(1.0, self._situation.ready)])

    def scale(self, shape: Shape) -> Alternative:
        """New workers take a while to be ready; workers that stop leave immediately."""
        soon = _smaller(self._situation.ready, shape)
        return self._alternative(DecisionAction.SCALE, shape, [(1.0, soon)], takes_s=self._settings.start_s)

    def deflections(self) -> Iterator[Alternative]:
        """One per bound: none, and powers of two within the limits."""
        situation = self._situation
        if not situation.ready.prefill_workers or not self._settings.deflects:
            return
        bound, bounds = DEFLECT_TOKENS_MIN, [0]
        while bound < self._settings.deflect_tokens_max:
            bounds.append(bound)
            bound *= 2
        for tokens in (*bounds, self._settings.deflect_tokens_max):
            if tokens != situation.wanted.deflect_tokens:
                yield self.deflect(tokens)

    def deflect(self, tokens: int) -> Alternative:
        """Takes effect with the next placements."""
        situation = self._situation
        soon = replace(situation.ready, deflect_tokens=tokens)
        return self._alternative(
            DecisionAction.DEFLECT, replace(situation.wanted, deflect_tokens=tokens), [(1.0, soon)]
        )

    def flips(self) -> Iterator[Alternative]:
        """Moves up to FLIP_WORKERS_MAX workers either way."""
        targets, ready = self._sizer.targets, self._situation.ready
        for count in range(1, FLIP_WORKERS_MAX + 1):
            if ready.decode_workers - count >= max(1, targets.decode.workers_min):
                yield self.flip(count)
            if ready.prefill_workers - count >= max(1, targets.prefill.workers_min):
                yield self.flip(-count)

    def flip(self, to_prefill: int) -> Alternative:
        """Moves decode workers to prefill; below 0, prefill workers to decode. While a worker flips neither pool has it."""
        ready = self._situation.ready
        flipped = moved(ready, to_prefill)
        start_s, flip_s = max(1e-9, self._settings.start_s), self._settings.flip_s
        part = min(1.0, flip_s / start_s)
        # "Soon" is the time in which a new worker would start. Neither pool has the workers that flip during `flip_s` of it.
        soon = [(part, _smaller(ready, flipped)), (1.0 - part, flipped)]
        return self._alternative(DecisionAction.FLIP, moved(self._situation.wanted, to_prefill), soon, takes_s=flip_s)

    def _alternative(
        self,
        action: DecisionAction,
        shape: Shape,
        soon: Sequence[tuple[float, Shape]],
        *,
        takes_s: float = 0.0,
    ) -> Alternative:
        situation = self._situation
        later = self._sizer.forecast(situation.coming, shape)
        # The bound of deflection follows other changes within a tick or two, so they are judged with the better bound.
        value = self._share if action in FIXED_BOUND else self._best_share
        share = sum(part * value(situation.now, each) for part, each in soon)
        share = (share + value(situation.coming, shape)) / 2
        return Alternative(
            action=action,
            shape=shape,
            takes_s=takes_s,
            goodput_per_s=share * situation.coming.requests_per_s,
            attainment=later.attainment,
            cost=self._sizer.cost(shape),
            ttft_s=later.ttft_s,
            itl_s=later.itl_s,
        )

    def _best_share(self, demand: Demand, shape: Shape) -> float:
        """With the present bound of deflection, or without deflection."""
        share = self._share(demand, shape)
        return max(share, self._share(demand, replace(shape, deflect_tokens=0))) if shape.deflect_tokens else share

    def _share(self, demand: Demand, shape: Shape) -> float:
        rate = demand.requests_per_s
        known = self._shares.get((rate, shape))
        if known is None:
            known = self._shares[rate, shape] = self._sizer.goodput_per_s(demand, shape) / rate if rate else 1.0
        return known


def moved(shape: Shape, to_prefill: int) -> Shape:
    return replace(
        shape,
        prefill_workers=max(0, shape.prefill_workers + to_prefill),
        decode_workers=max(0, shape.decode_workers - to_prefill),
    )


def _smaller(one: Shape, other: Shape) -> Shape:
    return replace(
        one,
        prefill_workers=min(one.prefill_workers, other.prefill_workers),
        decode_workers=min(one.decode_workers, other.decode_workers),
    )


def best_first(alternatives: Sequence[Alternative], rate: float) -> Sequence[Alternative]:
    """Sorts by goodput, then cost, then the bound of deflection. `rate`: the coming load's."""
    return sorted(
        alternatives,
        key=lambda each: (
            -round(each.goodput_per_s / max(rate, 1e-9) / TOLERANCE),
            each.cost,
            each.takes_s,
            each.shape.deflect_tokens,
        ),
    )


def fastest_first(alternatives: Sequence[Alternative], rate: float) -> Sequence[Alternative]:
    """Sorts by the time that a change takes, then as `best_first` does."""
    # `sorted` is stable: equally fast alternatives keep the order of `best_first`.
    return sorted(best_first(alternatives, rate), key=lambda each: each.takes_s)
