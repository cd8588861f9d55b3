"""Decides which workers get no requests although they are registered and connected: circuit breakers, wedged engines, and caches whose
hashes cannot match. Pure; times are arguments.

Only this module writes `RegisteredWorker.health_fault`. Changes are kept as events, which the maintenance loop logs and counts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core import Ask, LoadRecord, Report, ReportKind, Role
from kvmesh.core.routing import FINISHED, FIRST_TOKEN, PREFILLED
from kvmesh.errors import (
    DeadlineError,
    InternalError,
    KvLostError,
    LostError,
    MeshError,
    UnavailableError,
)
from services.router.health.breaker import NEVER_S, Breaker, BreakerSettings, BreakerState
from services.router.health.overlap import ADVICE, OverlapFault, OverlapWatch
from services.router.health.paths import PATHS_OPEN, PAUSE_MAX_S, PathBreakers, is_link_fault
from services.router.health.wedge import StepWatch
from services.router.workers.reservations import Reservation
from services.router.workers.worker import RegisteredWorker, Target

EVENTS_MAX = 1000
"""Newest events that are kept until the caller takes them."""
STALL_S = 2.0
"""`check` is called every second. After a pause of this length the router itself was suspended, and silence of workers proves nothing."""
ANNOUNCED_FAULTS_MAX = 1000
"""Pairs of model and overlap fault that were announced; beyond, they are announced again."""
BREAKER_OPEN, WEDGED = "breaker_open", "wedged"
FRONTENDS_AGREE = "frontends_agree"
"""Cause of a breaker that opened because several frontends lost the worker."""
WORKER_FAULTS = (UnavailableError, LostError, KvLostError, DeadlineError, InternalError)
"""Errors that a worker is to blame for; a refusal for load, or of a wrong request, is not among them."""
NO_FAULT_REASONS = frozenset({"draining", "worker_stopping", "link_closed", "links_closed", "role_changed"})
"""Reasons of such errors that belong to an orderly stop, or to the frontend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """A change of a worker's health, for log and metrics. `kind` is from a closed set."""

    kind: str
    worker_id: str
    model: str = ""
    cause: str = ""
    advice: str = ""
    frontend_id: str = ""


GOOD_EVENTS = frozenset({"breaker_closed", "path_closed", "worker_recovered"})


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerHealth:
    """The health of one worker process."""

    breaker: Breaker
    steps: Sequence[StepWatch]
    overlap: OverlapWatch = field(default_factory=OverlapWatch)
    is_wedged: bool = False
    answered_at: float = -NEVER_S
    """When a frontend last reported an answer of the worker."""

    @property
    def fault(self) -> str:
        """Why the worker gets no requests; empty when it gets some."""
        if self.is_wedged:
            return WEDGED
        if self.breaker.admits:
            return ""
        return WEDGED if self.breaker.cause == WEDGED else BREAKER_OPEN


