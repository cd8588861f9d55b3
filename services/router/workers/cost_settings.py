"""Settings of the placement cost. The formula is in docs/understand/routing-cost.md."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """The weights of the terms. `coefficients.py` and `handoff_times.py` have the coefficients until they are learned."""

    itl_target_s: float = setting(0.1, "Inter-token latency target of workers whose profile has none.", min=0.0001)
    decode_weight: float = setting(
        0.5,
        "Cost, in seconds to first token, of a second by which decoding is delayed, of the request or of its neighbours.",
        min=0,
    )
    overdue_ratio: float = internal(
        0.1, "Part of the promised prefill time that counts at least, even when it should be over by now."
    )
    preference_s: float = setting(
        0.25, "Seconds of cost on top for a worker that lacks a preferred label, or is not the session's.", min=0
    )
    adapters_warm: int = internal(8, "Adapters of its newest requests that a worker has lately run.")
    temperature: float = setting(
        0.0, "Seconds of cost by which a worker is e times less likely to be taken. 0: the cheapest is taken.", min=0
    )
    host_credit: float = setting(
        0.75, "Value of a token cached in host memory, relative to one on the device.", min=0, max=1
    )
    disk_credit: float = setting(0.25, "The same for the disk.", min=0, max=1)
    object_credit: float = setting(0.15, "The same for an object store.", min=0, max=1)
    peer_credit: float = setting(0.5, "The same for a peer's memory.", min=0, max=1)
    learning: bool = setting(True, "Whether observed times correct the coefficients.")
