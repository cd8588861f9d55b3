"""Messages between frontends and routers, and between routers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.worker import Handoff, WorkerRef
from kvmesh.errors import MeshError


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request to place. It carries chained block hashes at `block_size_tokens`, not the prompt.

    Immutable, but not frozen: see `Placement`.
    """

    request_id: str
    model: str
    prompt_tokens: int
    block_hashes: Sequence[int] = ()
    block_size_tokens: int = 0
    expected_output_tokens: int = 0
    adapter: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    session_id: str = ""
    choices: int = 1
    required_features: Sequence[str] = ()
    required_labels: Mapping[str, str] = field(default_factory=dict)
    preferred_labels: Mapping[str, str] = field(default_factory=dict)
    excluded_worker_ids: Sequence[str] = ()
    pinned_prefill_worker_id: str = ""
    pinned_decode_worker_id: str = ""
    attempt: int = 0
    traceparent: str = ""
    files_digest: str = ""


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a request goes. No prefill worker: the decode worker computes the prompt.

    Immutable, but not frozen: one is made per decision, which a frozen class makes 5 % slower.
    """

    reservation_id: str
    decode: WorkerRef
    prefill: WorkerRef | None = None
    handoff: Handoff | None = None
    rendezvous_address: str = ""
    cached_tokens: int = 0
    expected_ttft_s: float | None = None
    reasons: Sequence[str] = ()
    queued_s: float | None = None
    decode_cached_tokens: int = 0


class ReportKind(StrEnum):
    """Kinds of reports; the last three settle the reservation."""

    PREFILLED = "prefilled"
    FIRST_TOKEN = "first_token"
    PROGRESS = "progress"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def settles(self) -> bool:
        """True when no report may follow."""
        return self in SETTLING


# A lookup in the enumeration takes ten times as long, and several are made per report.
PREFILLED, FIRST_TOKEN, PROGRESS = ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.PROGRESS
FINISHED, FAILED = ReportKind.FINISHED, ReportKind.FAILED
SETTLING = frozenset((FINISHED, FAILED, ReportKind.CANCELLED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a placed request, reported by the frontend that sent the ask."""

    kind: ReportKind
    elapsed_s: float
    """Time since the placement was received."""
    cached_tokens: int | None = None
    """Prompt tokens that the worker found in its cache. None: not known."""
    output_tokens: int = 0
    """Tokens generated so far."""
    error: MeshError | None = None
    """Why the request failed."""
    failed_worker_id: str = ""
    """The worker that caused the failure. Empty: none."""
    reservation_id: str = ""
    """For a router that did not make the placement, so that the ask's number does not identify the reservation."""
    is_answered_by_prefill: bool = False
    """The prefill worker generated the whole output."""
    was_recomputed: bool = False
    """The decode worker could not pull the prompt's KV and computed the prompt again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReservation:
    """A reservation as routers send it to each other. `ends_after_s` counts from the sending."""

    reservation_id: str
    request_id: str
    frontend_id: str
    ask_id: int
    decode_worker_id: str
    prefill_worker_id: str = ""
    decode_rank: int = 0
    prefill_rank: int = 0
    uncached_tokens: int = 0
    kv_blocks: int = 0
    choices: int = 1
    is_prefilled: bool = False
    is_orphaned: bool = False
    ends_after_s: float = 0.0
    session_id: str = ""
    block_hashes: Sequence[int] = ()
    tenant: str = ""
    model: str = ""
    priority: int = 0
    charged_tokens: int = 0
    """Of the fair queue, as charged when it was placed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUpdate:
    """One message between routers. `router_id` and `run_id` are empty except in the first of a stream."""

    sequence: int
    router_id: str = ""
    run_id: str = ""
    reservations: Sequence[PeerReservation] = ()
    prefilled_ids: Sequence[str] = ()
    settled_ids: Sequence[str] = ()
    is_snapshot: bool = False
    is_complete: bool = True
