"""The newest decisions by request id, and their explanations. Pure.

A decision costs its record a few references. Candidates, margin and filters are worked out on request, from the state at the
moment of the decision.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite

from kvmesh.core import Ask, Candidate, EarlierPlacement, Explanation, Placement, Report, ReportKind, Role, WorkerRef
from kvmesh.core.routing import SETTLING
from kvmesh.errors import MeshError, OverloadedError
from services.router.placement.bad_pairs import KV_PATH_FAILING
from services.router.placement.decision import PlacementDecision
from services.router.placement.placer import Placer
from services.router.placement.policies import LegKind, Policy
from services.router.placement.pools import Pool
from services.router.workers.worker import RegisteredWorker, Target

REPORTS_MAX = 16
"""Reports that a record keeps; a request has three or four."""
EARLIER_MAX = 16
"""Placements of a request before its newest one that a record keeps."""
CANDIDATES_MAX = 256
"""Candidates in one answer, and as many removed ones."""


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    """What happened to one ask. `decision` and `placement` are None while it waits and when it was refused with `error`."""

    ask: Ask
    ask_id: int
    policy: Policy
    decided_at_s: float
    decision: PlacementDecision | None = None
    considered: Pool | None = None
    """The pool of the request's kind, before the request's own filters. None: there was none, see `removed`."""
    removed: Sequence[tuple[RegisteredWorker, str]] = ()
    placement: Placement | None = None
    error: MeshError | None = None
    reports: list[Report] = field(default_factory=list)
    earlier: Sequence[EarlierPlacement] = ()
    """The request's placements before this one, oldest first."""

    def refuse(self, error: MeshError, placer: Placer) -> None:
        self.error = error
        self.considered = placer.considered
        self.removed = () if placer.considered is not None else placer.removed(self.ask)

    @property
    def queued_s(self) -> float | None:
        """Time in the queue. None: it did not wait."""
        return self.placement.queued_s if self.placement is not None else None

    @property
    def observed_ttft_s(self) -> float | None:
        """From the ask's arrival to the first token. None: none was reported."""
        for report in self.reports:
            if report.kind is ReportKind.FIRST_TOKEN:
                return report.elapsed_s + (self.queued_s or 0.0)
        return None


class DecisionHistory:
    """The newest decisions. That of a request which is placed again keeps a summary of those before it."""

    def __init__(self, records_max: int) -> None:
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._records_max = records_max
        self.on_finished: Callable[[DecisionRecord, Report], None] | None = None
        """Called with requests that finished, if it is set."""

    def add(self, record: DecisionRecord) -> None:
        if self._records_max == 0:
            return
        records, request_id = self._records, record.ask.request_id
        if record.ask.attempt and (before := records.get(request_id)) is not None and before is not record:
            record.earlier = _with_earlier(before, record.ask.attempt)
        records[request_id] = record
        records.move_to_end(request_id)
        if len(records) > self._records_max:
            records.popitem(last=False)

    def add_report(self, request_id: str, report: Report) -> None:
        """Adds a report to a record. When the record is full only the report that settles replaces another one."""
        record = self._records.get(request_id)
        if record is None:
            return
        if len(record.reports) < REPORTS_MAX:
            record.reports.append(report)
        elif report.kind in SETTLING:
            record.reports[-1] = report
        if self.on_finished is not None and report.kind is ReportKind.FINISHED:
            self.on_finished(record, report)

    def newest_first(self) -> Iterator[DecisionRecord]:
        """Returns the records, newest first. The history must not change during the iteration."""
        return reversed(self._records.values())

    def get(self, request_id: str) -> DecisionRecord | None:
        """Returns the newest decision for a request. Of a request with several prompts, `ID.0`, `ID.1`, the newest one for `ID`."""
        record = self._records.get(request_id)
        if record is None:
            prefix = f"{request_id}."
            record = next((self._records[name] for name in reversed(self._records) if name.startswith(prefix)), None)
        return record


def _with_earlier(before: DecisionRecord, attempt: int) -> Sequence[EarlierPlacement]:
    """Returns the placements before `attempt`. An ask that is repeated at another router has its number, and replaces it."""
    if before.ask.attempt >= attempt:
        return before.earlier
    summary = EarlierPlacement(
        attempt=before.ask.attempt,
        decided_at_s=before.decided_at_s,
        placement=before.placement,
        error=before.error,
        reports=before.reports,
        prompt_tokens=before.ask.prompt_tokens,
    )
    return [*before.earlier, summary][-EARLIER_MAX:]


def explain(record: DecisionRecord) -> Explanation:
    """Returns the explanation of a decision."""
    return Explanation(
        request_id=record.ask.request_id,
        policy=record.policy.name,
        decided_at_s=record.decided_at_s,
        candidates=explain_candidates(record),
        placement=record.placement,
        error=record.error,
        ask_id=record.ask_id,
        reports=record.reports,
        margin=cost_margin(record.decision) if record.decision is not None else None,
        observed_ttft_s=record.observed_ttft_s,
        queued_s=record.queued_s,
        cost_unit=record.policy.cost_unit,
        attempt=record.ask.attempt,
        prompt_tokens=record.ask.prompt_tokens,
        earlier=record.earlier,
    )


