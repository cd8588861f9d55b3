"""What the scheduler's queues ask of the exchange. The scheduler does no I/O, so it collects signals and the engine carries them out."""

from dataclasses import dataclass
from enum import Enum

from kvmesh.engines.simulated.leg_state import SimulatedLeg


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
