"""Decides which legs run in a step and on which blocks, and computes their tokens. No asyncio, no clock.

Order within a step, as in vLLM: decoding legs (one token of the budget each), then prompts in progress, then waiting legs by priority
and arrival. A prompt gets all its blocks when it is admitted and may be computed in several steps. When a decoding leg needs a block
and none is available, the leg of the lowest rank is preempted: it drops its blocks and waits again. Legs of a rendezvous pass the queues
of `rendezvous/` before and after; a decode engine of a rendezvous does not compute prompts, so its legs are retracted instead of preempted.
"""

from collections.abc import Iterable, Sequence

from kvmesh.core import FinishReason, Handoff, KvHandle, LegTask, ModelCard, Role
from kvmesh.engines.base import EngineFinish, EngineRequest
from kvmesh.engines.simulated.block_writer import compute_prompt, names_of
from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.constrained_answers import ScriptWriter
from kvmesh.engines.simulated.decoding import Decoding, add_logprob, is_stop, score_prompt, steered_token
from kvmesh.engines.simulated.handles import pack
from kvmesh.engines.simulated.handoff import is_intact, make_handle, make_payload
from kvmesh.engines.simulated.leases import Leases
from kvmesh.engines.simulated.leg_state import Phase, SimulatedLeg, WaitingQueue
from kvmesh.engines.simulated.memory import KvMemory
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.engines.simulated.rendezvous.queues import DecodeQueues, PrefillQueues, Signal, SignalKind
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import PullOrder, Step
from kvmesh.engines.simulated.tokens import embed
from kvmesh.engines.simulated.validation import check_rendezvous, check_request, make_leg, read_handle
from kvmesh.errors import InvalidRequestError, KvLostError, MeshError, OverloadedError
from kvmesh.kv.paths import KvPaths

SUM_MASK = (1 << 61) - 1
OVERLOAD_RETRY_S = 0.5
"""`retry_after_s` of a leg that is refused because too many wait."""
EMBEDDING_DIMENSIONS = 256
"""Length of the vectors that embedding requests get."""
BLOCKS_PER_SPARE = 16
"""One of so many blocks stays free, so that a prompt's blocks are consecutive: 2 ranges at 8 000 tokens, instead of 190 after many
short answers. Half as many spare blocks give 4 ranges, a quarter 12."""


