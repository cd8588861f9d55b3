"""Legs of a rendezvous before they decode: prefill legs around the computation of their prompt, decode legs until they have its KV.

No asyncio, no clock, no I/O: the queues collect signals, and the engine carries them out by the exchange.
Order of the blocks: retracted legs first, then by priority and arrival. A leg that finds no room blocks those behind it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.engines.simulated.blocks import BlockPool
from kvmesh.engines.simulated.handles import read_payload
from kvmesh.engines.simulated.handoff import is_intact
from kvmesh.engines.simulated.leg_state import Phase, SimulatedLeg, WaitingQueue
from kvmesh.engines.simulated.memory import KvMemory
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.engines.simulated.step import PullOrder


class SignalKind(Enum):
    """ENTERED: find the counterpart. READY, OFFER, DONE: send that message. LEFT: the leg is over, close its channel."""

    ENTERED = "entered"
    READY = "ready"
    OFFER = "offer"
    DONE = "done"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """`body` is the packed payload of an OFFER."""

    kind: SignalKind
    leg: SimulatedLeg
    body: bytes = b""


class PrefillQueues:
    """The bootstrap queue: legs whose decode engine has no blocks yet. The in-flight queue: legs whose KV is being sent.

    Only legs of the in-flight queue hold blocks. Between the two queues a leg waits and computes as any other prompt.
    """

    def __init__(
        self, *, waiting: WaitingQueue, make_offer: Callable[[SimulatedLeg], bytes], signals: list[Signal]
    ) -> None:
        self._waiting = waiting
        self._make_offer = make_offer
        self._signals = signals
        self._bootstrapping: dict[SimulatedLeg, None] = {}
        self._sending: dict[SimulatedLeg, None] = {}

    @property
    def bootstrapping(self) -> int:
        return len(self._bootstrapping)

    @property
    def sending(self) -> int:
        return len(self._sending)

    @property
    def prompt_tokens(self) -> int:
        """Of the bootstrap queue."""
        return sum(len(leg.tokens) for leg in self._bootstrapping)

    def enter(self, leg: SimulatedLeg) -> None:
        if leg.is_fake:
            self._waiting.push(leg)
            return
        leg.phase = Phase.BOOTSTRAPPING
        self._bootstrapping[leg] = None
        self._signals.append(Signal(kind=SignalKind.ENTERED, leg=leg))

    def on_ready(self, leg: SimulatedLeg) -> None:
        """The decode engine has reserved blocks, so the prompt may be computed."""
        if leg.phase is Phase.BOOTSTRAPPING:
            del self._bootstrapping[leg]
            leg.phase = Phase.WAITING
            self._waiting.push(leg)

    def send(self, leg: SimulatedLeg) -> None:
        """The prompt is computed: the decode engine may pull its blocks."""
        leg.phase = Phase.SENDING
        self._sending[leg] = None
        self._signals.append(Signal(kind=SignalKind.OFFER, leg=leg, body=self._make_offer(leg)))

    def discard(self, leg: SimulatedLeg) -> None:
        """Removes a leg that ended."""
        self._bootstrapping.pop(leg, None)
        self._sending.pop(leg, None)


class DecodeQueues:
    """The preallocation queue: legs without blocks. The transfer queue: legs with blocks and without the prompt's KV. The prebuilt legs,
    which have their KV and decode from the next step on. The retracted legs, whose KV is saved outside of the pool.

    `decoding` returns the legs that decode; `resume` adds a retracted one to them again.
    """

    def __init__(
        self,
        *,
        settings: SimulatedSettings,
        pool: BlockPool,
        memory: KvMemory,
        signals: list[Signal],
        decoding: Callable[[], Sequence[SimulatedLeg]],
        resume: Callable[[SimulatedLeg, int], None],
    ) -> None:
        self._settings = settings
        self._size = settings.block_size_tokens
        self._pool = pool
        self._memory = memory
        self._signals = signals
        self._decoding = decoding
        self._resume = resume
        self._preallocating = WaitingQueue(Phase.PREALLOCATING)
        self._retracted = WaitingQueue(Phase.RETRACTED)
        self._receiving: dict[SimulatedLeg, None] = {}
        self._prebuilt: dict[SimulatedLeg, None] = {}

    @property
    def preallocating(self) -> int:
        return len(self._preallocating)

    @property
    def receiving(self) -> int:
        return len(self._receiving)

    @property
    def prebuilt(self) -> int:
        return len(self._prebuilt)

    @property
    def retracted(self) -> int:
        return len(self._retracted)

    @property
    def has_work(self) -> bool:
        """True: the next step may do something for these legs."""
        return bool(self._prebuilt or len(self._preallocating) or len(self._retracted))

    def enter(self, leg: SimulatedLeg) -> None:
        leg.phase = Phase.PREALLOCATING
        self._preallocating.push(leg)
        if not leg.is_fake:
            self._signals.append(Signal(kind=SignalKind.ENTERED, leg=leg))

    def allocate(self) -> bool:
        """Allocates blocks to legs in order while there is room. True: some of them can decode in the next step."""
        can_decode = False
        while (leg := self._retracted.peek() or self._preallocating.peek()) is not None:
            active = [*self._decoding(), *self._receiving, *self._prebuilt]
            if len(active) >= self._settings.running_requests_max or (cached := self._find_room(leg, active)) is None:
                break
            is_retracted = leg.phase is Phase.RETRACTED
            (self._retracted if is_retracted else self._preallocating).pop()
            self._pool.hold(cached)
            leg.blocks = cached + self._pool.allocate(self._blocks_of(leg) - len(cached))
            if is_retracted:
                self._restore(leg)
            else:
                self._begin_transfer(leg, len(cached))
            can_decode = can_decode or is_retracted or leg.is_fake
        return can_decode

    def _blocks_of(self, leg: SimulatedLeg) -> int:
        return -(-len(leg.tokens) // self._size)

    def _find_room(self, leg: SimulatedLeg, active: Sequence[SimulatedLeg]) -> list[int] | None:
        """Returns the leg's cached blocks if there is room for it in addition to the active legs, else None.

        The last token is always sampled here, so at least its block is received. The check includes the blocks reserved for the output of
        all legs. A single leg needs no reservation: no other leg frees blocks for it, and it can be retracted.
        """
        cached: list[int] = []
        if leg.phase is not Phase.RETRACTED and not leg.is_fake:
            cached = self._pool.match(leg.names[: (len(leg.tokens) - 1) // self._size])
        blocks = self._blocks_of(leg)
        needed = blocks - len(cached)
        if active:
            needed += self._growth_blocks(leg, blocks)
            needed += sum(self._growth_blocks(each, len(each.blocks)) for each in active)
        return cached if needed <= self._pool.available - self._pool.idle_among(cached) else None

    def _growth_blocks(self, leg: SimulatedLeg, blocks: int) -> int:
        """Returns the blocks beyond `blocks` that are reserved for the leg's output."""
        output_tokens = min(leg.tokens_max, self._settings.reserved_output_tokens)
        return max(0, -(-(leg.start_tokens + output_tokens) // self._size) - blocks)

    def _begin_transfer(self, leg: SimulatedLeg, cached_blocks: int) -> None:
        leg.named_blocks, leg.parts = cached_blocks, None
        leg.computed = cached_blocks * self._size
        if leg.is_fake:
            # Its blocks hold nothing, so they never get names.
            leg.named_blocks = sys.maxsize
            self._prebuild(leg)
            return
        leg.phase = Phase.RECEIVING
        # Until its KV is here (`on_pulled`): legs that pull are in it too, and count as active.
        self._receiving[leg] = None
        self._signals.append(Signal(kind=SignalKind.READY, leg=leg))

    def on_offer(self, leg: SimulatedLeg, body: bytes) -> PullOrder | None:
        """Takes the offer of the prompt's KV. Returns None if the leg is over. Raises KvLostError if the offer does not fit the prompt."""
        if leg.phase is not Phase.RECEIVING:
            return None
        payload = read_payload(body, -(-len(leg.tokens) // self._size))
        leg.phase = Phase.PULLING
        return PullOrder(leg=leg, blocks=leg.blocks, payload=payload, handle_id="", first=leg.named_blocks)

    def on_pulled(self, order: PullOrder) -> bool:
        """Takes copied blocks. Returns False if they do not hold the prompt's KV."""
        leg, first, tokens = order.leg, order.first, len(order.leg.tokens)
        if self._settings.verify_kv and not is_intact(
            order, tokens=tokens, memory=self._memory, block_size_tokens=self._size
        ):
            return False
        full = tokens // self._size
        if full > first:
            self._pool.name(leg.blocks, first, leg.names[first:full], parent=leg.names[first - 1] if first else None)
        leg.named_blocks, leg.cached_tokens = full, order.payload.cached_tokens
        leg.transferred_tokens = tokens - leg.computed
        del self._receiving[leg]
        self._signals.append(Signal(kind=SignalKind.DONE, leg=leg))
        self._prebuild(leg)
        return True

    def _prebuild(self, leg: SimulatedLeg) -> None:
        leg.computed = len(leg.tokens)
        leg.phase = Phase.PREBUILT
        self._prebuilt[leg] = None

    def take_prebuilt(self) -> list[SimulatedLeg]:
        """Legs that enter the running batch, without a prefill pass."""
        legs, self._prebuilt = list(self._prebuilt), {}
        return legs

    def retract(self, leg: SimulatedLeg, total: int) -> None:
        """Takes the blocks of a leg that no longer decodes, and saves their KV. `total` is the checksum that `resume` needs."""
        leg.saved_total = total
        leg.saved_rows = self._memory.read_rows(leg.blocks[: leg.named_blocks])
        self._pool.drop(leg.blocks)
        leg.blocks, leg.phase = [], Phase.RETRACTED
        self._retracted.push(leg)

    def _restore(self, leg: SimulatedLeg) -> None:
        """Writes the saved KV to the leg's new blocks. The leg continues with its next token."""
        assert leg.saved_rows is not None
        # Before `name`, which may replace blocks by those of other legs: their stamps, which handles refer to, must not change.
        self._memory.write_rows(leg.blocks[: len(leg.saved_rows)], leg.saved_rows)
        if leg.named_blocks and not leg.is_fake:
            self._pool.name(leg.blocks, 0, leg.names[: leg.named_blocks], parent=None)
        leg.saved_rows = None
        self._resume(leg, leg.saved_total)

    def discard(self, leg: SimulatedLeg, phase: Phase) -> None:
        """Removes a leg that ended in this phase."""
        if phase is Phase.PREALLOCATING:
            self._preallocating.discount(leg)
        elif phase is Phase.RETRACTED:
            self._retracted.discount(leg)
        self._receiving.pop(leg, None)
        self._prebuilt.pop(leg, None)
        leg.saved_rows = None
