"""The decision: which pair of workers serves a request. Pure; time and randomness are arguments.

1. Take the pool of the request's kind, less the workers it excludes, and those not pinned when one is.
2. Look up how much of the prompt each candidate holds.
3. Weigh the decode candidates alone where nobody can hand KV to anybody, or where computing at most `local_prefill_tokens_max`
   tokens there is all there is to do; else weigh both legs and take the cheapest pair (`pairing.py`).
4. Where no pair has room, a request for one token needs room on its prefill worker only, which answers it itself.
5. When the cheapest pair waits long for its prefill worker, a decode worker that computes the prompt itself, in chunks that
   keep its inter-token latency, may be cheaper.
6. Full workers cost infinitely much; when all do, the ask is refused as overloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvmesh.core import Ask, Handoff
from kvmesh.errors import NotFoundError, OverloadedError, UnavailableError
from services.router.index.cached_tokens import Overlap
from services.router.index.kv_feed import KvIndex
from services.router.placement.decision import Choice
from services.router.placement.learning import Forecast
from services.router.placement.links import Links
from services.router.placement.pairing import Lines, Pair, Selector, best_pair
from services.router.placement.policies import Candidates, LegKind, Policy
from services.router.placement.policies.kv import KvPolicy
from services.router.placement.pools import Kind, Pool, Pools, Side
from services.router.placement.sessions import Sessions
from services.router.placement.sheet import Swept
from services.router.placement.weighed import WeighedLeg
from services.router.workers.board import CHUNK, FLOOR, PER_TOKEN, WAIT, Floats
from services.router.workers.cost_settings import CostSettings
from services.router.workers.fleet import Fleet, Worker
from services.router.workers.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a decode worker computes the prompt itself, what callers are told to wait, and how long sessions are known."""

    local_prefill_tokens_max: int = 15
    congested_s: float = 0.5
    retry_after_s: float = 1.0
    sessions_max: int = 65_536
    session_s: float = 600.0


