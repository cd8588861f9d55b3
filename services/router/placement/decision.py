"""A placement decision with the scores it was based on, from which explanations are computed on request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core import Candidate, Handoff
from services.router.placement.bad_pairs import BadPairs
from services.router.placement.pair_search import INFINITE, ScoredLeg
from services.router.placement.pools import Pool
from services.router.placement.topology import Group
from services.router.workers.handoff_times import HandoffTimes
from services.router.workers.reservations import PlacementForecast
from services.router.workers.worker import Target

PAIRS_PER_SIDE = 32
"""Best candidates of each side in an explanation: a pair of two others is worse than one of these."""
PREFERENCE = "preference"


@dataclass(slots=True, eq=False, kw_only=True)
class PlacementDecision:
    """Where a request goes, and why. `prefill` None: the decode worker computes the prompt."""

    prefill: Target | None
    decode: Target
    handoff: Handoff | None
    cached_tokens: int
    decode_cached_tokens: int
    uncached_tokens: int
    cost: float
    expected_ttft_s: float | None
    """None: the policy does not estimate it."""
    prefill_s: float
    forecast: PlacementForecast
    reasons: tuple[str, ...]
    legs: Sequence[ScoredLeg]
    """One where the decode worker computes the prompt, else prefill and decode."""
    pool: Pool
    handoff_times: HandoffTimes | None
    """The handoff times that the cost contains. None: the cost contains no transfer."""
    bad_pairs: Sequence[BadPairs | None]
    """Those of each of the pool's groups."""

    def candidates(self) -> Iterator[Candidate]:
        """The candidates and their costs, in no order; of many only the best."""
        if len(self.legs) == 1:
            (leg,) = self.legs
            for i in leg.costs.argsort(kind="stable")[: PAIRS_PER_SIDE**2].tolist():
                yield Candidate(
                    decode=leg.candidates.targets[i].ref, cost=leg.costs.item(i), terms=tuple(_terms(leg, i))
                )
            return
        for group, bad_pairs in zip(self.pool.groups, self.bad_pairs, strict=True):
            yield from self._pairs_of(group, bad_pairs)

    def _pairs_of(self, group: Group, bad_pairs: BadPairs | None) -> Iterator[Candidate]:
        prefill_leg, decode_leg = self.legs
        for i in prefill_leg.costs[group.prefills].argsort(kind="stable")[:PAIRS_PER_SIDE].tolist():
            for j in decode_leg.costs[group.decodes].argsort(kind="stable")[:PAIRS_PER_SIDE].tolist():
                prefill, decode = i + group.prefills.start, j + group.decodes.start
                factor = 1.0 if bad_pairs is None else bad_pairs.factor(prefill=i, decode=j)
                if factor == INFINITE:
                    continue
                terms = [*_terms(prefill_leg, prefill, decode_leg), *_terms(decode_leg, decode, prefill_leg)]
                cost = prefill_leg.costs.item(prefill) + decode_leg.costs.item(decode)
                if self.handoff_times is not None:
                    uncached = self.forecast.prompt_tokens - decode_leg.candidates.cached_tokens.item(decode)
                    time = self.handoff_times[group.distance(prefill=i, decode=j)]
                    transfer_s = time.seconds(uncached, bytes_per_token=group.kv_bytes_per_token)
                    terms.append(("transfer", transfer_s))
                    if factor != 1.0:
                        terms.append(("slow_pair", transfer_s * (factor - 1)))
                    cost += transfer_s * factor
                refs = prefill_leg.candidates.targets[prefill].ref, decode_leg.candidates.targets[decode].ref
                yield Candidate(prefill=refs[0], decode=refs[1], cost=cost, terms=terms)


def _terms(leg: ScoredLeg, position: int, other: ScoredLeg | None = None) -> Iterator[tuple[str, float]]:
    """The terms of one candidate. A term that both legs have carries the leg's name; a preference of zero is omitted."""
    for name, values in leg.terms.items():
        value = values.item(position)
        if name != PREFERENCE or value:
            yield f"{leg.candidates.kind.value}_{name}" if other is not None and name in other.terms else name, value
