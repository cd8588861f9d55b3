"""Chooses the workers that serve a request. Pure; time and randomness are arguments.

1. Take the pool of the request's kind, without the workers that the request excludes. If the request pins a worker, take only that one.
2. Look up how many tokens of the prompt each candidate has cached.
3. If no pair can exchange KV, or a decode worker lacks at most `local_prefill_tokens_max` tokens, score the decode candidates for the
   whole request. Otherwise score both legs and take the cheapest pair (`pair_search.py`).
4. If no pair has room, a request for one token needs room only on its prefill worker, which answers it alone.
5. If the cheapest pair waits long for its prefill worker, if no pair has room, or if the prompt is within the planner's deflection bound,
   also score decode workers that compute the prompt themselves, in chunks that keep their inter-token latency.
6. Full workers have an infinite cost. So have decode workers alone if they require a prefill worker. If all are full, the request is
   refused as overloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from random import Random

import numpy as np
from numpy.typing import NDArray

from kvmesh.core import Ask, Handoff, KvTier
from kvmesh.core.planning import PlacementBounds
from kvmesh.errors import NotFoundError, OverloadedError, UnavailableError
from services.router.core_settings import RETRY_AFTER_S, CoreSettings
from services.router.health.paths import PATHS_OPEN
from services.router.index.cached_tokens import CachedTokens, CandidateTokens
from services.router.index.kv_index import KvIndex
from services.router.placement.bad_pairs import KV_PATH_FAILING
from services.router.placement.decision import PREFERENCE, PlacementDecision
from services.router.placement.pair_search import Pair, ScoredLeg, Selector, find_pair
from services.router.placement.policies import Candidates, LegKind, Policy
from services.router.placement.pools import Pool, Pools, PoolSide
from services.router.placement.sessions import Sessions
from services.router.workers.fleet import Fleet
from services.router.workers.handoff_times import NO_HANDOFF_TIMES, HandoffEstimator
from services.router.workers.reservations import PlacementForecast
from services.router.workers.slow_pairs import SlowPairs
from services.router.workers.target_arrays import Floats
from services.router.workers.worker import RegisteredWorker, Target

NO_PREFILL_WORKER = "no_prefill_worker"
"""Reason of a refusal: the decode workers require a prefill worker, and none takes requests."""
NO_WORKERS: frozenset[str] = frozenset()
NO_BOUNDS = PlacementBounds()
NO_KV_PATH = "no_kv_path"
"""Reason of a placement: the decode worker computes the prompt, since it cannot pull KV from any prefill worker."""

DEFLECTED = "deflected"
"""Reason of a placement: the decode worker lacks at most as many tokens of the prompt as the planner's bound allows."""
CHUNK_TOKENS = 512
"""Prompt tokens that a decode worker is assumed to compute in one step in addition to its batch. The step must keep the inter-token
latency target.

Engines compute long prompts in chunks of some hundred to some thousand tokens.
"""
ADAPTER_S = 0.05
"""Seconds of cost on top for a worker that has not run the adapter lately: about the time to load it."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Query:
    """An ask, its candidates, and what they have cached of the prompt."""

    ask: Ask
    now: float
    pool: Pool
    cached: CandidateTokens


class Placer:
    """Places requests on a fleet. Only the generator's state changes."""

    def __init__(
        self,
        fleet: Fleet,
        index: KvIndex,
        policy: Policy,
        *,
        settings: CoreSettings,
        generator: Random,
    ) -> None:
        self.policy = policy
        self._index = index
        self._fleet = fleet
        self._settings = settings
        cost = settings.cost
        tier_credits = {
            KvTier.PEER: cost.peer_credit,
            KvTier.HOST: cost.host_credit,
            KvTier.DISK: cost.disk_credit,
            KvTier.OBJECT: cost.object_credit,
        }
        self.cached_tokens = CachedTokens(index, tier_credits)
        self._pools = Pools(fleet)
        self._selector = Selector(cost, generator, estimates_time=policy.cost_unit == "s")
        self.handoffs = HandoffEstimator()
        self.slow_pairs = SlowPairs()
        self.sessions = Sessions(session_s=settings.session_s)
        self.bounds: dict[str, PlacementBounds] = {}
        """By model: what the planner wants. Prompts within the bound of deflection are compared with pairs, congested or not."""
        self.considered: Pool | None = None
        """The pool of the newest request's kind, before the request's own filters, for explanations."""

    def bounds_of(self, model: str) -> PlacementBounds:
        return self.bounds.get(model, NO_BOUNDS)

    def set_bounds(self, model: str, bounds: PlacementBounds) -> None:
        if bounds == NO_BOUNDS:
            self.bounds.pop(model, None)
        else:
            self.bounds[model] = bounds

    def removed(self, ask: Ask) -> Sequence[tuple[RegisteredWorker, str]]:
        """Returns the workers that a filter removed from the pool of the ask's kind, with the name of the filter."""
        return self._pools.removed(ask)

    def choose(self, ask: Ask, *, now: float, paused: frozenset[str] = NO_WORKERS) -> PlacementDecision:
        """`paused`: workers to which the path from the request's frontend is paused.

        Raises NotFoundError, UnsupportedError, UnavailableError or OverloadedError.
        """
        # The core reads it when this method raises: None means that no pool was considered.
        self.considered = None
        self.policy.check(ask)
        self.considered = self._pools.get(ask)
        if paused:
            self.considered = self.considered.without(paused)
            self._check_paths(ask)
        query = self._query(ask, self._filtered(self.considered, ask), now)
        pool = query.pool
        if not pool.groups:
            return self._alone(query, "no_prefill_pool" if pool.unpaired is None else NO_KV_PATH)
        may_be_alone = not ask.pinned_prefill_worker_id
        if may_be_alone and (decision := self._local_prefill(query)) is not None:
            return decision
        try:
            decision = self._pair(query)
        except OverloadedError:
            instead = self._answered_by_prefill(query) if ask.expected_output_tokens == 1 else None
            if instead is None and may_be_alone:
                instead = self._without_kv_path(query) or self._chunked_prefill(query)
            if instead is None:
                raise
            return instead
        # Only costs in seconds compare: for other policies a pair costs two draws or turns, and one worker alone costs one.
        if may_be_alone and self.policy.counts_transfer:
            reason = self._deflection_reason(query, decision)
            chunked = self._deflected(query, reason) if reason else None
            for alone in (self._without_kv_path(query), chunked):
                if alone is not None and alone.cost < decision.cost:
                    decision = alone
        return decision

    def _query(self, ask: Ask, pool: Pool, now: float) -> _Query:
        if self.slow_pairs:
            self.slow_pairs.advance(now)
        pool.set_slow(self.slow_pairs.factors, self.slow_pairs.version)
        return _Query(ask=ask, now=now, pool=pool, cached=self.cached_tokens.of(ask, pool))

    def _pair(self, query: _Query) -> PlacementDecision:
        handoff_times = self.handoffs.times if self.policy.counts_transfer else None
        prefill_leg = self._score(query, LegKind.PREFILL)
        decode_leg = self._score(query, LegKind.DECODE)
        pair = find_pair(
            self._selector,
            query.pool.groups,
            prefill_leg=prefill_leg,
            decode_leg=decode_leg,
            prompt_tokens=query.ask.prompt_tokens,
            handoff_times=handoff_times or NO_HANDOFF_TIMES,
        )
        if pair is None:
            raise self._full(query.ask)
        return self._pair_decision(query, pair, (prefill_leg, decode_leg), counts_transfer=handoff_times is not None)

    def _answered_by_prefill(self, query: _Query) -> PlacementDecision | None:
        """Returns the cheapest prefill worker, with any decode worker in case it does not answer. None: the prefill workers are full too."""
        prefill_leg = self._score(query, LegKind.PREFILL)
        decode_leg = self._score(query, LegKind.DECODE)
        # Full decode workers too: the chosen one is needed only if the prefill worker does not answer.
        decode_leg.costs = np.zeros_like(decode_leg.costs)
        pair = find_pair(
            self._selector,
            [group for group in query.pool.groups if group.handoff is Handoff.SEQUENTIAL],
            prefill_leg=prefill_leg,
            decode_leg=decode_leg,
            prompt_tokens=query.ask.prompt_tokens,
            handoff_times=NO_HANDOFF_TIMES,
        )
        if pair is None:
            return None
        return self._pair_decision(query, pair, (prefill_leg, decode_leg), counts_transfer=False)

    def _pair_decision(
        self, query: _Query, pair: Pair, legs: tuple[ScoredLeg, ScoredLeg], *, counts_transfer: bool
    ) -> PlacementDecision:
        ask, now = query.ask, query.now
        prefill, decode = query.pool.prefills.targets[pair.prefill], query.pool.decodes.targets[pair.decode]
        cached = int(query.cached.prefill.item(pair.prefill))
        uncached = ask.prompt_tokens - cached
        queue_s, wait_s = prefill.queue_s(now), decode.wait_s()
        prefill_s = prefill.coefficients.prefill_s(uncached, ask.prompt_tokens)
        expected_ttft_s = None
        if counts_transfer:
            step_s = decode.coefficients.decode.values[0]
            expected_ttft_s = queue_s + prefill_s + pair.transfer_s + wait_s + step_s
        return PlacementDecision(
            prefill=prefill,
            decode=decode,
            handoff=pair.group.handoff,
            cached_tokens=cached,
            decode_cached_tokens=int(query.cached.decode.item(pair.decode)),
            uncached_tokens=uncached,
            cost=pair.cost,
            expected_ttft_s=expected_ttft_s,
            prefill_s=prefill_s,
            forecast=PlacementForecast(
                prompt_tokens=ask.prompt_tokens,
                queue_s=queue_s,
                wait_s=wait_s,
                distance=pair.distance,
                transfer_bytes=pair.transfer_bytes if counts_transfer else 0.0,
            ),
            reasons=self._reasons(query, cached, prefill, decode=decode),
            legs=legs,
            pool=query.pool,
            handoff_times=self.handoffs.times if counts_transfer else None,
            bad_pairs=query.pool.bad_pairs,
        )

    def _alone(self, query: _Query, reason: str, left_out: NDArray[np.bool_] | None = None) -> PlacementDecision:
        """Returns the decode worker that computes the prompt at the lowest cost. `left_out` marks candidates that must not."""
        ask, now = query.ask, query.now
        requires_prefill = query.pool.decodes.requires_prefill
        if requires_prefill is not None and requires_prefill.all():
            raise UnavailableError(
                f"no prefill worker of model {ask.model!r} accepts requests, and its decode workers cannot compute prompts",
                reason=NO_PREFILL_WORKER,
                retry_after_s=RETRY_AFTER_S,
            )
        leg = self._score(query, LegKind.ALONE)
        if requires_prefill is not None:
            leg.costs = np.where(requires_prefill, np.inf, leg.costs)
        if left_out is not None:
            leg.costs = np.where(left_out, np.inf, leg.costs)
        targets = query.pool.decodes.targets
        chosen = self._selector.choose(leg.costs, query.cached.decode, targets)
        if chosen is None:
            raise self._full(ask)
        target = targets[chosen]
        cached = int(query.cached.decode.item(chosen))
        uncached = ask.prompt_tokens - cached
        queue_s, wait_s = target.queue_s(now), target.wait_s()
        prefill_s = target.coefficients.prefill_s(uncached, ask.prompt_tokens)
        return PlacementDecision(
            prefill=None,
            decode=target,
            handoff=None,
            cached_tokens=cached,
            decode_cached_tokens=0,
            uncached_tokens=uncached,
            cost=leg.costs.item(chosen),
            expected_ttft_s=queue_s + prefill_s + wait_s if self.policy.cost_unit == "s" else None,
            prefill_s=prefill_s,
            forecast=PlacementForecast(
                prompt_tokens=ask.prompt_tokens, queue_s=queue_s, wait_s=wait_s, distance=None, transfer_bytes=0.0
            ),
            reasons=(reason, *self._reasons(query, cached, None, decode=target)),
            legs=(leg,),
            pool=query.pool,
            handoff_times=None,
            bad_pairs=(),
        )

    def _local_prefill(self, query: _Query) -> PlacementDecision | None:
        """Returns a decode worker that lacks too few tokens for a handoff to pay. None: there is none, or those are full."""
        tokens_max, prompt_tokens = self._settings.local_prefill_tokens_max, query.ask.prompt_tokens
        if prompt_tokens - query.cached.decode_max > tokens_max:
            return None
        try:
            reason = "short_prompt" if prompt_tokens <= tokens_max else "local_prefill"
            return self._alone(query, reason, prompt_tokens - query.cached.decode > tokens_max)
        except (OverloadedError, UnavailableError):
            return None

    def _deflection_reason(self, query: _Query, pair: PlacementDecision) -> str:
        """Returns why a decode worker may compute the prompt instead of the pair. Empty: it may not."""
        bound = self.bounds_of(query.ask.model).deflect_tokens
        if bound and query.ask.prompt_tokens - query.cached.decode_max <= bound:
            return DEFLECTED
        return "prefill_congested" if pair.forecast.queue_s >= self._settings.prefill_congested_s else ""

    def _deflected(self, query: _Query, reason: str) -> PlacementDecision | None:
        """Returns the decode worker that computes the prompt at the lowest cost. None: there is none.

        The planner's bound keeps the mean inter-token latency, so that single steps may take longer. Without it each step must keep it.
        """
        if reason != DEFLECTED:
            return self._chunked_prefill(query, reason)
        try:
            return self._alone(query, reason)
        except (OverloadedError, UnavailableError):
            return None

    def _chunked_prefill(self, query: _Query, reason: str = "prefill_congested") -> PlacementDecision | None:
        """Returns a decode worker whose steps keep its inter-token latency with a chunk of the prompt in each. None: there is none."""
        arrays, columns = self._fleet.arrays, query.pool.decodes.columns
        s_per_token, step_room_s = arrays.prefill.s_per_token.take(columns), arrays.decode.step_room_s.take(columns)
        chunk_tokens = np.minimum(query.ask.prompt_tokens - query.cached.decode, CHUNK_TOKENS)
        try:
            return self._alone(query, reason, s_per_token * chunk_tokens > step_room_s)
        except (OverloadedError, UnavailableError):
            return None

    def _without_kv_path(self, query: _Query) -> PlacementDecision | None:
        """Returns a decode worker that cannot pull KV from any prefill worker. None: there is none, or those are full."""
        if query.pool.unpaired is None:
            return None
        try:
            return self._alone(query, NO_KV_PATH, ~query.pool.unpaired)
        except (OverloadedError, UnavailableError):
            return None

    def _score(self, query: _Query, kind: LegKind) -> ScoredLeg:
        """Returns the cost of every candidate for a leg: the policy's terms and the request's preferences; infinite for full ones."""
        is_prefill = kind is LegKind.PREFILL
        side = query.pool.prefills if is_prefill else query.pool.decodes
        candidates = Candidates(
            kind=kind,
            ask=query.ask,
            now=query.now,
            targets=side.targets,
            cached_tokens=query.cached.prefill if is_prefill else query.cached.decode,
            arrays=self._fleet.arrays,
            columns=side.columns,
        )
        terms = self.policy.terms(candidates)
        if (preference := self._preference(kind, query, side)) is not None:
            terms = {**terms, PREFERENCE: preference}
        costs = reduce(np.add, terms.values())
        if not self.policy.counts_transfer:
            costs = _without_full(costs, candidates)
        return ScoredLeg(candidates=candidates, terms=terms, costs=costs)

    def _preference(self, kind: LegKind, query: _Query, side: PoolSide) -> Floats | None:
        """Cost on top for a missing preferred label, an adapter that did not run lately, and for another target than the session's."""
        ask = query.ask
        if not (ask.preferred_labels or ask.session_id or ask.adapter):
            return None
        preference = np.zeros(len(side.targets))
        if ask.preferred_labels:
            preference += self.policy.preference * side.lacking_labels(ask.preferred_labels)
        if ask.adapter and self.policy.counts_transfer:
            preference += ADAPTER_S * side.lacking_adapter(ask.adapter)
        if (pair := self.sessions.get(ask.session_id, query.now)) is not None:
            position = side.position_of(pair[0] if kind is LegKind.PREFILL else pair[1])
            if position is not None:
                # All others cost more, instead of this one less: ties are a ratio of the cost, which must not be negative.
                preference += self.policy.preference
                preference[position] -= self.policy.preference
        return preference

    def _reasons(self, query: _Query, cached: int, prefill: Target | None, *, decode: Target) -> tuple[str, ...]:
        ask = query.ask
        if ask.pinned_decode_worker_id or ask.pinned_prefill_worker_id:
            return ("pinned",)
        if self.policy.name != "kv":
            return (self.policy.name,)
        reason = "kv_overlap" if cached else "least_loaded"
        pair = self.sessions.get(ask.session_id, query.now)
        follows = pair is not None and (decode is pair[1] or (prefill is not None and prefill is pair[0]))
        return (reason, "session") if follows else (reason,)

    def _full(self, ask: Ask) -> OverloadedError:
        return OverloadedError(
            f"all workers of model {ask.model!r} are full",
            reason="workers_full",
            retry_after_s=RETRY_AFTER_S,
        )

    def _check_paths(self, ask: Ask) -> None:
        if self.considered is None or self.considered.decodes.targets:
            return
        raise UnavailableError(
            f"the frontend has lost its connections to all available decode workers of model {ask.model!r}",
            reason=PATHS_OPEN,
            retry_after_s=RETRY_AFTER_S,
        )

    def _filtered(self, pool: Pool, ask: Ask) -> Pool:
        if not (ask.excluded_worker_ids or ask.pinned_prefill_worker_id or ask.pinned_decode_worker_id):
            return pool
        prefills = self._allowed(pool.prefills, ask, "pinned_prefill_worker_id")
        decodes = self._allowed(pool.decodes, ask, "pinned_decode_worker_id")
        if not decodes or (ask.pinned_prefill_worker_id and not prefills):
            raise UnavailableError(
                "no worker that the request allows accepts requests",
                reason="no_worker",
                retry_after_s=RETRY_AFTER_S,
            )
        filtered = Pool(prefills, decodes, removed=pool.removed)
        if ask.pinned_prefill_worker_id and not filtered.groups:
            reason = "incompatible" if filtered.unpaired is None else KV_PATH_FAILING
            raise UnavailableError("the pinned workers cannot exchange KV", reason=reason)
        return filtered

    def _allowed(self, side: PoolSide, ask: Ask, field: str) -> Sequence[Target]:
        excluded, (pinned, rank) = ask.excluded_worker_ids, self._pinned(getattr(ask, field), field=field)
        return [
            target
            for target in side.targets
            if target.worker.worker_id not in excluded
            and (not pinned or target.worker.worker_id == pinned)
            and rank in (None, target.rank)
        ]

    def _pinned(self, pin: str, field: str) -> tuple[str, int | None]:
        """Returns the worker that a pin names, and the rank in `ID/RANK`; None: any."""
        # The id of a worker may contain a slash, so a pin that is the id of a worker names no rank.
        worker_id, mark, rank = pin.rpartition("/")
        if not mark or not rank.isdecimal() or pin in self._fleet.workers:
            worker_id, rank = pin, ""
        worker = self._fleet.workers.get(worker_id)
        if pin and (worker is None or (rank and int(rank) >= len(worker.targets))):
            raise NotFoundError(f"no worker is named {pin!r}", reason="worker_not_found", field=field)
        return worker_id, int(rank) if rank else None


def _without_full(costs: Floats, candidates: Candidates) -> Floats:
    """Returns the costs of a policy that does not read the numbers that are infinite for full targets."""
    arrays, columns = candidates.arrays, candidates.columns
    if candidates.kind is not LegKind.DECODE:
        costs = np.where(np.isinf(arrays.prefill.queue_s_min.take(columns)), np.inf, costs)
    if candidates.kind is not LegKind.PREFILL:
        costs = np.where(np.isinf(arrays.decode.wait_s.take(columns)), np.inf, costs)
    return costs