class Placer:
    """Places requests on a fleet. Changes nothing but the generator's state."""

    def __init__(
        self,
        fleet: Fleet,
        index: KvIndex,
        policy: Policy,
        limits: Limits,
        generator: Random,
        cost: CostSettings | None = None,
    ) -> None:
        self.policy = policy
        self._index = index
        self._fleet = fleet
        self._limits = limits
        self._cost = cost or CostSettings()
        self._pools = Pools(fleet, retry_after_s=limits.retry_after_s)
        self._overlap = Overlap(index, self._cost)
        self._selector = Selector(self._cost, generator, estimates=policy.cost_unit == "s")
        self._sweeping = policy if type(policy) is KvPolicy else None
        """The policy whose costs sheets know; a subclass may have changed them."""
        self.links = Links(self._cost)
        self.considered: Pool | None = None
        """The pool of the kind asked for last, before the request's own filters: for explanations."""
        self.sessions = Sessions(sessions_max=limits.sessions_max, session_s=limits.session_s)

    def removed(self, ask: Ask) -> Sequence[tuple[Worker, str]]:
        """Who was taken off when a request of this kind was refused last, and by which filter."""
        return self._pools.removed(Kind.of(ask))

    def choose(self, ask: Ask, *, now: float) -> Choice:
        """The choice. Raises NotFoundError, UnsupportedError, UnavailableError or OverloadedError."""
        self.considered = None
        self.policy.check(ask)
        self.considered = pool = self._pools.pool_of(ask)
        if ask.excluded_worker_ids or ask.pinned_prefill_worker_id or ask.pinned_decode_worker_id:
            pool = self._narrowed(pool, ask)
        held, decode_most = None, 0.0
        if (found := self._overlap.held_tokens(ask)) is not None:
            found = pool.held(found, self._index.device.holders_version)
            held, decode_most = found.tokens, found.decode_most
        if not pool.groups:
            return self._alone(ask, pool, held, now, "no_prefill_pool")
        may_be_alone = not ask.pinned_prefill_worker_id
        if may_be_alone and ask.prompt_tokens - decode_most <= self._limits.local_prefill_tokens_max:
            choice = self._near_alone(ask, pool, held, now)
            if choice is not None:
                return choice
        try:
            choice = self._pair(ask, pool, held, now)
        except OverloadedError:
            instead = self._answered(ask, pool, held, now) if ask.expected_output_tokens == 1 else None
            if instead is None and may_be_alone:
                instead = self._chunked_alone(ask, pool, held, now)
            if instead is None:
                raise
            return instead
        # Only costs in seconds compare: another policy's pair costs two draws or turns where one worker alone costs one.
        if may_be_alone and self.policy.counts_transfer and choice.forecast.queue_s >= self._limits.congested_s:
            alone = self._chunked_alone(ask, pool, held, now)
            if alone is not None and alone.cost < choice.cost:
                return alone
        return choice

    def _pair(self, ask: Ask, pool: Pool, held: Floats | None, now: float) -> Choice:
        policy, sheet = self.policy, pool.sheet
        lines = self.links.lines if policy.counts_transfer else None
        pair: Pair | Swept | None
        if self._sweeping is None or sheet is None or lines is None or self._is_special(ask):
            left_held, right_held = (None, None) if held is None else (held[: pool.split], held[pool.split :])
            left = self._weigh(LegKind.PREFILL, ask, pool.prefills, left_held, now)
            right = self._weigh(LegKind.DECODE, ask, pool.decodes, right_held, now)
            pair = best_pair(self._selector, pool.groups, left, right, ask.prompt_tokens, lines)
            if pair is None:
                raise self._full(ask)
            weighed: Callable[[], Sequence[WeighedLeg]] = lambda: (left, right)  # noqa: E731
        else:
            known = self.sessions.get(ask.session_id, now) if ask.session_id else None
            pair = sheet.best(ask, now, held, lines, self._sweeping, self._selector, known)
            if pair is None:
                raise self._full(ask)
            weighed = pair.legs
        return self._paired(ask, pool, held, now, pair, weighed, lines)

    def _answered(self, ask: Ask, pool: Pool, held: Floats | None, now: float) -> Choice | None:
        """The cheapest prefill worker, with any decode worker beside it in case it should not answer. None: those are full too."""
        left = self._weigh(LegKind.PREFILL, ask, pool.prefills, None if held is None else held[: pool.split], now)
        right = self._weigh(LegKind.DECODE, ask, pool.decodes, None if held is None else held[pool.split :], now)
        right.costs = np.zeros_like(right.costs)
        groups = [group for group in pool.groups if group.handoff is Handoff.SEQUENTIAL]
        pair = best_pair(self._selector, groups, left, right, ask.prompt_tokens, None)
        return None if pair is None else self._paired(ask, pool, held, now, pair, lambda: (left, right), None)

    def _paired(
        self,
        ask: Ask,
        pool: Pool,
        held: Floats | None,
        now: float,
        pair: Pair | Swept,
        weighed: Callable[[], Sequence[WeighedLeg]],
        lines: Lines | None,
    ) -> Choice:
        prefill, decode = pool.prefills.targets[pair.prefill], pool.decodes.targets[pair.decode]
        cached = decode_cached = 0
        if held is not None:
            cached, decode_cached = int(held.item(pair.prefill)), int(held.item(pool.split + pair.decode))
        uncached = ask.prompt_tokens - cached
        queue_s, wait_s = prefill.queue_s(now), decode.wait_s()
        prefill_s = prefill.coefficients.prefill_s(uncached, ask.prompt_tokens)
        expected_ttft_s = None
        if lines is not None:
            expected_ttft_s = queue_s + prefill_s + pair.transfer_s + wait_s + decode.coefficients.decode.values[0]
        return Choice(
            prefill,
            decode,
            pair.group.handoff,
            cached,
            decode_cached,
            uncached,
            pair.cost,
            expected_ttft_s,
            prefill_s,
            Forecast(ask.prompt_tokens, queue_s, wait_s, pair.distance, pair.transfer_bytes),
            self._reasons(ask, cached, prefill, decode, now),
            weighed,
            pool,
            lines,
        )

    def _alone(
        self,
        ask: Ask,
        pool: Pool,
        held: Floats | None,
        now: float,
        reason: str,
        without: Sequence[bool] | np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None,
    ) -> Choice:
        """The decode candidate that computes the prompt itself at the lowest cost, `without` those marked."""
        held = None if held is None else held[pool.split :]
        leg = self._weigh(LegKind.ALONE, ask, pool.decodes, held, now)
        if without is not None:
            leg.costs = np.where(without, np.inf, leg.costs)
        chosen = self._selector.lowest(leg.costs, held, pool.decodes.targets)
        if chosen is None:
            raise self._full(ask)
        target = pool.decodes.targets[chosen]
        cached = 0 if held is None else int(held[chosen])
        uncached = ask.prompt_tokens - cached
        queue_s, wait_s = target.queue_s(now), target.wait_s()
        prefill_s = target.coefficients.prefill_s(uncached, ask.prompt_tokens)
        expected_ttft_s = queue_s + prefill_s + wait_s if self.policy.cost_unit == "s" else None
        return Choice(
            None,
            target,
            None,
            cached,
            0,
            uncached,
            float(leg.costs[chosen]),
            expected_ttft_s,
            prefill_s,
            Forecast(ask.prompt_tokens, queue_s, wait_s, None, 0.0),
            (reason, *self._reasons(ask, cached, None, target, now)),
            lambda: (leg,),
            pool,
            None,
        )

    def _is_special(self, ask: Ask) -> bool:
        """Whether something counts that sheets know nothing of."""
        return bool(ask.preferred_labels or ask.adapter or self._fleet.board.has_pairs)

    def _near_alone(self, ask: Ask, pool: Pool, held: Floats | None, now: float) -> Choice | None:
        """On a decode worker that lacks so little that no other is worth asking. None: those that do are full."""
        lacking, most = None, self._limits.local_prefill_tokens_max
        reason = "short_prompt" if ask.prompt_tokens <= most else "local_prefill"
        if held is not None:
            lacking = ask.prompt_tokens - held[pool.split :] > most
        try:
            return self._alone(ask, pool, held, now, reason, lacking)
        except OverloadedError:
            return None

    def _chunked_alone(self, ask: Ask, pool: Pool, held: Floats | None, now: float) -> Choice | None:
        """On a decode worker whose steps stay within its target with a chunk of the prompt in each. None: there is none."""
        rows = self._fleet.board.values.take(pool.decodes.columns, 1)
        uncached = ask.prompt_tokens if held is None else ask.prompt_tokens - held[pool.split :]
        too_slow = rows[PER_TOKEN] * np.minimum(uncached, self._cost.chunk_tokens) > rows[CHUNK]
        try:
            return self._alone(ask, pool, held, now, "prefill_congested", too_slow)
        except OverloadedError:
            return None

    def _weigh(self, kind: LegKind, ask: Ask, side: Side, held: Floats | None, now: float) -> WeighedLeg:
        board = self._fleet.board
        rows = board.values.take(side.columns, 1)
        candidates = Candidates(kind, ask, now, side.targets, held, rows, board.has_pairs)
        costs = self.policy.costs(candidates)
        if not self.policy.counts_transfer:
            costs = _without_full(candidates, costs)
        if ask.preferred_labels or ask.session_id or ask.adapter:
            costs = self._preferring(kind, ask, side, costs, now)
        return WeighedLeg(candidates, costs, self.policy)

    def _preferring(self, kind: LegKind, ask: Ask, side: Side, costs: Floats, now: float) -> Floats:
        """Something on top for those that lack a preferred label, have not run the adapter lately, or are not the session's."""
        if ask.preferred_labels:
            costs = costs + self.policy.preference * side.lacking(ask.preferred_labels)
        if ask.adapter and self.policy.counts_transfer:
            costs = costs + self._cost.adapter_s * side.not_warm(ask.adapter)
        known = self.sessions.get(ask.session_id, now) if ask.session_id else None
        if known is not None:
            target = known[0] if kind is LegKind.PREFILL else known[1]
            place = side.place_of(target) if target is not None else None
            if place is not None:
                costs = costs + self.policy.preference
                costs[place] -= self.policy.preference
        return costs

    def _reasons(self, ask: Ask, held: int, prefill: Target | None, decode: Target, now: float) -> tuple[str, ...]:
        if ask.pinned_decode_worker_id or ask.pinned_prefill_worker_id:
            return ("pinned",)
        if self.policy.name != "kv":
            return (self.policy.name,)
        reason = "kv_overlap" if held else "least_loaded"
        known = self.sessions.get(ask.session_id, now) if ask.session_id else None
        follows = known is not None and (decode is known[1] or (prefill is not None and prefill is known[0]))
        return (reason, "session") if follows else (reason,)

    def _full(self, ask: Ask) -> OverloadedError:
        return OverloadedError(
            f"all workers of model {ask.model!r} are full",
            reason="workers_full",
            retry_after_s=self._limits.retry_after_s,
        )

    def _narrowed(self, pool: Pool, ask: Ask) -> Pool:
        prefills = self._allowed(pool.prefills, ask, "pinned_prefill_worker_id")
        decodes = self._allowed(pool.decodes, ask, "pinned_decode_worker_id")
        if not decodes or (ask.pinned_prefill_worker_id and not prefills):
            raise UnavailableError(
                "no worker that the request allows takes requests",
                reason="no_worker",
                retry_after_s=self._limits.retry_after_s,
            )
        narrowed = Pool(prefills, decodes, pool.removed, self._fleet.board)
        if ask.pinned_prefill_worker_id and not narrowed.groups:
            raise UnavailableError("the pinned workers cannot exchange KV", reason="incompatible")
        return narrowed

    def _allowed(self, side: Side, ask: Ask, field: str) -> Sequence[Target]:
        excluded, pinned = ask.excluded_worker_ids, getattr(ask, field)
        if pinned and pinned not in self._fleet.workers:
            raise NotFoundError(f"no worker is named {pinned!r}", reason="worker_not_found", field=field)
        return [
            target
            for target in side.targets
            if target.worker.worker_id not in excluded and (not pinned or target.worker.worker_id == pinned)
        ]


def _without_full(candidates: Candidates, costs: Floats) -> Floats:
    """For policies that do not look at the rows, of which those of full targets are infinite."""
    rows = {LegKind.PREFILL: [FLOOR], LegKind.DECODE: [WAIT], LegKind.ALONE: [FLOOR, WAIT]}[candidates.kind]
    full = np.isinf(candidates.rows[rows]).any(0)
    return np.where(full, np.inf, costs) if full.any() else costs
