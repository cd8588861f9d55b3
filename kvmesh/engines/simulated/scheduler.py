"""The simulated engine's decisions: which legs run in a step, on which blocks, and what comes out. No asyncio, no clock.

Order within a step, as in vLLM: decoding legs first (one token of the budget each), then prompts already begun, then waiting
legs by priority and arrival. A prompt takes all its blocks when it is admitted and may be computed in several steps. When a
decoding leg needs a block and none is left, the lowest-ranking leg is preempted: it gives up its blocks and waits again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvmesh.core import FinishReason, KvHandle, ModelCard, TokenLogprob, Usage
from kvmesh.engines.base import EngineFinish, EngineRequest, Leg, StepOutput
from kvmesh.engines.simulated.batch import DecodeBatch
from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.card import TokenRange
from kvmesh.engines.simulated.handles import FORMAT, HandlePayload, array_of, pack
from kvmesh.engines.simulated.intake import check_request, make_leg, read_handle
from kvmesh.engines.simulated.leases import Leases
from kvmesh.engines.simulated.leg import LegState, Phase
from kvmesh.engines.simulated.memory import KvMemory
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.tokens import made_up_logprob
from kvmesh.engines.simulated.waiting import WaitingQueue
from kvmesh.engines.simulated.writing import compute_prompt, names_of, seal_blocks
from kvmesh.errors import InvalidRequestError, KvLostError, MeshError, OverloadedError

SUM_MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """Blocks to be read from a peer into `leg.blocks[first:]`; answered with `pull_ended`."""

    leg: LegState
    payload: HandlePayload
    handle_id: str
    first: int


@dataclass(slots=True)
class Step:
    """What one step did. `releases` are handles of peers that nobody will pull any more."""

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] | None = None
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finishes: list[EngineFinish] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_requests: int = 0

    @property
    def has_output(self) -> bool:
        """True when somebody must hear of it."""
        return bool(self.keys or self.finishes)

    @property
    def has_progress(self) -> bool:
        """False: another step would do the same, until something changes from outside."""
        return bool(self.keys or self.finishes or self.prefill_tokens or self.pulls)

    def output(self, number: int) -> StepOutput:
        """As the engine yields it."""
        return StepOutput(
            step=number,
            keys=self.keys,
            token_ids=self.token_ids,
            counts=self.counts,
            logprobs=self.logprobs,
            finishes=self.finishes,
        )


def _rank(leg: LegState) -> tuple[int, int]:
    return leg.rank


class Scheduler:
    """All legs of one engine.

    Invariants: 1. a key is known exactly from `submit` until its finish is in a Step; 2. blocks are held by legs in phases
    PULLING, PREFILL and DECODE only, and by leases; 3. a cancelled pull keeps its blocks until `pull_ended`.
    """

    def __init__(
        self,
        settings: SimulatedSettings,
        card: ModelCard,
        token_range: TokenRange,
        *,
        incarnation: str,
        compatibility_hash: str,
        has_transport: bool,
        first_stamp: int = 0,
    ) -> None:
        self.settings = settings
        self.card = card
        self.adapters: frozenset[str] = frozenset(settings.adapters)
        self.peer: bytes | None = None
        """This engine's transport metadata; prompts to hand out wait until it is known."""
        self.incarnation = incarnation
        self.compatibility_hash = compatibility_hash
        self.has_transport = has_transport
        self.memory = KvMemory(settings.kv_blocks, settings.kv_bytes_per_block, first_stamp)
        self.pool = BlockPool(settings.kv_blocks)
        self.leases = Leases(self.pool)
        self.releases: list[tuple[bytes, str]] = []
        self.aborted_pulls: list[LegState] = []
        self.prompt_tokens_total = self.output_tokens_total = 0
        self.cached_tokens_total = self.transferred_tokens_total = self.preempted_total = 0
        self._range = token_range
        self._legs: dict[int, LegState] = {}
        self._waiting = WaitingQueue()
        self._pulling: set[LegState] = set()
        self._prefilling: list[LegState] = []
        self._batch = DecodeBatch(settings.running_requests_max, settings.block_size_tokens + 1, token_range)
        self._grow_at: dict[int, list[LegState]] = {}
        self._end_at: dict[int, dict[LegState, None]] = {}
        self._watched: dict[LegState, None] = {}
        self._finishes: list[EngineFinish] = []
        self._orders = 0
        self._has_preempted = False

    # Intake

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accepts a leg or raises and leaves no trace."""
        if request.key in self._legs:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        check_request(request, self.card, self.adapters, has_transport=self.has_transport)
        payload = read_handle(
            request, self.compatibility_hash, self.settings.block_size_tokens, has_transport=self.has_transport
        )
        if len(self._waiting) >= self.settings.waiting_requests_max:
            raise OverloadedError(
                f"{len(self._waiting)} requests wait already",
                reason="queue_full",
                retry_after_s=self.settings.overload_retry_s,
            )
        leg = make_leg(request, self._orders, self.settings, self.card, self._range)
        self._orders += 1
        if payload is not None and request.handle is not None:
            leg.payload, leg.payload_expires_at_s = payload, now_s + request.handle.lease_s
        self._legs[request.key] = leg
        self._waiting.push(leg)

    def cancel(self, key: int) -> None:
        """Ends a leg now: its blocks are free (those of a running pull once it has stopped); the finish is in the next step."""
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """Ends all legs."""
        for key in list(self._legs):
            self.cancel(key)

    def _end(
        self,
        leg: LegState,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        handle: KvHandle | None = None,
        error: MeshError | None = None,
    ) -> None:
        usage = leg.usage(self._batch.unflushed(leg))
        self._leave(leg)
        del self._legs[leg.key]
        self._finishes.append(
            EngineFinish(
                key=leg.key,
                reason=reason,
                usage=usage,
                stop_token_id=stop_token_id,
                error=error,
                handle=handle,
                was_recomputed=leg.was_recomputed,
            )
        )

    def _leave(self, leg: LegState) -> None:
        """Takes a leg out of whatever phase it is in and drops its blocks."""
        phase, leg.phase = leg.phase, Phase.DONE
        leg.grow_step = -1
        self._give_up_handle(leg)
        if phase is Phase.WAITING:
            self._waiting.discount(leg)
        elif phase is Phase.PULLING:
            self.aborted_pulls.append(leg)
            return
        elif phase is Phase.PREFILL:
            self._prefilling.remove(leg)
        elif phase is Phase.DECODE:
            if (len(leg.tokens) + self._batch.unflushed(leg) - 1) % self.settings.block_size_tokens == 0:
                self._seal([leg])
            self._batch.remove(leg)
            self._watched.pop(leg, None)
            self._end_at.get(leg.end_step, {}).pop(leg, None)
        self.pool.drop(leg.blocks)
        leg.blocks = []

    def _give_up_handle(self, leg: LegState) -> None:
        """Tells the source, at the next chance, that nobody will pull."""
        if leg.payload is not None and leg.request.handle is not None:
            self.releases.append((leg.payload.peer, leg.request.handle.handle_id))
        leg.payload = None

    # Steps

    @property
    def has_work(self) -> bool:
        """True when a step could do something."""
        return bool(len(self._batch) or self._prefilling or self._finishes or len(self._waiting))

    @property
    def leg_count(self) -> int:
        """Legs whose finish is still to come."""
        return len(self._legs)

    def step(self, now_s: float) -> Step:
        """Runs one step."""
        self.leases.expire(now_s)
        step = Step(decode_requests=len(self._batch))
        if step.decode_requests:
            self._decode(step)
        budget = self.settings.step_tokens_max - step.decode_requests
        for leg in list(self._prefilling):
            budget -= self._prefill(leg, budget, step, now_s)
        while budget > 0 and not self._has_preempted and (admitted := self._admit(step, now_s)) is not None:
            budget -= self._prefill(admitted, budget, step, now_s)
        self._has_preempted = False
        self.output_tokens_total += len(step.token_ids)
        step.finishes, self._finishes = self._finishes, []
        return step

    def _decode(self, step: Step) -> None:
        per_step = self.settings.decode_tokens_per_step
        if per_step == 1:
            step.keys, step.token_ids = self._decode_once(step)
            return
        gained: dict[int, list[int]] = {}
        for _ in range(per_step):
            for key, token_id in zip(*self._decode_once(step), strict=True):
                gained.setdefault(key, []).append(token_id)
        step.keys = list(gained)
        step.counts = [len(tokens) for tokens in gained.values()]
        step.token_ids = [token_id for tokens in gained.values() for token_id in tokens]

    def _decode_once(self, step: Step) -> tuple[list[int], list[int]]:
        batch = self._batch
        growing = self._grow_at.pop(batch.steps, None)
        if growing:
            self._grow([leg for leg in growing if leg.grow_step == batch.steps])
        keys = batch.keys.copy()
        token_ids = batch.step()
        ending = self._end_at.pop(batch.steps, None)
        if ending or self._watched:
            self._check_ends(ending or (), token_ids, step)
        return keys, token_ids

    def _check_ends(self, ending: Iterable[LegState], token_ids: list[int], step: Step) -> None:
        ends: dict[LegState, int | None] = {}
        for leg in ending:
            ends[leg] = None
            if leg.eos_at == self._generated(leg):
                ends[leg] = token_ids[leg.slot] = self.card.eos_token_ids[0]
        for leg in self._watched:
            token_id = token_ids[leg.slot]
            self._add_logprob(leg, token_id, step)
            if self._stops(leg, token_id, self._generated(leg)):
                ends[leg] = token_id
        for leg, stop_id in ends.items():
            self._finish(leg, stop_id)

    def _finish(self, leg: LegState, stop_id: int | None) -> None:
        reason = FinishReason.LENGTH if stop_id is None else FinishReason.STOP
        self._end(leg, reason, stop_token_id=stop_id)

    def _generated(self, leg: LegState) -> int:
        return len(leg.tokens) - leg.start_tokens + self._batch.unflushed(leg)

    def _last_token(self, leg: LegState) -> int:
        return min(leg.eos_at, leg.tokens_max) if leg.eos_at else leg.tokens_max

    def _stops(self, leg: LegState, token_id: int, generated: int) -> bool:
        emitted = len(leg.request.generation.emitted_token_ids)
        return token_id in leg.stop_ids and generated + emitted > (leg.request.generation.sampling.min_tokens or 0)

    def _add_logprob(self, leg: LegState, token_id: int, step: Step) -> None:
        asked = leg.request.generation.sampling.logprobs
        if asked is not None:
            logprob = made_up_logprob(token_id, asked, self.card.vocabulary_size)
            step.logprobs.setdefault(leg.key, []).append(logprob)

    # Blocks of decoding legs

    def _grow(self, legs: list[LegState]) -> None:
        """The legs' next tokens need a new block each; the ones before are complete and get their names."""
        self._seal(legs)
        for leg in legs:
            while leg.phase is Phase.DECODE and not self.pool.available:
                self._preempt(max([*self._batch.legs, *self._prefilling], key=_rank))
            if leg.phase is Phase.DECODE:
                leg.blocks.append(self.pool.allocate_one())
                self._plan_growth(leg)

    def _seal(self, legs: list[LegState]) -> None:
        self._batch.flush(legs)
        seal_blocks(legs, self._batch.totals(legs), self.memory, self.pool, self.settings.block_size_tokens)

    def _plan_growth(self, leg: LegState) -> None:
        """When the leg's blocks are full: after as many steps as its newest token is short of the end of its blocks."""
        room = len(leg.blocks) * self.settings.block_size_tokens - (len(leg.tokens) - 1)
        leg.grow_step = self._batch.steps + room
        self._grow_at.setdefault(leg.grow_step, []).append(leg)

    def _preempt(self, leg: LegState) -> None:
        if leg.phase is Phase.DECODE:
            self._batch.flush([leg])
        self._leave(leg)
        leg.phase = Phase.WAITING
        leg.names = names_of(leg, self.settings.block_size_tokens)
        leg.computed = leg.named_blocks = 0
        self.preempted_total += 1
        self._has_preempted = True
        self._waiting.push(leg)

    # Prompts

    def _admit(self, step: Step, now_s: float) -> LegState | None:
        """Gives the next waiting leg its blocks. None: no leg waits, or there is no room for it."""
        leg = self._waiting.peek()
        running = len(self._batch) + len(self._prefilling) + len(self._pulling)
        if leg is None or running >= self.settings.running_requests_max:
            return None
        if leg.request.leg is Leg.PREFILL and self.peer is None:
            return None
        size = self.settings.block_size_tokens
        cached = self.pool.match(leg.names[: (len(leg.tokens) - 1) // size])
        missing = -(-len(leg.tokens) // size) - len(cached)
        if missing > self.pool.available - self.pool.idle_among(cached):
            return None
        self._waiting.pop()
        self.pool.hold(cached)
        leg.blocks = cached + self.pool.allocate(missing)
        leg.computed, leg.named_blocks = len(cached) * size, len(cached)
        self._start(leg, step, now_s)
        return leg

    def _start(self, leg: LegState, step: Step, now_s: float) -> None:
        if leg.payload is not None and now_s >= leg.payload_expires_at_s:
            leg.payload, leg.was_recomputed = None, True
        if not leg.was_admitted:
            leg.was_admitted = True
            leg.cached_tokens = leg.computed
            self.cached_tokens_total += leg.computed
        if leg.payload is None or leg.request.handle is None or leg.computed >= leg.request.handle.tokens:
            self._give_up_handle(leg)
            leg.phase = Phase.PREFILL
            self._prefilling.append(leg)
            return
        leg.phase = Phase.PULLING
        self._pulling.add(leg)
        step.pulls.append(
            PullOrder(leg=leg, payload=leg.payload, handle_id=leg.request.handle.handle_id, first=leg.named_blocks)
        )

    def _prefill(self, leg: LegState, budget: int, step: Step, now_s: float) -> int:
        """Computes as much of a prompt as the budget allows; tokens spent."""
        take = min(budget, len(leg.tokens) - leg.computed)
        if take < 0 or leg.phase is not Phase.PREFILL or budget <= 0:
            return 0
        if take:
            compute_prompt(leg, take, self.memory, self.pool, self.settings.block_size_tokens)
        self.prompt_tokens_total += take
        step.prefill_tokens += take
        if leg.computed == len(leg.tokens):
            self._prefilling.remove(leg)
            if leg.request.leg is Leg.PREFILL:
                self._hand_off(leg, now_s)
            else:
                self._first_token(leg, step)
        return take or 1

    def _first_token(self, leg: LegState, step: Step) -> None:
        """Reads the prompt's checksum out of its blocks, samples from it, and joins the decode batch."""
        parts = self.memory.read_parts(leg.blocks[: -(-leg.computed // self.settings.block_size_tokens)])
        leg.named_sum = (sum(parts[: leg.named_blocks]) + leg.constant) & SUM_MASK
        total = (sum(parts) + leg.constant) & SUM_MASK
        token_id = self._range.first_id + total % self._range.span
        leg.tokens.append(token_id)
        generated = len(leg.tokens) - leg.start_tokens
        leg.phase = Phase.DECODE
        self._batch.add(leg, total + len(leg.tokens) * token_id)
        self._plan_growth(leg)
        is_eos = leg.eos_at == generated
        if is_eos:
            token_id = self.card.eos_token_ids[0]
        step.keys.append(leg.key)
        step.token_ids.append(token_id)
        if step.counts is not None:
            step.counts.append(1)
        self._add_logprob(leg, token_id, step)
        is_stop = is_eos or self._stops(leg, token_id, generated)
        if is_stop or generated >= leg.tokens_max:
            self._finish(leg, token_id if is_stop else None)
            return
        leg.end_step = self._batch.steps + self._last_token(leg) - generated
        self._end_at.setdefault(leg.end_step, {})[leg] = None
        if leg.stop_ids or leg.request.generation.sampling.logprobs is not None:
            self._watched[leg] = None

    def _hand_off(self, leg: LegState, now_s: float) -> None:
        assert self.peer is not None
        _, stamps = self.memory.guards(leg.blocks)
        payload = HandlePayload(
            peer=self.peer,
            blocks=array_of("I", leg.blocks),
            stamps=array_of("Q", stamps),
            checksum=sum(self.memory.read_parts(leg.blocks)),
            cached_tokens=leg.cached_tokens,
        )
        handle = KvHandle(
            handle_id=f"{self.incarnation}-{leg.order}",
            format=FORMAT,
            compatibility_hash=self.compatibility_hash,
            payload=pack(payload),
            worker_id="",
            worker_epoch=0,
            tokens=leg.computed,
            lease_s=self.settings.lease_s,
            kv_bytes=len(leg.blocks) * self.settings.kv_bytes_per_block,
        )
        self.leases.add(handle.handle_id, leg.blocks, now_s + self.settings.lease_s)
        leg.blocks = []
        leg.phase = Phase.DONE
        self._end(leg, FinishReason.HANDED_OFF, handle=handle)

    # Pulls

    def pull_ended(self, order: PullOrder, error: KvLostError | None) -> bool:
        """A pull is over and no longer touches the blocks. True: the KV is good, and the source may free its own."""
        leg = order.leg
        self._pulling.discard(leg)
        if leg.phase is not Phase.PULLING:
            self.pool.drop(leg.blocks)
            leg.blocks = []
            return False
        leg.payload = None
        is_good = error is None and self._is_intact(order)
        if is_good:
            self._accept_pull(order)
        else:
            leg.was_recomputed = True
        leg.phase = Phase.PREFILL
        self._prefilling.append(leg)
        return is_good

    def _is_intact(self, order: PullOrder) -> bool:
        """Every block is the expected one in the expected filling, and together they have the writer's checksum."""
        if not self.settings.verify_kv:
            return True
        leg, payload = order.leg, order.payload
        blocks = leg.blocks[: len(payload.blocks)]
        guards, stamps = self.memory.guards(blocks[order.first :])
        full = self._handle_tokens(leg) // self.settings.block_size_tokens
        return (
            stamps == payload.stamps[order.first :].tolist()
            and guards[: full - order.first] == leg.names[order.first : full]
            and sum(self.memory.read_parts(blocks)) == payload.checksum
        )

    def _handle_tokens(self, leg: LegState) -> int:
        assert leg.request.handle is not None
        return leg.request.handle.tokens

    def _accept_pull(self, order: PullOrder) -> None:
        leg = order.leg
        tokens = self._handle_tokens(leg)
        full = tokens // self.settings.block_size_tokens
        first = order.first
        parent = leg.names[first - 1] if first else None
        self.pool.name(leg.blocks[first:full], leg.names[first:full], parent)
        leg.named_blocks = full
        leg.transferred_tokens = tokens - leg.computed
        leg.cached_tokens = order.payload.cached_tokens
        leg.computed = tokens
        self.transferred_tokens_total += leg.transferred_tokens

    # Leases and figures

    def lose(self, handle_id: str) -> None:
        """A fault: the handle's blocks are freed and refilled with something else, those that others hold excepted."""
        blocks = self.leases.blocks_of(handle_id)
        if self.leases.end(handle_id):
            gone = self.pool.discard_idle(blocks)
            self.memory.write(gone, [0] * len(gone), np.zeros(len(gone), np.uint64))

    def take_finishes(self) -> Step:
        """A step that does nothing but tell of ended legs."""
        step = Step(finishes=self._finishes)
        self._finishes = []
        return step

    def counts(self) -> tuple[int, int, int]:
        """Running and waiting legs, and prompt tokens accepted but not computed."""
        begun = sum(len(leg.tokens) - leg.computed for leg in self._prefilling)
        running = len(self._batch) + len(self._prefilling) + len(self._pulling)
        return running, len(self._waiting), self._waiting.prompt_tokens + begun

    def usage_of(self, key: int) -> Usage | None:
        """What a leg cost so far."""
        leg = self._legs.get(key)
        return leg.usage(self._batch.unflushed(leg)) if leg is not None else None