def explain_candidates(record: DecisionRecord) -> list[Candidate]:
    """Returns the candidates of a decision, best first, then those that were removed; at most `CANDIDATES_MAX` of either."""
    scored = scored_candidates(record.decision) if record.decision is not None else []
    return [*scored, *islice(_removed_candidates(record), CANDIDATES_MAX)]


def scored_candidates(decision: PlacementDecision) -> list[Candidate]:
    """Returns the candidates with a finite cost, best first, at most `CANDIDATES_MAX`. The chosen one is among them, first of its cost."""
    chosen = _chosen(decision)
    ordered = sorted(_finite_candidates(decision), key=lambda each: (each.cost, (each.prefill, each.decode) != chosen))
    first, rest = ordered[:CANDIDATES_MAX], ordered[CANDIDATES_MAX:]
    # A draw may take a pair that is not among the best.
    late = [each for each in rest if (each.prefill, each.decode) == chosen]
    return [*first[: CANDIDATES_MAX - len(late)], *late]


def cost_margin(decision: PlacementDecision) -> float | None:
    """Returns how much cheaper the chosen pair is than the best other one; 0 if a draw took a more expensive one. None: there is no other."""
    chosen = _chosen(decision)
    others = [each.cost for each in _finite_candidates(decision) if (each.prefill, each.decode) != chosen]
    return max(0.0, min(others) - decision.cost) if others else None


def _chosen(decision: PlacementDecision) -> tuple[WorkerRef | None, WorkerRef]:
    return (decision.prefill.ref if decision.prefill is not None else None, decision.decode.ref)


def _finite_candidates(decision: PlacementDecision) -> Iterator[Candidate]:
    """Returns the candidates with a finite cost. Full workers and those that the decision left out have an infinite one."""
    return (each for each in decision.candidates() if isfinite(each.cost))


def _removed_candidates(record: DecisionRecord) -> Iterator[Candidate]:
    pool = record.considered
    if pool is not None:
        sides = ((Role.PREFILL, pool.prefills), (Role.DECODE, pool.decodes))
        pins = (record.ask.pinned_prefill_worker_id, record.ask.pinned_decode_worker_id)
        for (role, side), pinned in zip(sides, pins, strict=True):
            for target in side.targets:
                if reason := _removed_by_request(record, role, target, pinned=pinned):
                    yield _removed_candidate(target, role, reason)
    if pool is not None:
        yield from _failing_pairs(pool)
    for worker, reason in pool.removed if pool is not None else record.removed:
        for target in worker.targets:
            yield _removed_candidate(target, worker.role, reason)


def _failing_pairs(pool: Pool) -> Iterator[Candidate]:
    for decode, failing in pool.failing:
        for prefill in pool.prefills.targets:
            if prefill.worker.worker_id in failing:
                yield Candidate(prefill=prefill.ref, decode=decode.ref, removed_by=KV_PATH_FAILING)


def _removed_by_request(record: DecisionRecord, role: Role, target: Target, *, pinned: str) -> str:
    """Returns why a candidate of its kind's pool was not taken into account for this request. Empty: it was."""
    worker_id = target.worker.worker_id
    if worker_id in record.ask.excluded_worker_ids:
        return "excluded"
    if pinned and worker_id != pinned:
        return "pinned"
    if record.decision is not None:
        return _removed_by_decision(record.decision, role, target)
    # The ask waits, or was refused because all were full; or the workers that it allows are gone, which is not the fault of this one.
    return "full" if record.error is None or isinstance(record.error, OverloadedError) else ""


def _removed_by_decision(decision: PlacementDecision, role: Role, target: Target) -> str:
    """Returns why a candidate that the request allows is in no pair. Empty: it is in one."""
    side = decision.pool.prefills if role is Role.PREFILL else decision.pool.decodes
    position = side.position_of(target)
    if position is None:
        return "full"
    if len(decision.legs) == 1 and role is Role.PREFILL:
        return decision.reasons[0]
    leg = decision.legs[0 if role is Role.PREFILL else -1]
    if not isfinite(leg.costs[position]):
        # The terms of a candidate that the decision left out are finite: it had room.
        has_room = all(isfinite(values[position]) for values in leg.terms.values())
        return decision.reasons[0] if has_room and leg.candidates.kind is LegKind.ALONE else "full"
    if leg.candidates.kind is LegKind.ALONE:
        return ""
    slices = [group.prefills if role is Role.PREFILL else group.decodes for group in decision.pool.groups]
    return "" if any(each.start <= position < each.stop for each in slices) else "incompatible"


def _removed_candidate(target: Target, role: Role, reason: str) -> Candidate:
    if role is Role.PREFILL:
        return Candidate(prefill=target.ref, removed_by=reason)
    return Candidate(decode=target.ref, removed_by=reason)