class HealthMonitor:
    """The health of all workers. `workers` is the fleet's table; `on_change` is called when a worker leaves or enters the pools."""

    def __init__(
        self, settings: BreakerSettings, workers: Mapping[str, RegisteredWorker], on_change: Callable[[], None]
    ) -> None:
        self._breaker_settings = settings
        self._workers = workers
        self._on_change = on_change
        self._health: dict[str, WorkerHealth] = {}
        self.paths = PathBreakers(settings)
        self._not_closed: dict[str, WorkerHealth] = {}
        """Those whose breaker is not closed."""
        self._announced_faults: set[tuple[str, OverlapFault]] = set()
        self._checked_at = NEVER_S
        self._resumed_at = -NEVER_S
        self._next_change_at = NEVER_S
        self.events: deque[HealthEvent] = deque(maxlen=EVENTS_MAX)

    def health_of(self, worker: RegisteredWorker) -> WorkerHealth:
        return self._health.get(worker.worker_id) or self.reset_worker(worker)

    def reset_worker(self, worker: RegisteredWorker) -> WorkerHealth:
        """Starts the health record of a worker that is a new process, with a closed breaker."""
        self.paths.remove_worker(worker.worker_id)
        health = self._health[worker.worker_id] = WorkerHealth(
            breaker=Breaker(self._breaker_settings),
            steps=[StepWatch() for _ in range(max(1, len(worker.targets)))],
        )
        self._update(worker, health)
        return health

    def remove_worker(self, worker_id: str) -> None:
        self._health.pop(worker_id, None)
        self.paths.remove_worker(worker_id)
        self._not_closed.pop(worker_id, None)

    def advance(self, now: float) -> None:
        """Lets open breakers try again whose pause is over."""
        if now < self._next_change_at:
            return
        for worker_id, health in list(self._not_closed.items()):
            health.breaker.advance(now)
            self._update(self._workers[worker_id], health)

    def on_placed(self, reservation: Reservation, ask: Ask, *, now: float, holders_of: Callable[[int], int]) -> None:
        """A request was placed. `holders_of` returns the bits of the holders whose events named a block."""
        # Closed breakers ignore placements and first results.
        if self._not_closed or self.paths:
            for target in (reservation.prefill, reservation.decode):
                if target is not None:
                    self._apply(target.worker, Breaker.on_placed, reservation, now=now)
        if ask.block_hashes:
            self._check_overlap(reservation.computing_prompt, ask, now=now, holders_of=holders_of)

    def on_report(self, reservation: Reservation, report: Report, now: float) -> None:
        """Counts a report as success or failure of the workers that it is about."""
        prefill, decode, kind = reservation.prefill, reservation.decode, report.kind
        if report.is_answered_by_prefill:
            self._apply(decode.worker, Breaker.on_no_verdict, reservation, now=now)
        elif kind is PREFILLED:
            if prefill is not None:
                self._apply(prefill.worker, Breaker.on_success, reservation, now=now)
        elif kind is FIRST_TOKEN:
            # As in `on_placed`.
            if self._not_closed or self.paths:
                self._apply(decode.worker, Breaker.on_first_result, reservation, now=now)
        elif kind is FINISHED:
            self._apply(decode.worker, Breaker.on_success, reservation, now=now)
        elif kind.settles:
            is_fault = kind is ReportKind.FAILED and is_worker_fault(report.error)
            for target in (prefill, decode):
                if target is None:
                    continue
                if is_fault and target.worker.worker_id == report.failed_worker_id:
                    self._on_failure(target, reservation, report.error, now=now)
                else:
                    self._apply(target.worker, Breaker.on_no_verdict, reservation, now=now)

    def on_ended(self, reservation: Reservation, now: float) -> None:
        """A reservation ended. Without a final report, for example because its frontend never read the placement, it has no verdict."""
        if self._not_closed or self.paths:
            for target in (reservation.prefill, reservation.decode):
                if target is not None:
                    self._apply(target.worker, Breaker.on_no_verdict, reservation, now=now)

    def on_load_record(self, worker: RegisteredWorker, record: LoadRecord, now: float) -> None:
        """Checks whether the worker makes steps while it has work."""
        self.advance(now)
        health = self.health_of(worker)
        rank = record.data_parallel_rank
        if rank >= len(health.steps) or rank >= len(worker.targets):
            return
        if self._stood_still(now):
            for watch in health.steps:
                watch.excuse(now)
        has_stepped = health.steps[rank].on_load_record(record, now)
        is_stuck = any(
            watch.is_stuck(now, allowed_s=self._allowed_s(target, watch))
            for target, watch in zip(worker.targets, health.steps, strict=False)
        )
        if is_stuck and not health.is_wedged:
            health.is_wedged = True
            self._add_event(worker, "worker_wedged", cause="no_steps")
        elif health.is_wedged and not is_stuck:
            health.is_wedged = False
            if has_stepped:
                self._recover(worker, health, now)
            else:
                # The work disappeared without a step: probes must show that the worker is alive.
                health.breaker.trip(now, WEDGED)
        # The breaker was tripped by overdue placements or by work that disappeared. A step shows that the engine is alive.
        elif has_stepped and health.breaker.cause == WEDGED:
            self._recover(worker, health, now)
        self._update(worker, health)

    def on_disconnected(self, worker: RegisteredWorker, reason: str, now: float) -> None:
        """A stream of the worker broke. Silence opens its breaker; a process that died is a new one when it is back."""
        if reason == "silent" and worker.worker_id in self._health and not self._stood_still(now):
            self._trip(worker, "silent", now)

    def check(self, reservations: Iterable[Reservation], now: float) -> None:
        """Finds placements that are overdue on workers that report no work. To be called regularly."""
        self.advance(now)
        self.paths.forget_healthy(now)
        stood_still = self._stood_still(now)
        self._checked_at = now
        if stood_still:
            return
        # Few workers have requests and no recent step, while there may be thousands of reservations: usually there is nothing to search for.
        suspects = {
            target: watch
            for worker in self._workers.values()
            if not worker.excluded_by and worker.worker_id in self._health
            for target, watch in zip(worker.targets, self._health[worker.worker_id].steps, strict=False)
            if target.requests_in_flight and not watch.has_stepped_lately(now)
        }
        if not suspects:
            return
        for reservation in reservations:
            target = reservation.working
            watch = suspects.get(target)
            if watch is None or reservation.is_orphaned:
                continue
            allowed_s = self._allowed_s(target, watch)
            if now - self._resumed_at > allowed_s and watch.is_overdue(
                now, allowed_s=allowed_s, due_at=reservation.due_at
            ):
                # One event per target, however many of its placements are overdue.
                del suspects[target]
                self._add_event(target.worker, "worker_wedged", cause="overdue_placements")
                self._trip(target.worker, WEDGED, now)

    def half_open_early(self, paused: Iterable[RegisteredWorker], now: float) -> bool:
        """Lets the first of the decode workers that are all paused take a probe: the one whose pause ends first.

        False while another one has a probe in flight, and during the first `pause_min_s` of a pause.
        """
        workers = [worker for worker in paused if worker.excluded_by == BREAKER_OPEN]
        breakers = [self.health_of(worker).breaker for worker in workers]
        if any(breaker.state is BreakerState.HALF_OPEN for breaker in breakers):
            return False
        pairs = zip(breakers, workers, strict=True)
        first = min(pairs, key=lambda pair: (pair[0].retry_after_s(now), pair[1].worker_id), default=None)
        if first is None or not first[0].half_open_early(now):
            return False
        self._update(first[1], self.health_of(first[1]))
        return True

    def refusal(self, error: MeshError, *, frontend_id: str, model: str, now: float) -> MeshError:
        """Returns the error for the caller. If only breakers, paused paths and wedges leave no worker, it has a retry delay."""
        if error.reason == PATHS_OPEN:
            decodes = [w.worker_id for w in self._workers.values() if w.role is Role.DECODE and w.model_name == model]
            wait_s = self.paths.retry_after_s(frontend_id, decodes, now)
            error.retry_after_s = max(wait_s, self._breaker_settings.pause_min_s / 10)
            return error
        if error.reason != "no_worker":
            return error
        waits = [
            self.health_of(worker).breaker.early_after_s(now)
            if worker.excluded_by == BREAKER_OPEN
            else self.health_of(worker).breaker.retry_after_s(now)
            for worker in self._workers.values()
            if worker.role is Role.DECODE
            and worker.excluded_by in (BREAKER_OPEN, WEDGED)
            and worker.model_name == model
        ]
        if not waits:
            return error
        wait_s = max(min(waits), self._breaker_settings.pause_min_s / 10)
        message = f"all available decode workers of model {model!r} failed or hang; the router tries the next one in {wait_s:.1f} s"
        return UnavailableError(message, reason="breakers_open", retry_after_s=wait_s)

    def count_breakers(self, state: BreakerState) -> int:
        return sum(1 for health in self._health.values() if health.breaker.state is state)

    def count_wedged(self) -> int:
        return sum(1 for health in self._health.values() if health.fault == WEDGED)

    def count_overlap_faults(self, fault: OverlapFault) -> int:
        return sum(1 for health in self._health.values() if health.overlap.fault is fault)

    def _stood_still(self, now: float) -> bool:
        """Returns True if the router itself was suspended until a moment ago."""
        if now - self._checked_at > STALL_S:
            self._resumed_at = now
        return now - self._resumed_at < STALL_S

    def _allowed_s(self, target: Target, watch: StepWatch) -> float:
        description = target.worker.description
        return watch.allowed_s(description.profile if description else None, target.prompt_tokens_queued)

    def _apply(
        self,
        worker: RegisteredWorker,
        change: Callable[[Breaker, str, float], None],
        reservation: Reservation,
        *,
        now: float,
    ) -> None:
        health = self._health.get(worker.worker_id)
        if health is None or self._workers.get(worker.worker_id) is not worker:
            return  # The worker has left; reservations on it may exist longer.
        if change is Breaker.on_success:
            health.answered_at = now
        if self.paths:
            frontend_id = reservation.frontend_id
            # A failure that the worker itself reports came over the path.
            path_change = Breaker.on_first_result if change is Breaker.on_failure else change
            state = self.paths.apply(
                path_change,
                frontend_id=frontend_id,
                worker_id=worker.worker_id,
                reservation_id=reservation.reservation_id,
                now=now,
            )
            if state is BreakerState.CLOSED:
                self._add_event(worker, "path_closed", frontend_id=frontend_id)
        before = health.breaker.state
        change(health.breaker, reservation.reservation_id, now)
        if before is not BreakerState.CLOSED or health.breaker.state is not BreakerState.CLOSED:
            self._on_breaker_change(worker, health, before)

    def _on_failure(self, target: Target, reservation: Reservation, error: MeshError | None, *, now: float) -> None:
        """Counts a failure for the worker; if its link failed and other frontends use it too, for the path from this frontend."""
        worker, frontend_id = target.worker, reservation.frontend_id
        health = self._health.get(worker.worker_id)
        if health is None or target.column < 0:
            return  # The process that failed has been replaced, or its worker has left.
        if not is_link_fault(error):
            self._apply(worker, Breaker.on_failure, reservation, now=now)
        elif self.paths.is_sole(frontend_id):
            self._apply(worker, _on_link_failure, reservation, now=now)
        else:
            is_paused = self.paths.on_failure(
                frontend_id=frontend_id, worker_id=worker.worker_id, reservation_id=reservation.reservation_id, now=now
            )
            # The worker is not to blame, but if the request was a probe, another one may take its place.
            self._apply(worker, Breaker.on_no_verdict, reservation, now=now)
            if is_paused:
                self._add_event(worker, "path_opened", frontend_id=frontend_id)
                if self.paths.agree(worker.worker_id, answered_at=health.answered_at):
                    self._trip(worker, FRONTENDS_AGREE, now, pause_max_s=PAUSE_MAX_S)

    def _trip(self, worker: RegisteredWorker, cause: str, now: float, *, pause_max_s: float = NEVER_S) -> None:
        health = self.health_of(worker)
        before = health.breaker.state
        health.breaker.trip(now, cause, pause_max_s=pause_max_s)
        self._on_breaker_change(worker, health, before)

    def _on_breaker_change(self, worker: RegisteredWorker, health: WorkerHealth, before: BreakerState) -> None:
        after = health.breaker.state
        if after is not before and after is BreakerState.OPEN:
            self._add_event(worker, "breaker_opened", cause=health.breaker.cause)
        elif after is not before and after is BreakerState.CLOSED:
            self._add_event(worker, "breaker_closed")
        self._update(worker, health)

    def _recover(self, worker: RegisteredWorker, health: WorkerHealth, now: float) -> None:
        # A breaker that opened because requests failed stays open: steps do not show that requests succeed.
        if health.breaker.cause in ("", WEDGED):
            health.breaker.close(now)
        self._add_event(worker, "worker_recovered")

    def _check_overlap(self, target: Target, ask: Ask, *, now: float, holders_of: Callable[[int], int]) -> None:
        worker = target.worker
        watch = self.health_of(worker).overlap
        has_same_size = ask.block_size_tokens == target.block_size_tokens
        if watch.has_matched and watch.fault is None and has_same_size:
            return  # The ordinary case.
        feed, description = worker.feed, worker.description
        if not has_same_size or watch.fault is OverlapFault.BLOCK_SIZE:
            is_new_fault = watch.on_block_size(is_same=has_same_size)
        elif watch.has_matched or feed is None or description is None or feed.trust != "exact":
            return
        else:
            first_hash = ask.block_hashes[0]
            is_new_fault = watch.is_repeat(first_hash, now) and watch.on_repeat(
                is_cached=bool(holders_of(first_hash) >> target.bits[target.rank] & 1),
                cached_blocks=feed.blocks,
                blocks_total=description.kv_blocks_total,
            )
        if is_new_fault and watch.fault is not None:
            self._announce_overlap_fault(worker, watch.fault)

    def _announce_overlap_fault(self, worker: RegisteredWorker, fault: OverlapFault) -> None:
        """Once per model and fault."""
        key = (worker.model_name, fault)
        if key in self._announced_faults:
            return
        if len(self._announced_faults) >= ANNOUNCED_FAULTS_MAX:
            self._announced_faults.clear()
        self._announced_faults.add(key)
        self._add_event(worker, "overlap_impossible", cause=fault.value, advice=ADVICE[fault])

    def _add_event(
        self, worker: RegisteredWorker, kind: str, *, cause: str = "", advice: str = "", frontend_id: str = ""
    ) -> None:
        self.events.append(
            HealthEvent(
                kind=kind,
                worker_id=worker.worker_id,
                model=worker.model_name,
                cause=cause,
                advice=advice,
                frontend_id=frontend_id,
            )
        )

    def _update(self, worker: RegisteredWorker, health: WorkerHealth) -> None:
        if health.breaker.state is BreakerState.CLOSED:
            self._not_closed.pop(worker.worker_id, None)
        else:
            self._not_closed[worker.worker_id] = health
        self._next_change_at = min((each.breaker.next_change_at for each in self._not_closed.values()), default=NEVER_S)
        if worker.health_fault != health.fault:
            worker.health_fault = health.fault
            self._on_change()


def _on_link_failure(breaker: Breaker, reservation_id: str, now: float) -> None:
    breaker.on_failure(reservation_id, now, pause_max_s=PAUSE_MAX_S)


def is_worker_fault(error: MeshError | None) -> bool:
    """Returns True for an error that the named worker is to blame for."""
    return isinstance(error, WORKER_FAULTS) and error.reason not in NO_FAULT_REASONS
