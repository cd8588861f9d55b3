"""What a router shows of its workers and decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.kv import KvTier
from kvmesh.core.routing import Placement, Report
from kvmesh.core.worker import LoadRecord, Role, WorkerRef
from kvmesh.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One coefficient of a worker's cost; its name ends with the unit."""

    name: str
    value: float
    source: str = "default"
    observations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """See `kvmesh.router.v1.WorkerView`."""

    worker: WorkerRef
    role: Role
    model: str
    trust: str
    trust_reason: str = ""
    load: LoadRecord | None = None
    index_blocks: int = 0
    requests_in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    excluded_by: str = ""
    kv_compatibility_hash: str = ""
    coefficients: Sequence[Coefficient] = ()
    breaker: str = ""
    blocks_by_tier: Mapping[KvTier, int] = field(default_factory=dict)
    paused_frontend_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One pair of workers and its cost."""

    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    cost: float = 0.0
    terms: Sequence[tuple[str, float]] = ()
    removed_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierPlacement:
    """A placement of a request that was placed again; see `kvmesh.router.v1.EarlierPlacement`."""

    attempt: int
    decided_at_s: float
    placement: Placement | None = None
    error: MeshError | None = None
    reports: Sequence[Report] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One decision; see `kvmesh.router.v1.ExplainResponse`."""

    request_id: str
    policy: str
    decided_at_s: float
    candidates: Sequence[Candidate] = ()
    placement: Placement | None = None
    error: MeshError | None = None
    ask_id: int = 0
    reports: Sequence[Report] = ()
    margin: float | None = None
    observed_ttft_s: float | None = None
    queued_s: float | None = None
    cost_unit: str = ""
    attempt: int = 0
    prompt_tokens: int = 0
    earlier: Sequence[EarlierPlacement] = ()


class RequestState(StrEnum):
    """How far a request is; see `kvmesh.router.v1.RequestState`."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def is_in_flight(self) -> bool:
        """True before the end."""
        return self in _IN_FLIGHT


_IN_FLIGHT = frozenset((RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """See `kvmesh.router.v1.RequestView`."""

    request_id: str
    model: str
    state: RequestState
    decided_at_s: float
    tenant: str = ""
    reason: str = ""
    attempt: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    expected_ttft_s: float | None = None
    observed_ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """See `kvmesh.router.v1.ListRequestsResponse`."""

    requests: Sequence[RequestView] = ()
    requests_in_flight: int = 0
    requests_queued: int = 0
