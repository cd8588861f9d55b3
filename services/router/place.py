"""The decision: which pair of workers serves a request. Pure; randomness is an argument.

1. Take the pool of the request's kind, less the workers it excludes, those that are full, and those not pinned when one is.
2. Look up how much of the prompt each candidate holds.
3. When a decode candidate lacks at most `local_prefill_tokens_max` tokens of it, or nobody can hand KV to anybody, weigh the
   decode candidates alone; else weigh both legs and take, over all pairings, the lowest sum.
4. Ties are broken by the generator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from random import Random

from kvmesh.core import Ask, Handoff
from kvmesh.errors import NotFoundError, OverloadedError, UnavailableError
from services.router.feed import KvIndex
from services.router.fleet import Fleet, Target
from services.router.index import bits
from services.router.policies import Columns, LegKind, Policy
from services.router.pools import Kind, Pool, Pools, pairings


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what is placed on one worker, and when a decode worker computes the prompt itself."""

    requests_per_decode_max: int = 1024
    prompt_tokens_per_prefill_max: int = 1_048_576
    local_prefill_tokens_max: int = 0
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedLeg:
    """One leg as it was weighed: terms by name and cost, one value per target."""

    kind: LegKind
    targets: Sequence[Target]
    cached: Sequence[int]
    columns: Columns
    costs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided, and what was weighed for it."""

    prefill: Target | None
    decode: Target
    handoff: Handoff | None
    cached_tokens: int
    uncached_tokens: int
    cost: float
    reasons: Sequence[str]
    legs: Sequence[WeighedLeg]
    pool: Pool


class Placer:
    """Places requests on a fleet. Changes nothing but the generator's state."""

    def __init__(self, fleet: Fleet, index: KvIndex, policy: Policy, limits: Limits, generator: Random) -> None:
        self.policy = policy
        self._index = index
        self._fleet = fleet
        self._limits = limits
        self._random = generator
        self._pools = Pools(fleet, retry_after_s=limits.retry_after_s)

    def choose(self, ask: Ask) -> Choice:
        """The choice. Raises NotFoundError, UnsupportedError, UnavailableError or OverloadedError."""
        pool = self._pools.pool(Kind.of(ask))
        if ask.excluded_worker_ids or ask.pinned_prefill_worker_id or ask.pinned_decode_worker_id:
            pool = self._narrowed(pool, ask)
        pool = self._with_room(pool, ask)
        held = self._held_tokens(ask)
        decode_cached = cached_tokens(pool.decodes, held, ask)
        least_uncached = ask.prompt_tokens - max(decode_cached)
        if not pool.pairings:
            return self._alone(ask, pool, pool.decodes, decode_cached, "no_prefill_pool")
        if least_uncached <= self._limits.local_prefill_tokens_max and not ask.pinned_prefill_worker_id:
            near = [i for i, held in enumerate(decode_cached) if ask.prompt_tokens - held == least_uncached]
            targets = [pool.decodes[i] for i in near]
            return self._alone(ask, pool, targets, [decode_cached[i] for i in near], "local_prefill")
        return self._pair(ask, pool, cached_tokens(pool.prefills, held, ask), decode_cached)

    def _pair(self, ask: Ask, pool: Pool, prefill_cached: Sequence[int], decode_cached: Sequence[int]) -> Choice:
        prefill = self._weigh(LegKind.PREFILL, ask, pool.prefills, prefill_cached)
        decode = self._weigh(LegKind.DECODE, ask, pool.decodes, decode_cached)
        # Both legs' costs are independent of each other, so the best pair of a pairing is its two best legs.
        sums = [
            (_lowest_cost(prefill.costs, first) + _lowest_cost(decode.costs, second), first, second, handoff)
            for (_, handoff), (first, second) in pool.pairings.items()
        ]
        best = min(option[0] for option in sums)
        options = [option for option in sums if option[0] <= best]
        _, first, second, handoff = options[0] if len(options) == 1 else self._random.choice(options)
        left, right = self._lowest(prefill.costs, first), self._lowest(decode.costs, second)
        held = prefill_cached[left]
        return Choice(
            prefill=pool.prefills[left],
            decode=pool.decodes[right],
            handoff=handoff,
            cached_tokens=held,
            uncached_tokens=ask.prompt_tokens - held,
            cost=prefill.costs[left] + decode.costs[right],
            reasons=self._reasons(ask, held),
            legs=(prefill, decode),
            pool=pool,
        )

    def _alone(self, ask: Ask, pool: Pool, targets: Sequence[Target], cached: Sequence[int], reason: str) -> Choice:
        leg = self._weigh(LegKind.ALONE, ask, targets, cached)
        chosen = self._lowest(leg.costs, range(len(targets)))
        held = cached[chosen]
        return Choice(
            prefill=None,
            decode=targets[chosen],
            handoff=None,
            cached_tokens=held,
            uncached_tokens=ask.prompt_tokens - held,
            cost=leg.costs[chosen],
            reasons=(reason, *self._reasons(ask, held)),
            legs=(leg,),
            pool=pool,
        )

    def _weigh(self, kind: LegKind, ask: Ask, targets: Sequence[Target], cached: Sequence[int]) -> WeighedLeg:
        columns = self.policy.weigh(kind, ask.prompt_tokens, targets, cached)
        rows = iter(columns.values())
        costs = next(rows)
        for column in rows:
            costs = list(map(add, costs, column))
        if ask.preferred_labels:
            costs = self._preferring(ask, targets, costs)
        return WeighedLeg(kind=kind, targets=targets, cached=cached, columns=columns, costs=costs)

    def _preferring(self, ask: Ask, targets: Sequence[Target], costs: Sequence[float]) -> Sequence[float]:
        """Half of the prompt's cost on top for a worker that lacks a preferred label: enough to lean, not to pile up."""
        extra = 0.5 * ask.prompt_tokens
        wanted = ask.preferred_labels.items()
        return [
            cost if wanted <= target.worker.labels.items() else cost + extra
            for cost, target in zip(costs, targets, strict=True)
        ]

    def _lowest(self, costs: Sequence[float], positions: Sequence[int]) -> int:
        lowest = _lowest_cost(costs, positions)
        ties = [i for i in positions if costs[i] == lowest]
        return ties[0] if len(ties) == 1 else self._random.choice(ties)

    def _reasons(self, ask: Ask, held: int) -> tuple[str, ...]:
        if ask.pinned_decode_worker_id or ask.pinned_prefill_worker_id:
            return ("pinned",)
        if self.policy.name != "kv":
            return (self.policy.name,)
        return ("kv_overlap",) if held else ("least_loaded",)

    def _held_tokens(self, ask: Ask) -> dict[int, int]:
        """Prompt tokens held per holder bit. The last token is always computed."""
        size, most = ask.block_size_tokens, ask.prompt_tokens - 1
        held: dict[int, int] = {}
        for found in (self._index.device.match(ask.block_hashes), self._index.predicted.match(ask.block_hashes)):
            for m in found:
                tokens = min(m.depth * size, most)
                held.update((bit, tokens) for bit in bits(m.holders) if tokens > held.get(bit, 0))
        return held

    def _narrowed(self, pool: Pool, ask: Ask) -> Pool:
        prefills = self._allowed(pool.prefills, ask.excluded_worker_ids, ask.pinned_prefill_worker_id)
        decodes = self._allowed(pool.decodes, ask.excluded_worker_ids, ask.pinned_decode_worker_id)
        if not decodes or (ask.pinned_prefill_worker_id and not prefills):
            raise UnavailableError(
                "no worker that the request allows takes requests",
                reason="no_worker",
                retry_after_s=self._limits.retry_after_s,
            )
        narrowed = Pool(prefills=prefills, decodes=decodes, pairings=pairings(prefills, decodes), removed=pool.removed)
        if ask.pinned_prefill_worker_id and not narrowed.pairings:
            raise UnavailableError("the pinned workers cannot exchange KV", reason="incompatible")
        return narrowed

    def _allowed(self, targets: Sequence[Target], excluded: Iterable[str], pinned: str) -> Sequence[Target]:
        if pinned and pinned not in self._fleet.workers:
            raise NotFoundError(f"no worker is named {pinned!r}", reason="worker_not_found")
        return [
            target
            for target in targets
            if target.worker.worker_id not in excluded and (not pinned or target.worker.worker_id == pinned)
        ]

    def _with_room(self, pool: Pool, ask: Ask) -> Pool:
        """Less the workers that are full. A prefill worker without work takes any prompt, however long."""
        most_requests, most_tokens = self._limits.requests_per_decode_max, self._limits.prompt_tokens_per_prefill_max
        room = most_tokens - ask.prompt_tokens
        decodes = [target for target in pool.decodes if target.requests_in_flight < most_requests]
        prefills = [t for t in pool.prefills if t.prompt_tokens_in_flight <= room or not t.prompt_tokens_in_flight]
        if len(decodes) == len(pool.decodes) and len(prefills) == len(pool.prefills):
            return pool
        pairs = pairings(prefills, decodes)
        if not decodes or (pool.pairings and not pairs):
            raise OverloadedError(
                f"all workers of model {ask.model!r} are full",
                reason="workers_full",
                retry_after_s=self._limits.retry_after_s,
            )
        return Pool(prefills=prefills, decodes=decodes, pairings=pairs, removed=pool.removed)


def cached_tokens(targets: Sequence[Target], held: dict[int, int], ask: Ask) -> Sequence[int]:
    """Prompt tokens that each target holds. Hashes of another block size name other blocks."""
    if not held:
        return [0] * len(targets)
    size, get = ask.block_size_tokens, held.get
    return [get(t.bits[t.rank], 0) if t.block_size_tokens == size else 0 for t in targets]


def _lowest_cost(costs: Sequence[float], positions: Sequence[int]) -> float:
    """The least cost at these positions. Mostly they are all of them."""
    return min(costs) if len(positions) == len(costs) else min(map(costs.__getitem__, positions))
