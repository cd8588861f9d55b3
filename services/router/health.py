"""What is known of the workers' health beyond registry and streams: breakers, wedges, overlap that cannot be. Pure.

The one owner of `Worker.health_fault`, by which a worker leaves and enters the pools. News goes to `events`, which the
router's clockwork logs and counts; the newest `EVENTS_MAX` are kept when nobody does.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.core import Ask, LoadRecord, ReportKind, Role
from kvmesh.core.routing import FINISHED, FIRST_TOKEN, PREFILLED
from kvmesh.errors import (
    DeadlineError,
    InternalError,
    KvLostError,
    LostError,
    MeshError,
    UnavailableError,
)
from kvmesh.settings import setting
from services.router.breaker import CLOSED, NEVER_S, Breaker, BreakerSettings, BreakerState
from services.router.overlap import (
    ADVICE,
    OverlapFault,
    OverlapSettings,
    OverlapWatch,
    is_repeat,
    repeated,
    size_mismatch,
)
from services.router.wedge import StepWatch, WedgeSettings

if TYPE_CHECKING:
    from services.router.fleet import Worker
    from services.router.reservations import Reservation
    from services.router.target import Target

EVENTS_MAX = 1000
STALL_S = 2.0
"""`check` comes each second. When it did not for so long the router itself stood still, and what it did not hear meanwhile is
nobody's silence."""
TOLD_MAX = 1000
BREAKER_OPEN, WEDGED = "breaker_open", "wedged"
WORKER_FAULTS = (UnavailableError, LostError, KvLostError, DeadlineError, InternalError)
"""Failures that a worker answers for; a refusal for load or of a wrong request is none."""
NO_FAULTS = frozenset({"draining", "worker_stopping", "link_closed", "links_closed"})
"""Reasons of such failures that belong to an orderly stop, or to the frontend's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Which workers get no requests although they are there."""

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    wedge: WedgeSettings = field(default_factory=WedgeSettings)
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    labelled_workers_max: int = setting(
        64, "Workers that the metric of prediction errors tells apart; those beyond share one label.", min=0, max=10_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """News of a worker, for log and metrics. `kind` is from a closed set and in the past tense."""

    kind: str
    worker_id: str
    model: str = ""
    cause: str = ""
    message: str = ""


GOOD_NEWS = frozenset({"breaker_closed", "worker_recovered"})
BAD_NEWS = frozenset({"breaker_opened", "worker_wedged", "overlap_impossible"})


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerHealth:
    """One worker's, since its process began."""

    breaker: Breaker
    steps: Sequence[StepWatch]
    overlap: OverlapWatch = field(default_factory=OverlapWatch)
    is_wedged: bool = False

    @property
    def fault(self) -> str:
        """Why it gets no requests; empty: it gets some."""
        if self.is_wedged:
            return WEDGED
        if self.breaker.admits:
            return ""
        return WEDGED if self.breaker.cause == WEDGED else BREAKER_OPEN


class Health:
    """All workers' health. `workers` is the fleet's own table, `on_change` is called when a worker leaves or enters the pools."""

    def __init__(
        self, settings: HealthSettings, workers: Mapping[str, "Worker"], on_change: Callable[[], None]
    ) -> None:
        self.settings = settings
        self._workers = workers
        self._on_change = on_change
        self._known: dict[str, WorkerHealth] = {}
        self._shut: dict[str, WorkerHealth] = {}
        """Those whose breaker is not closed."""
        self._told: set[tuple[str, OverlapFault]] = set()
        self._checked_at = NEVER_S
        self._resumed_at = -NEVER_S
        self.turns_at = NEVER_S
        """When `turn` has something to do."""
        self.events: deque[HealthEvent] = deque(maxlen=EVENTS_MAX)

    def of(self, worker: "Worker") -> WorkerHealth:
        """A worker's health."""
        health = self._known.get(worker.worker_id)
        if health is None:
            health = self.began(worker)
        return health

    def began(self, worker: "Worker") -> WorkerHealth:
        """The worker is a new process: what the one before did is forgotten."""
        health = self._known[worker.worker_id] = WorkerHealth(
            breaker=Breaker(self.settings.breaker),
            steps=[StepWatch(self.settings.wedge) for _ in range(max(1, len(worker.targets)))],
        )
        self._update(worker, health)
        return health

    def left(self, worker_id: str) -> None:
        """The worker is no longer listed."""
        self._known.pop(worker_id, None)
        self._shut.pop(worker_id, None)

    def turn(self, now: float) -> None:
        """Lets open breakers try again whose pause is over."""
        if now < self.turns_at:
            return
        for worker_id, health in list(self._shut.items()):
            health.breaker.turn(now)
            self._update(self._workers[worker_id], health)

    def placed(self, reservation: "Reservation", ask: Ask, now: float, holders: Callable[[int], int]) -> None:
        """A request was placed. `holders` gives the bit set of those whose events name a block."""
        if self._shut:
            for target in (reservation.prefill, reservation.decode):
                if target is not None and target.worker.worker_id in self._shut:
                    self._judge(target.worker, Breaker.placed, reservation.reservation_id, now)
        if ask.block_hashes:
            self._watch_overlap(reservation.prefill or reservation.decode, ask, now, holders)

    def reported(
        self, reservation: "Reservation", kind: ReportKind, error: MeshError | None, failed: str, now: float
    ) -> None:
        """News of a placed request. `failed` is the worker that the frontend blames; empty: none."""
        prefill, decode = reservation.prefill, reservation.decode
        name = reservation.reservation_id
        if kind is PREFILLED:
            if prefill is not None:
                self._judge(prefill.worker, Breaker.succeeded, name, now)
        elif kind is FIRST_TOKEN:
            if self._shut:
                self._judge(decode.worker, Breaker.began, name, now)
        elif kind is FINISHED:
            self._judge(decode.worker, Breaker.succeeded, name, now)
        elif kind.settles:
            culprit = failed if kind is ReportKind.FAILED and is_worker_fault(error) else ""
            for target in (prefill, decode):
                if target is not None:
                    worker = target.worker
                    verdict = Breaker.failed if worker.worker_id == culprit else Breaker.returned
                    self._judge(worker, verdict, name, now)

    def spared(self, reservation: "Reservation", now: float) -> None:
        """It ended well without its decode worker, of which that says nothing."""
        self._judge(reservation.decode.worker, Breaker.returned, reservation.reservation_id, now)

    def heard(self, worker: "Worker", record: LoadRecord, now: float) -> None:
        """A load record came: does the worker step?"""
        self.turn(now)
        health = self.of(worker)
        rank = record.data_parallel_rank
        if rank >= len(health.steps) or rank >= len(worker.targets):
            return
        if self._stands_still(now):
            for watch in health.steps:
                watch.excuse(now)
        has_moved = health.steps[rank].told(record, now)
        is_stuck = any(
            watch.is_stuck(now, self._allowed_s(target, watch))
            for target, watch in zip(worker.targets, health.steps, strict=False)
        )
        if is_stuck and not health.is_wedged:
            health.is_wedged = True
            self._tell(worker, "worker_wedged", cause="told_work")
        elif health.is_wedged and not is_stuck:
            health.is_wedged = False
            if has_moved:
                self._recovered(worker, health, now)
            else:
                # Its work is gone, not done: whether it lives is for probes to show.
                health.breaker.trip(now, WEDGED)
        elif has_moved and health.breaker.cause == WEDGED:
            self._recovered(worker, health, now)
        self._update(worker, health)

    def broke(self, worker: "Worker", reason: str, now: float) -> None:
        """A stream of it broke. Silence opens its breaker; a dead process is a new one when it is back."""
        if reason == "silent" and worker.worker_id in self._known and not self._stands_still(now):
            self._trip(worker, "silent", now)

    def check(self, reservations: Iterable["Reservation"], now: float) -> None:
        """Once in a while: lets breakers turn, and looks for placements that are overdue on workers that show no work."""
        self.turn(now)
        is_excused = self._stands_still(now)
        self._checked_at = now
        if is_excused:
            return
        suspects = {
            target: watch
            for worker in self._workers.values()
            if not worker.excluded_by and worker.worker_id in self._known
            for target, watch in zip(worker.targets, self._known[worker.worker_id].steps, strict=False)
            if target.requests_in_flight and not watch.has_stepped_since(now - self.settings.wedge.wait_min_s)
        }
        if not suspects:
            return
        for reservation in reservations:
            target = reservation.computing
            watch = suspects.get(target)
            if watch is None or reservation.is_orphaned:
                continue
            allowed_s = self._allowed_s(target, watch)
            if now - self._resumed_at > allowed_s and watch.is_overdue(now, allowed_s, reservation.due_at):
                del suspects[target]
                self._tell(target.worker, "worker_wedged", cause="overdue_placements")
                self._trip(target.worker, WEDGED, now)

    def half_open_early(self, paused: Iterable["Worker"], now: float) -> bool:
        """Lets one of the decode workers that are all paused take a trial request: the one whose pause ends first.

        False while the trial of another is under way, and during the first `pause_min_s` of a pause.
        """
        workers = [worker for worker in paused if worker.excluded_by == BREAKER_OPEN]
        breakers = [self.of(worker).breaker for worker in workers]
        if any(breaker.state is BreakerState.HALF_OPEN for breaker in breakers):
            return False
        waits = zip(breakers, workers, strict=True)
        first = min(waits, key=lambda pair: (pair[0].retry_after_s(now), pair[1].worker_id), default=None)
        if first is None or not first[0].half_open_early(now):
            return False
        self._update(first[1], self.of(first[1]))
        return True

    def refusal(self, error: MeshError, model: str, now: float) -> MeshError:
        """What a request is refused with: says so, and for how long, when it is for breakers that nobody takes it."""
        if error.reason != "no_worker":
            return error
        waits = [
            self.of(worker).breaker.early_after_s(now)
            if worker.excluded_by == BREAKER_OPEN
            else self.of(worker).breaker.retry_after_s(now)
            for worker in self._workers.values()
            if worker.role is Role.DECODE and worker.excluded_by in (BREAKER_OPEN, WEDGED) and _model(worker) == model
        ]
        if not waits:
            return error
        wait_s = max(min(waits), self.settings.breaker.pause_min_s / 10)
        message = f"all decode workers of model {model!r} that are left failed or hang; the next is tried again in {wait_s:.1f} s"
        return UnavailableError(message, reason="breakers_open", retry_after_s=wait_s)

    def count(self, state: BreakerState) -> int:
        """Workers whose breaker is in that state."""
        return sum(1 for health in self._known.values() if health.breaker.state is state)

    def wedged(self) -> int:
        """Workers that count as wedged."""
        return sum(1 for health in self._known.values() if health.fault == WEDGED)

    def faulty(self, fault: OverlapFault) -> int:
        """Workers whose blocks can never match, for that reason."""
        return sum(1 for health in self._known.values() if health.overlap.fault is fault)

    def _stands_still(self, now: float) -> bool:
        """True when the router itself did nothing for a while, up to a moment ago."""
        if now - self._checked_at > STALL_S:
            self._resumed_at = now
        return now - self._resumed_at < STALL_S

    def _allowed_s(self, target: "Target", watch: StepWatch) -> float:
        description = target.worker.description
        return watch.allowed_s(description.profile if description else None, target.prompt_tokens_queued)

    def _judge(
        self, worker: "Worker", verdict: Callable[[Breaker, str, float], None], reservation_id: str, now: float
    ) -> None:
        health = self._known.get(worker.worker_id)
        if health is None or self._workers.get(worker.worker_id) is not worker:
            return  # The worker has left; its reservations outlive it.
        breaker = health.breaker
        before = breaker.state
        verdict(breaker, reservation_id, now)
        if before is not CLOSED or breaker.state is not CLOSED:
            self._turned(worker, health, before)

    def _trip(self, worker: "Worker", cause: str, now: float) -> None:
        health = self.of(worker)
        before = health.breaker.state
        health.breaker.trip(now, cause)
        self._turned(worker, health, before)

    def _turned(self, worker: "Worker", health: WorkerHealth, before: BreakerState) -> None:
        after = health.breaker.state
        if after is not before and after is BreakerState.OPEN:
            self._tell(worker, "breaker_opened", cause=health.breaker.cause)
        elif after is not before and after is BreakerState.CLOSED:
            self._tell(worker, "breaker_closed")
        self._update(worker, health)

    def _recovered(self, worker: "Worker", health: WorkerHealth, now: float) -> None:
        if health.breaker.cause in ("", WEDGED):
            health.breaker.close(now)
        self._tell(worker, "worker_recovered")

    def _watch_overlap(self, target: "Target", ask: Ask, now: float, holders: Callable[[int], int]) -> None:
        worker = target.worker
        health = self.of(worker)
        watch = health.overlap
        if watch.has_matched and watch.fault is None and ask.block_size_tokens == target.block_size_tokens:
            return  # As it is with nearly all.
        feed, description = worker.feed, worker.description
        if ask.block_size_tokens != target.block_size_tokens or watch.fault is OverlapFault.BLOCK_SIZE:
            if size_mismatch(watch, ask.block_size_tokens, target.block_size_tokens):
                self._overlap_fault(worker, health)
            return
        if watch.has_matched or feed is None or description is None or feed.trust != "exact":
            return
        first_hash = ask.block_hashes[0]
        if is_repeat(watch, self.settings.overlap, first_hash, now) and repeated(
            watch,
            self.settings.overlap,
            is_held=bool(holders(first_hash) >> target.bits[target.rank] & 1),
            blocks_told=feed.blocks,
            blocks_total=description.kv_blocks_total,
        ):
            self._overlap_fault(worker, health)

    def _overlap_fault(self, worker: "Worker", health: WorkerHealth) -> None:
        fault = health.overlap.fault
        key = (_model(worker), fault)
        if fault is None or key in self._told:
            return
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._told.add((_model(worker), fault))
        self._tell(worker, "overlap_impossible", cause=fault.value, message=ADVICE[fault])

    def _tell(self, worker: "Worker", kind: str, *, cause: str = "", message: str = "") -> None:
        self.events.append(
            HealthEvent(kind=kind, worker_id=worker.worker_id, model=_model(worker), cause=cause, message=message)
        )

    def _update(self, worker: "Worker", health: WorkerHealth) -> None:
        if health.breaker.state is BreakerState.CLOSED:
            self._shut.pop(worker.worker_id, None)
        else:
            self._shut[worker.worker_id] = health
        self.turns_at = min((shut.breaker.turns_at for shut in self._shut.values()), default=NEVER_S)
        if worker.health_fault != health.fault:
            worker.health_fault = health.fault
            self._on_change()


def is_worker_fault(error: MeshError | None) -> bool:
    """True for a failure that the blamed worker answers for."""
    return isinstance(error, WORKER_FAULTS) and error.reason not in NO_FAULTS


def _model(worker: "Worker") -> str:
    return worker.description.model.name if worker.description is not None else ""