class Scheduler:
    """All legs of one engine.

    1. A key is known exactly from `submit` until its finish is in a Step.
    2. Only legs in phases PULLING, PREFILL, DECODE, SENDING, RECEIVING and PREBUILT, and leases, hold blocks.
    3. A pull that was cancelled or is overdue keeps its blocks until `pull_ended`.
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
        paths: KvPaths | None = None,
    ) -> None:
        self.settings = settings
        self.paths = paths or KvPaths(pull_timeout_s=settings.pull_timeout_s)
        self.card = card
        self.adapters: frozenset[str] = frozenset(settings.adapters)
        self.peer: bytes | None = None
        """This engine's transport metadata. Prefill legs wait until it is known."""
        self.incarnation = incarnation
        self.compatibility_hash = compatibility_hash
        self.has_transport = has_transport
        self.role = Role(settings.role)
        self.is_rendezvous = settings.handoff == Handoff.RENDEZVOUS and (
            has_transport or settings.kv_transport == "fake"
        )
        """True: the engine serves only one leg of each request, together with its counterpart."""
        self.memory = KvMemory(
            blocks=settings.kv_blocks, bytes_per_block=settings.kv_bytes_per_block, first_stamp=first_stamp
        )
        self.pool = BlockPool(total=settings.kv_blocks, spare=settings.kv_blocks // BLOCKS_PER_SPARE)
        self.leases = Leases(self.pool)
        self.releases: list[tuple[bytes, str]] = []
        """Handles that will not be pulled, with their source's metadata. The engine takes them and notifies the source."""
        self.aborted_pulls: list[SimulatedLeg] = []
        """Legs whose pull must be stopped. The engine takes them and stops the pulls."""
        self.prompt_tokens_total = self.output_tokens_total = 0
        self.cached_tokens_total = self.transferred_tokens_total = self.preempted_total = 0
        self._range = token_range
        self._writer = ScriptWriter(settings.model_dir)
        self._legs: dict[int, SimulatedLeg] = {}
        self._waiting = WaitingQueue()
        self._pulling: set[SimulatedLeg] = set()
        self._prefilling: list[SimulatedLeg] = []
        self._decoding = Decoding(
            settings=settings,
            card=card,
            token_range=token_range,
            memory=self.memory,
            pool=self.pool,
            preempt_one=self._preempt_one,
        )
        self._finishes: list[EngineFinish] = []
        self.signals: list[Signal] = []
        """For the exchange with the other engine of a rendezvous. The engine takes them."""
        self.prefills = PrefillQueues(waiting=self._waiting, make_offer=self._make_offer, signals=self.signals)
        self.decodes = DecodeQueues(
            settings=settings,
            pool=self.pool,
            memory=self.memory,
            signals=self.signals,
            decoding=lambda: self._decoding.legs,
            resume=self._decoding.add,
        )
        self._orders = 0
        self._has_preempted = False
        self._internal_tokens = 0
        """First tokens of internal legs in the present step."""

    @property
    def can_write(self) -> bool:
        """True when constrained answers can be made."""
        return self._writer.can_write

    # Submission and end of legs

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Accepts a leg, or raises and changes nothing."""
        if request.key in self._legs:
            raise InvalidRequestError(f"key {request.key} is in use", field="key")
        check_rendezvous(request, self.settings, role=self.role, is_rendezvous=self.is_rendezvous)
        check_request(
            request,
            self.card,
            self.adapters,
            can_prefill=self.has_transport or self.is_rendezvous,
            can_write=self._writer.can_write,
            dimensions_max=EMBEDDING_DIMENSIONS,
        )
        payload = read_handle(
            request, self.compatibility_hash, self.settings.block_size_tokens, has_transport=self.has_transport
        )
        waiting = len(self._waiting) + self.prefills.bootstrapping + self.decodes.preallocating
        if waiting >= self.settings.waiting_requests_max:
            raise OverloadedError(
                f"{waiting} requests are already waiting",
                reason="queue_full",
                retry_after_s=OVERLOAD_RETRY_S,
            )
        leg = make_leg(
            request,
            order=self._orders,
            settings=self.settings,
            card=self.card,
            token_range=self._range,
            writer=self._writer,
        )
        leg.submitted_at_s = now_s
        self._orders += 1
        if payload is not None and request.handle is not None:
            leg.payload, leg.payload_expires_at_s = payload, now_s + request.handle.lease_s
        self._legs[request.key] = leg
        if request.rendezvous is None:
            self._waiting.push(leg)
        elif request.task is LegTask.PREFILL:
            self.prefills.enter(leg)
        else:
            self.decodes.enter(leg)

    def cancel(self, key: int) -> None:
        """Ends a leg. Its finish is in the next step. Frees its blocks, those of a pull when the pull has stopped."""
        leg = self._legs.get(key)
        if leg is not None:
            self._end(leg, FinishReason.CANCELLED)

    def fail(self, leg: SimulatedLeg, error: MeshError) -> None:
        """Ends a leg whose exchange with its counterpart failed."""
        if leg.phase is not Phase.DONE:
            self._end(leg, FinishReason.ERROR, error=error)

    def cancel_all(self) -> None:
        for key in list(self._legs):
            self.cancel(key)

    def _end(
        self,
        leg: SimulatedLeg,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        handle: KvHandle | None = None,
        embedding: Sequence[float] | None = None,
        error: MeshError | None = None,
    ) -> None:
        self._remove_from_phase(leg)
        del self._legs[leg.key]
        self._finishes.append(
            EngineFinish(
                key=leg.key,
                reason=reason,
                usage=leg.usage(),
                stop_token_id=stop_token_id,
                handle=handle,
                was_recomputed=leg.was_recomputed,
                queue_s=leg.queue_s,
                embedding=embedding,
                error=error,
            )
        )

    def _remove_from_phase(self, leg: SimulatedLeg) -> None:
        """Removes a leg from its phase and drops its blocks."""
        phase, leg.phase = leg.phase, Phase.DONE
        self._queue_release(leg)
        if leg.request.rendezvous is not None:
            self.prefills.discard(leg)
            self.decodes.discard(leg, phase)
            self.signals.append(Signal(kind=SignalKind.LEFT, leg=leg))
        # The transfer still writes to these blocks. `pull_ended` drops them (invariant 3).
        if phase is Phase.PULLING:
            self.aborted_pulls.append(leg)
            return
        if phase is Phase.WAITING:
            self._waiting.discount(leg)
        elif phase is Phase.PREFILL:
            self._prefilling.remove(leg)
        elif phase is Phase.DECODE:
            self._decoding.remove(leg)
        self.pool.drop(leg.blocks)
        leg.blocks = []

    def _queue_release(self, leg: SimulatedLeg) -> None:
        """Queues a release to the source of a handle that will not be pulled."""
        if leg.payload is not None and leg.request.handle is not None:
            self.releases.append((leg.payload.peer, leg.request.handle.handle_id))
        leg.payload = None

    # Steps

    @property
    def has_work(self) -> bool:
        """True when there are legs, other than pulling ones, or finishes."""
        is_busy = len(self._decoding) or self._prefilling or self._finishes or len(self._waiting)
        return bool(is_busy or self.decodes.has_work)

    def step(self, now_s: float) -> Step:
        if len(self.leases):
            self.leases.expire(now_s)
        step = Step(decode_requests=len(self._decoding))
        if step.decode_requests:
            self._decode(step)
        if self.decodes.has_work:
            self._admit_decodes(step)
        if self._prefilling or len(self._waiting):
            self._compute_prompts(step, now_s)
        self._has_preempted = False
        self.output_tokens_total += len(step.token_ids) - self._internal_tokens
        self._internal_tokens = 0
        step.finishes = self.take_finishes()
        return step

    def _admit_decodes(self, step: Step) -> None:
        """Lets received legs decode, then gives blocks to waiting ones."""
        for leg in self.decodes.take_prebuilt():
            self._first_token(leg, step)
        # A leg that was retracted in this step would take back the blocks that it just dropped.
        if not self._has_preempted:
            step.can_go_on = self.decodes.allocate()

    def _compute_prompts(self, step: Step, now_s: float) -> None:
        budget = self.settings.prefill_tokens_max(step.decode_requests)
        for leg in list(self._prefilling):
            budget -= self._prefill(leg, budget, step, now_s=now_s)
        # A leg that was preempted in this step would take back the blocks that it just dropped.
        while budget > 0 and not self._has_preempted and (admitted := self._admit(step, now_s)) is not None:
            budget -= self._prefill(admitted, budget, step, now_s=now_s)

    def take_finishes(self) -> list[EngineFinish]:
        """Returns the finishes of legs that have ended since the last call."""
        finishes, self._finishes = self._finishes, []
        return finishes

    def _decode(self, step: Step) -> None:
        if self.settings.decode_tokens_per_step == 1:
            step.keys, step.token_ids = self._decode_once(step)
        else:
            step.add_rounds([self._decode_once(step) for _ in range(self.settings.decode_tokens_per_step)])

    def _decode_once(self, step: Step) -> tuple[list[int], list[int]]:
        keys, token_ids, ends = self._decoding.step(step)
        for leg, stop_id in ends.items():
            self._end(leg, FinishReason.LENGTH if stop_id is None else FinishReason.STOP, stop_token_id=stop_id)
        return keys, token_ids

    def _preempt_one(self) -> None:
        # Pulling legs are no candidates: their blocks cannot be freed before their transfers end.
        leg = max([*self._decoding.legs, *self._prefilling], key=_rank)
        if leg.request.rendezvous is not None:
            self._retract(leg)
            return
        self._remove_from_phase(leg)
        leg.phase = Phase.WAITING
        # The generated tokens are a part of the prompt that is computed again.
        leg.names = names_of(leg, self.settings.block_size_tokens)
        leg.computed = leg.named_blocks = 0
        self.preempted_total += 1
        self._has_preempted = True
        self._waiting.push(leg)

    def _retract(self, leg: SimulatedLeg) -> None:
        total = self._decoding.total(leg)
        self._decoding.remove(leg)
        self.decodes.retract(leg, total)
        self.preempted_total += 1
        self._has_preempted = True

    # Prompts

    def _admit(self, step: Step, now_s: float) -> SimulatedLeg | None:
        """Gives the next waiting leg its blocks. None: no leg waits, or the next one has no room."""
        leg = self._waiting.peek()
        if leg is None or self._running() >= self.settings.running_requests_max:
            return None
        if leg.request.task is LegTask.PREFILL and self.peer is None:
            return None
        size = self.settings.block_size_tokens
        # The last token is always computed, since the first answer token is sampled from it.
        cached = self.pool.match(leg.names[: (len(leg.tokens) - 1) // size])
        missing = -(-len(leg.tokens) // size) - len(cached)
        if missing > self.pool.available - self.pool.idle_among(cached):
            return None
        self._waiting.pop()
        self.pool.hold(cached)
        leg.blocks = cached + self.pool.allocate(missing)
        leg.computed, leg.named_blocks, leg.parts = len(cached) * size, len(cached), None
        # A preempted leg is admitted again. Its wait and its cached tokens count once.
        if not leg.was_admitted:
            leg.was_admitted = True
            leg.queue_s = now_s - leg.submitted_at_s
            leg.cached_tokens = leg.computed
            self.cached_tokens_total += 0 if leg.request.is_internal else leg.computed
        self._start(leg, step, now_s)
        return leg

    def _start(self, leg: SimulatedLeg, step: Step, now_s: float) -> None:
        if leg.payload is not None and now_s >= leg.payload_expires_at_s:
            leg.payload = None
            self._count_recomputed(leg)
        # The cache may hold all that the handle would give.
        if leg.payload is None or leg.request.handle is None or leg.computed >= leg.request.handle.tokens:
            self._queue_release(leg)
            self._begin_prompt(leg)
            return
        leg.phase = Phase.PULLING
        self._pulling.add(leg)
        handle_id, first = leg.request.handle.handle_id, leg.named_blocks
        step.pulls.append(PullOrder(leg=leg, blocks=leg.blocks, payload=leg.payload, handle_id=handle_id, first=first))

    def _begin_prompt(self, leg: SimulatedLeg) -> None:
        leg.phase = Phase.PREFILL
        self._prefilling.append(leg)

    def _prefill(self, leg: SimulatedLeg, budget: int, step: Step, *, now_s: float) -> int:
        """Computes as much of a prompt as the budget allows. Returns the tokens used, at least 1 for a first token."""
        if leg.phase is not Phase.PREFILL or budget <= 0:
            return 0
        take = min(budget, len(leg.tokens) - leg.computed)
        if take:
            step.prompts += 1
            # Token i of this part attends to `computed + i` tokens: this is their sum, for attention's share of the step time.
            step.token_pairs += take * (leg.computed + take / 2)
            compute_prompt(
                leg, take=take, memory=self.memory, pool=self.pool, block_size_tokens=self.settings.block_size_tokens
            )
        self.prompt_tokens_total += 0 if leg.request.is_internal else take
        step.prefill_tokens += take
        if leg.computed == len(leg.tokens):
            self._end_prompt(leg, step, now_s)
        return take or 1

    def _end_prompt(self, leg: SimulatedLeg, step: Step, now_s: float) -> None:
        if leg.request.task is LegTask.EMBED:
            self._end(
                leg,
                FinishReason.STOP,
                embedding=embed(leg.tokens, EMBEDDING_DIMENSIONS, dimensions=leg.request.dimensions),
            )
            return
        # Without a counterpart nobody would report the KV as received.
        if leg.is_fake and leg.request.task is LegTask.PREFILL:
            self._end(leg, FinishReason.HANDED_OFF)
            return
        self._prefilling.remove(leg)
        if leg.request.rendezvous is not None:
            score_prompt(leg, step, self.card)
            self.prefills.send(leg)
        elif leg.request.task is LegTask.PREFILL:
            self._hand_off(leg, now_s)
        else:
            score_prompt(leg, step, self.card)
            self._first_token(leg, step)

    def _first_token(self, leg: SimulatedLeg, step: Step) -> None:
        """Samples from the checksum of the prompt's blocks. Ends the leg or adds it to the decoding legs."""
        parts = self.memory.read_parts(leg.blocks) if leg.parts is None else leg.parts
        leg.parts = None
        leg.named_sum = (int(parts[: leg.named_blocks].sum()) + leg.constant) & SUM_MASK
        total = (int(parts.sum()) + leg.constant) & SUM_MASK
        token_id = self._range.first_id + total % self._range.span
        if leg.is_steered:
            token_id = steered_token(leg, position=len(leg.tokens), token_id=token_id, token_range=self._range)
        leg.tokens.append(token_id)
        # The weight of a token is its position, counted from 1 (tokens.py).
        total += len(leg.tokens) * token_id
        generated = self._decoding.generated(leg)
        is_eos = leg.eos_at == generated
        if is_eos:
            token_id = self.card.eos_token_ids[0]
        step.add_token(leg.key, token_id=token_id)
        self._internal_tokens += leg.request.is_internal
        add_logprob(leg, token_id=token_id, step=step, card=self.card)
        is_stopped = is_eos or is_stop(leg, token_id, generated=generated)
        if not is_stopped and generated < leg.tokens_max:
            self._decoding.add(leg, total)
            return
        # The leg has left its queue already, so `_end` must not remove it from one.
        leg.phase = Phase.DONE
        if is_stopped:
            self._end(leg, FinishReason.STOP, stop_token_id=token_id)
        else:
            self._end(leg, FinishReason.LENGTH)

    def _make_offer(self, leg: SimulatedLeg) -> bytes:
        assert self.peer is not None
        return pack(make_payload(leg, peer=self.peer, memory=self.memory))

    def on_sent(self, leg: SimulatedLeg) -> None:
        """The decode engine has the leg's KV."""
        if leg.phase is Phase.SENDING:
            self._end(leg, FinishReason.HANDED_OFF)

    def _hand_off(self, leg: SimulatedLeg, now_s: float) -> None:
        assert self.peer is not None
        handle_id = f"{self.incarnation}-{leg.order}"
        handle = make_handle(
            leg,
            handle_id=handle_id,
            peer=self.peer,
            compatibility_hash=self.compatibility_hash,
            memory=self.memory,
            settings=self.settings,
        )
        self.leases.add(handle_id, leg.blocks, now_s + self.settings.lease_s)
        # The lease now owns the references, so `_end` must not drop them.
        leg.blocks, leg.phase = [], Phase.DONE
        self._end(leg, FinishReason.HANDED_OFF, handle=handle)

    # Pulls and leases

    def pull_ended(self, order: PullOrder, error: KvLostError | None) -> bool:
        """Handles the end of a pull, which no longer writes to any block. True: the source must be notified to free its blocks."""
        leg = order.leg
        self._pulling.discard(leg)
        is_rendezvous = leg.request.rendezvous is not None
        if leg.phase is not Phase.PULLING or leg.blocks is not order.blocks:
            # The leg was cancelled, or `pull_overdue` has given it another list: the order alone holds the blocks.
            self.pool.drop(order.blocks)
            if leg.blocks is order.blocks:
                leg.blocks = []
            return False
        if is_rendezvous:
            if error is None and self.decodes.on_pulled(order):
                self.transferred_tokens_total += leg.transferred_tokens
            else:
                self._fail_pull(order, error or KvLostError("the received KV is damaged", reason="kv_damaged"))
            return False
        assert leg.request.handle is not None
        tokens, size = leg.request.handle.tokens, self.settings.block_size_tokens
        leg.payload = None
        is_good = error is None and (
            not self.settings.verify_kv or is_intact(order, tokens=tokens, memory=self.memory, block_size_tokens=size)
        )
        if is_good:
            self._accept_pull(order, tokens)
        else:
            self._count_recomputed(leg)
        self._begin_prompt(leg)
        # A failed handle is not read again; without a notice the source would hold its blocks until the lease ends.
        return True

    def _fail_pull(self, order: PullOrder, error: KvLostError) -> None:
        """Fails the leg of a pull that has ended."""
        self.fail(order.leg, error)
        # `fail` queued an abort, since the leg was PULLING. This transfer has ended, so nothing is left to stop and the blocks may be
        # dropped.
        self.aborted_pulls.remove(order.leg)
        self.pool.drop(order.blocks)
        order.leg.blocks = []

    def pull_overdue(self, order: PullOrder) -> None:
        """Gives up a pull that may still write. Its leg waits for other blocks and computes the prompt, or fails (rendezvous)."""
        leg = order.leg
        if leg.phase is not Phase.PULLING or leg.blocks is not order.blocks:
            return
        if leg.request.rendezvous is not None:
            self.fail(leg, KvLostError("the transfer did not end in time", reason="kv_pull_timeout"))
            return
        self._remove_from_phase(leg)
        self._pulling.discard(leg)
        leg.blocks, leg.phase = [], Phase.WAITING
        leg.computed = leg.named_blocks = 0
        self._count_recomputed(leg)
        self._waiting.push(leg)

    def _count_recomputed(self, leg: SimulatedLeg) -> None:
        """Notes that the prompt of a handle is computed here."""
        assert leg.request.handle is not None
        leg.was_recomputed = True
        self.paths.count_recomputed(leg.request.handle, len(leg.tokens) - leg.computed)

    def _accept_pull(self, order: PullOrder, tokens: int) -> None:
        leg, first = order.leg, order.first
        full = tokens // self.settings.block_size_tokens
        if full > first:
            self.pool.name(leg.blocks, first, leg.names[first:full], parent=leg.names[first - 1] if first else None)
        leg.named_blocks = full
        leg.transferred_tokens = tokens - leg.computed
        leg.cached_tokens = order.payload.cached_tokens
        leg.computed = tokens
        self.transferred_tokens_total += 0 if leg.request.is_internal else leg.transferred_tokens

    # Load

    def held_blocks(self, pulled: Iterable[Sequence[int]] = ()) -> int:
        """Counts the blocks of legs, of handles and of `pulled`, those of transfers. The pool is not asked, so that leaks are found."""
        legs = [leg.blocks for leg in self._legs.values()]
        return len({block for blocks in (*legs, *self.leases.blocks(), *pulled) for block in blocks})

    def _running(self) -> int:
        return len(self._decoding) + len(self._prefilling) + len(self._pulling) + self.decodes.prebuilt

    def counts(self) -> tuple[int, int, int]:
        """Numbers of running and waiting legs, and of accepted prompt tokens that are not computed yet."""
        left = sum(len(leg.tokens) - leg.computed for leg in self._prefilling)
        waiting_tokens = self._waiting.prompt_tokens + self.prefills.prompt_tokens
        return self._running(), len(self._waiting), waiting_tokens + left


def _rank(leg: SimulatedLeg) -> tuple[int, int]:
    return leg.rank
