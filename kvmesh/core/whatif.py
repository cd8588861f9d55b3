"""Recorded traffic, and simulations of a mesh; fields as in `router.proto` and `planner.proto`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core.planning import Alternative, Shape, Targets
from kvmesh.core.worker import PerformanceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyLoad:
    """Poisson arrivals at a constant rate, with log-normal lengths."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    duration_s: float = 300.0
    prompt_variation: float = 0.8
    output_variation: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request of a record: seconds from its start, lengths, and ids of the 512-token blocks of its prompt."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Requests in order of arrival."""

    requests: Sequence[RecordedRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What to simulate. Numbers of workers that are None are sized for the load."""

    model: str
    steady: SteadyLoad | None = None
    recorded: RecordedLoad | None = None
    targets: Targets | None = None
    prefill_workers: int | None = None
    decode_workers: int | None = None
    has_planner: bool = False
    profile: PerformanceProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The result of a simulation."""

    shape: Shape = field(default_factory=Shape)
    requests: int = 0
    attainment: float = 0.0
    goodput_per_s: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    ttft_p99_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p95_s: float = 0.0
    itl_p99_s: float = 0.0
    hit_rate: float = 0.0
    worker_hours: float = 0.0
    cost: float = 0.0
    expected: Alternative | None = None


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
