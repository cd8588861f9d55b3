"""What is said between frontend and router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvmesh.core.worker import Handoff, WorkerRef
from kvmesh.errors import MeshError


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request to place; carries chained block hashes at `block_size_tokens`, never the prompt.

    Nobody changes it. It is not frozen for the reason that `Placement` is not.
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


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a request goes. No prefill worker: the decode worker computes the prompt.

    Nobody changes it. It is not frozen because one is made per decision, which takes a twentieth longer when it is.
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
    """Kinds of news of a placed request; the last three settle its reservation."""

    PREFILLED = "prefilled"
    FIRST_TOKEN = "first_token"
    PROGRESS = "progress"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def settles(self) -> bool:
        """True when nothing may follow it."""
        return self in SETTLING


# For those who ask several times per report: to look a member up in its enumeration takes ten times as long.
PREFILLED, FIRST_TOKEN, PROGRESS = ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.PROGRESS
FINISHED, FAILED = ReportKind.FINISHED, ReportKind.FAILED
SETTLING = frozenset((FINISHED, FAILED, ReportKind.CANCELLED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a placed request so far. Sent by the frontend that asked for the placement."""

    kind: ReportKind
    elapsed_s: float
    """Since the placement was received."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the cache. None: not known."""
    output_tokens: int = 0
    """Tokens generated so far."""
    error: MeshError | None = None
    """Why the request failed."""
    failed_worker_id: str = ""
    """The worker that is to blame. Empty: none."""
    reservation_id: str = ""
    """Names the reservation where the ask's number does not: at a router that did not make the placement."""
    is_answered_by_prefill: bool = False
    """The prefill worker answered by itself; no decode worker took part."""
