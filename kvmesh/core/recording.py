"""Traffic without its text, for simulations; fields as in `protos/kvmesh/router/v1/router.proto`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraffic:
    """A request that finished. `block_ids`: salted ids of its blocks of 512 tokens; equal ones mean that the prompts are equal up to there."""

    arrived_at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """`lost_requests`: that the reader was too slow for, before this batch."""

    requests: tuple[RecordedTraffic, ...]
    lost_requests: int = 0
