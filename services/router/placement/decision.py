"""What was decided and what was weighed for it. Arrays are kept as they were weighed; who wants to read them expands them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvmesh.core import Handoff
from services.router.placement.learning import Forecast
from services.router.placement.pools import Pool
from services.router.placement.topology import Group
from services.router.placement.weighed import WeighedLeg
from services.router.workers.target import Target

PAIRS_PER_SIDE = 32
"""Of each side's best, in an explanation: a pair of two others is worse than one of these."""


@dataclass(slots=True, eq=False)
class Choice:
    """The decision. Seconds are 0 where the policy does not estimate them."""

    prefill: Target | None
    decode: Target
    handoff: Handoff | None
    cached_tokens: int
    decode_cached_tokens: int
    uncached_tokens: int
    cost: float
    expected_ttft_s: float | None
    prefill_s: float
    forecast: Forecast
    reasons: tuple[str, ...]
    weighed: Callable[[], Sequence[WeighedLeg]]
    """Gives the legs; working them out is left to those who ask for explanations."""
    pool: Pool
    lines: Sequence[tuple[float, float]] | None
    """Time of a handoff by distance as it was then (`Links.lines`). None: not counted."""

    @property
    def legs(self) -> Sequence[WeighedLeg]:
        """One where the decode worker computes the prompt, else prefill and decode."""
        return self.weighed()

    def pairs(self) -> Iterator[tuple[Target | None, Target, float, Sequence[tuple[str, float]]]]:
        """Candidates with cost and terms, in no order; of many the best ones."""
        legs = self.legs
        if len(legs) == 1:
            (leg,) = legs
            for i in leg.costs.argsort(kind="stable")[: PAIRS_PER_SIDE**2].tolist():
                yield None, leg.candidates.targets[i], float(leg.costs[i]), tuple(_terms(leg, i))
            return
        for group in self.pool.groups:
            yield from self._pairs_of(group, *legs)

    def _pairs_of(
        self, group: Group, left: WeighedLeg, right: WeighedLeg
    ) -> Iterator[tuple[Target | None, Target, float, Sequence[tuple[str, float]]]]:
        for i in left.costs[group.prefills].argsort(kind="stable")[:PAIRS_PER_SIDE].tolist():
            for j in right.costs[group.decodes].argsort(kind="stable")[:PAIRS_PER_SIDE].tolist():
                first, second = i + group.prefills.start, j + group.decodes.start
                terms = [*_terms(left, first, right), *_terms(right, second, left)]
                cost = float(left.costs[first] + right.costs[second])
                if self.lines is not None:
                    base_s, s_per_byte = self.lines[group.distance(i, j)]
                    held = right.candidates.held
                    lacking = self.forecast.prompt_tokens - (0.0 if held is None else float(held[second]))
                    transfer_s = base_s + lacking * group.kv_bytes_per_token * s_per_byte
                    terms.append(("transfer", transfer_s))
                    cost += transfer_s
                yield left.candidates.targets[first], right.candidates.targets[second], cost, terms


def _terms(leg: WeighedLeg, position: int, other: WeighedLeg | None = None) -> Iterator[tuple[str, float]]:
    """Terms that both legs have (`turn`) carry the leg's name."""
    kind, rest = leg.kind.value, float(leg.costs[position])
    others = () if other is None else other.columns
    for name, column in leg.columns.items():
        rest -= (value := float(column[position]))
        yield f"{kind}_{name}" if name in others else name, value
    if 1e-9 < rest < inf:
        yield "preference" if other is None else f"{kind}_preference", rest
