"""What was decided and what was weighed for it. Arrays are kept as they were weighed; who wants to read them expands them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvmesh.core import Handoff
from services.router.board import Floats
from services.router.learning import Forecast
from services.router.policies import Columns, LegKind
from services.router.pools import Pool
from services.router.target import Target
from services.router.topology import Group

PAIRS_PER_SIDE = 32
"""Of each side's best, in an explanation: a pair of two others is worse than one of these."""


@dataclass(slots=True, eq=False)
class WeighedLeg:
    """One leg: terms by name, and costs with preferences and without those that are full (infinite)."""

    kind: LegKind
    targets: Sequence[Target]
    held: Floats | None
    columns: Columns
    costs: Floats


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
    legs: Sequence[WeighedLeg]
    pool: Pool
    lines: Sequence[tuple[float, float]] | None
    """Time of a handoff by distance as it was then (`Links.lines`). None: not counted."""

    def pairs(self) -> Iterator[tuple[Target | None, Target, float, Sequence[tuple[str, float]]]]:
        """Candidates with cost and terms, in no order; of many the best ones."""
        if len(self.legs) == 1:
            (leg,) = self.legs
            for i in leg.costs.argsort(kind="stable")[: PAIRS_PER_SIDE**2].tolist():
                yield None, leg.targets[i], float(leg.costs[i]), tuple(_terms(leg, i))
            return
        for group in self.pool.groups:
            yield from self._pairs_of(group, *self.legs)

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
                    held = 0.0 if right.held is None else float(right.held[second])
                    transfer_s = base_s + (self.forecast.prompt_tokens - held) * group.kv_bytes_per_token * s_per_byte
                    terms.append(("transfer", transfer_s))
                    cost += transfer_s
                yield left.targets[first], right.targets[second], cost, terms


def _terms(leg: WeighedLeg, position: int, other: WeighedLeg | None = None) -> Iterator[tuple[str, float]]:
    """Terms that both legs have (`turn`) carry the leg's name."""
    rest = float(leg.costs[position])
    for name, column in leg.columns.items():
        rest -= (value := float(column[position]))
        yield f"{leg.kind.value}_{name}" if other is not None and name in other.columns else name, value
    if 1e-9 < rest < inf:
        yield "preference" if other is None else f"{leg.kind.value}_preference", rest
