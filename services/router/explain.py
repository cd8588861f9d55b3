"""What was weighed for the newest placements: a bounded history by request id. Pure."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from kvmesh.core import Placement, ReportKind, Role
from kvmesh.errors import MeshError
from services.router.choice import Choice
from services.router.target import Target

REPORTS_MAX = 16
CANDIDATES_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportNote:
    """A report as it came."""

    kind: ReportKind
    elapsed_s: float
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: MeshError | None = None
    failed_worker_id: str = ""


@dataclass(slots=True, kw_only=True)
class Record:
    """One decision. `choice` and `placement` are None exactly when it was refused with `error`."""

    request_id: str
    ask_id: int
    policy: str
    decided_at_s: float
    choice: Choice | None = None
    placement: Placement | None = None
    error: MeshError | None = None
    reports: list[ReportNote] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCandidate:
    """One candidate pair with its cost and terms; `removed_by` names the filter that took it off."""

    prefill: Target | None = None
    decode: Target | None = None
    cost: float = 0.0
    terms: Sequence[tuple[str, float]] = ()
    removed_by: str = ""


class History:
    """Newest decisions. A request placed again replaces its older decision."""

    def __init__(self, records_max: int) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._records_max = records_max

    def add(self, record: Record) -> None:
        """Remembers a decision and forgets the oldest beyond the bound."""
        if self._records_max == 0:
            return
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        if len(self._records) > self._records_max:
            self._records.popitem(last=False)

    def note(self, request_id: str, note: ReportNote) -> None:
        """Adds a report to a remembered decision, up to a bound."""
        record = self._records.get(request_id)
        if record is not None and len(record.reports) < REPORTS_MAX:
            record.reports.append(note)

    def get(self, request_id: str) -> Record | None:
        """The newest decision for a request."""
        return self._records.get(request_id)


def weighed_candidates(choice: Choice) -> list[WeighedCandidate]:
    """The candidates of a decision, best first, at most `CANDIDATES_MAX`; those removed by a filter last."""
    pairs = sorted(_pairs(choice), key=lambda candidate: candidate.cost)
    removed = (
        WeighedCandidate(
            prefill=target if worker.role is Role.PREFILL else None,
            decode=target if worker.role is not Role.PREFILL else None,
            removed_by=reason,
        )
        for worker, reason in choice.pool.removed
        for target in worker.targets
    )
    return [*pairs[:CANDIDATES_MAX], *islice(removed, CANDIDATES_MAX)]


def _pairs(choice: Choice) -> Iterator[WeighedCandidate]:
    """An infinite cost is that of a candidate with a full half, or one that the policy did not consider."""
    for prefill, decode, cost, terms in choice.pairs():
        yield WeighedCandidate(
            prefill=prefill, decode=decode, cost=cost, terms=terms, removed_by="" if cost < inf else "full"
        )
