"""Prefill legs of a rendezvous before and after the computation of their prompt. No asyncio, no clock."""

from collections.abc import Callable

from kvmesh.engines.simulated.leg_state import Phase, SimulatedLeg, WaitingQueue
from kvmesh.engines.simulated.rendezvous.signals import Signal, SignalKind


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
