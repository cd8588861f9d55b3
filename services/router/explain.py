"""What was weighed for the newest placements: a bounded history by request id. Pure.

A decision costs its record a few references; candidates, margin and what took each worker off are worked out when somebody
asks. Told is what counted at the moment of the decision, whatever became of the workers since.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isfinite

from kvmesh.core import Ask, Placement, ReportKind, Role
from kvmesh.core.routing import SETTLING
from kvmesh.errors import MeshError, OverloadedError
from services.router.placement.decision import Choice
from services.router.placement.placer import Placer
from services.router.placement.policies import LegKind, Policy
from services.router.placement.pools import Pool, Side
from services.router.workers.fleet import Worker
from services.router.workers.target import Target

REPORTS_MAX = 16
CANDIDATES_MAX = 256


@dataclass(slots=True, kw_only=True)
class ReportNote:
    """A report as it came. Nobody changes it; one is made per report, so it is not frozen, which would take twice as long."""

    kind: ReportKind
    elapsed_s: float
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: MeshError | None = None
    failed_worker_id: str = ""
    reservation_id: str = ""
    is_answered_by_prefill: bool = False


@dataclass(slots=True)
class Record:
    """One decision. `choice` and `placement` are None exactly when it was refused with `error`, or waits.

    `considered` is the pool of the request's kind, before the filters that are the request's own; None: there was none, and
    `removed` says who was taken off by which filter.
    """

    ask: Ask
    ask_id: int
    by: Policy
    decided_at_s: float
    choice: Choice | None = None
    considered: Pool | None = None
    removed: Sequence[tuple[Worker, str]] = ()
    placement: Placement | None = None
    error: MeshError | None = None
    reports: list[ReportNote] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.ask.request_id

    @property
    def policy(self) -> str:
        """The word by which the policy was found."""
        return self.by.name

    @property
    def cost_unit(self) -> str:
        """The policy's."""
        return self.by.cost_unit

    def refused(self, error: MeshError, placer: Placer) -> None:
        """It came to nothing."""
        self.error = error
        self.considered = placer.considered
        self.removed = () if placer.considered is not None else placer.removed(self.ask)

    @property
    def queued_s(self) -> float | None:
        """How long it waited in the queue; None: not at all."""
        return self.placement.queued_s if self.placement is not None else None

    @property
    def observed_ttft_s(self) -> float | None:
        """From the ask's arrival to the first token; None: none was reported."""
        for note in self.reports:
            if note.kind is ReportKind.FIRST_TOKEN:
                return note.elapsed_s + (self.queued_s or 0.0)
        return None


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
        records, request_id = self._records, record.ask.request_id
        records[request_id] = record
        records.move_to_end(request_id)
        if len(records) > self._records_max:
            records.popitem(last=False)

    def note(self, request_id: str, note: ReportNote) -> None:
        """Adds a report to a remembered decision, up to a bound; the one that settles always finds room."""
        record = self._records.get(request_id)
        if record is None:
            return
        if len(record.reports) < REPORTS_MAX:
            record.reports.append(note)
        elif note.kind in SETTLING:
            record.reports[-1] = note

    def get(self, request_id: str) -> Record | None:
        """The newest decision for a request; for one of several prompts, `ID.0`, `ID.1`, the id before the dot will do."""
        record = self._records.get(request_id)
        if record is None:
            stem = f"{request_id}."
            record = next((self._records[name] for name in reversed(self._records) if name.startswith(stem)), None)
        return record


def candidates_of(record: Record) -> list[WeighedCandidate]:
    """All candidates of a decision, best first, those that were taken off last; at most `CANDIDATES_MAX` of either."""
    weighed = weighed_candidates(record.choice) if record.choice is not None else []
    return [*weighed, *islice(_taken_off(record), CANDIDATES_MAX)]


def weighed_candidates(choice: Choice) -> list[WeighedCandidate]:
    """The candidates that were weighed, best first, at most `CANDIDATES_MAX`."""
    return sorted(_pairs(choice), key=lambda candidate: candidate.cost)[:CANDIDATES_MAX]


def margin_of(choice: Choice) -> float | None:
    """By how much the chosen pair beat the best of the others; 0 where chance chose a worse one; None without others."""
    others = [pair.cost for pair in _pairs(choice) if (pair.prefill, pair.decode) != (choice.prefill, choice.decode)]
    return max(0.0, min(others) - choice.cost) if others else None


def _taken_off(record: Record) -> Iterator[WeighedCandidate]:
    pool = record.considered
    if pool is None:
        yield from _filtered(record.removed)
        return
    sides = ((Role.PREFILL, pool.prefills), (Role.DECODE, pool.decodes))
    pins = (record.ask.pinned_prefill_worker_id, record.ask.pinned_decode_worker_id)
    for (role, side), pinned in zip(sides, pins, strict=True):
        for target in side.targets:
            if reason := _own_filter(record, role, target, pinned):
                yield _removed(target, role, reason)
    yield from _filtered(pool.removed)


def _own_filter(record: Record, role: Role, target: Target, pinned: str) -> str:
    """What took a member of its kind's pool off for this request; empty: it was weighed."""
    worker_id = target.worker.worker_id
    if worker_id in record.ask.excluded_worker_ids:
        return "excluded"
    if pinned and worker_id != pinned:
        return "pinned"
    if record.choice is not None:
        return _left_out(record.choice, role, target)
    # It waits or was refused for want of room; or those that the request allows are gone, and this one is not to blame.
    return "full" if record.error is None or isinstance(record.error, OverloadedError) else ""


def _left_out(choice: Choice, role: Role, target: Target) -> str:
    """Why a candidate that the request allows is in no pair; empty: it is in one."""
    side: Side = choice.pool.prefills if role is Role.PREFILL else choice.pool.decodes
    place = side.place_of(target)
    if place is None:
        return "full"
    if len(choice.legs) == 1 and role is Role.PREFILL:
        return choice.reasons[0]
    leg = choice.legs[0 if role is Role.PREFILL else -1]
    if not isfinite(leg.costs[place]):
        # Of those that the decision left out the terms are finite: they had room, and were not near enough.
        has_room = all(isfinite(column[place]) for column in leg.columns.values())
        return choice.reasons[0] if has_room and leg.kind is LegKind.ALONE else "full"
    if leg.kind is LegKind.ALONE:
        return ""
    stretches = [group.prefills if role is Role.PREFILL else group.decodes for group in choice.pool.groups]
    return "" if any(stretch.start <= place < stretch.stop for stretch in stretches) else "incompatible"


def _filtered(removed: Sequence[tuple[Worker, str]]) -> Iterator[WeighedCandidate]:
    return (_removed(target, worker.role, reason) for worker, reason in removed for target in worker.targets)


def _removed(target: Target, role: Role, reason: str) -> WeighedCandidate:
    if role is Role.PREFILL:
        return WeighedCandidate(prefill=target, removed_by=reason)
    return WeighedCandidate(decode=target, removed_by=reason)


def _pairs(choice: Choice) -> Iterator[WeighedCandidate]:
    """Pairs of two that take requests; an infinite cost has a full half, or one that the policy did not consider."""
    for prefill, decode, cost, terms in choice.pairs():
        if cost < inf:
            yield WeighedCandidate(prefill=prefill, decode=decode, cost=cost, terms=terms)
