"""The metrics of the router."""

from functools import partial

from kvmesh.checks import PRIORITY_MAX
from kvmesh.core import Placement, Report, ReportKind, Role
from kvmesh.core.routing import FIRST_TOKEN, PREFILLED
from kvmesh.errors import MeshError
from kvmesh.telemetry import Instruments
from kvmesh.telemetry.tally import Spread
from services.router.core import RouterCore
from services.router.health.breaker import BreakerState
from services.router.health.monitor import HealthEvent
from services.router.health.overlap import OverlapFault
from services.router.health.prediction_error import RATIO_BUCKETS, WorkerLabels, error_ratio
from services.router.index.kv_feed import Trust
from services.router.queue.admission import QueueOutcome
from services.router.replicas.peer_reservations import PeerReservations
from services.router.workers.reservations import Reservation
from services.router.workers.worker import Target

LABELLED_WORKERS_MAX = 64
"""Workers with a label of their own in the metric of prediction errors; the others share one. Each has a histogram per phase."""
# A decision takes tens of microseconds.
DECISION_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class RouterMetrics:
    """Counters of decisions, and gauges that read the core when they are scraped."""

    def __init__(self, instruments: Instruments, core: RouterCore) -> None:
        self._core = core
        self._instruments = instruments
        self._placed = instruments.tally("placed_requests", help="Placements by reason.", labels=("reason",))
        self._refused = instruments.counter("refused_requests", help="Refusals by reason.", labels=("reason",))
        self._reports = instruments.tally("reports", help="Reports by kind.", labels=("kind",))
        self._expired = instruments.counter(
            "expired_reservations", help="Reservations that ended without a final report."
        )
        self._prompt = instruments.tally("prompt_tokens", help="Prompt tokens of placed requests.").of()
        self._cached = instruments.tally(
            "cached_prompt_tokens", help="Prompt tokens expected to be cached where they were placed."
        ).of()
        self.decision_seconds = instruments.spreads(
            "decision_seconds", help="Time of one decision.", buckets=DECISION_BUCKETS_S
        ).of()
        # A lookup by label values takes longer than the count itself.
        self._placed_by = {reason: self._placed.of(reason) for reason in (*_REASONS, core.policy_name)}
        self._reports_by = {kind: self._reports.of(kind.value) for kind in ReportKind}
        self._waits = instruments.histogram(
            "queue_wait_seconds", help="Time in the queue, by outcome.", labels=("outcome",)
        )
        self._served = instruments.counter(
            "queue_served_prompt_tokens",
            help="Prompt tokens of placed requests that were queued.",
            labels=("priority",),
        )
        # The only label that is not from a closed set; WorkerLabels bounds it.
        self._errors = instruments.spreads(
            "prediction_error_ratio",
            help="(observed - expected) / expected, of the time to prefill or to the first token, by worker.",
            labels=("phase", "worker"),
            buckets=RATIO_BUCKETS,
        )
        self._errors_by_worker: dict[str, dict[str, Spread]] = {"prefill": {}, "ttft": {}}
        """By phase, for workers with a label of their own."""
        self._labels = WorkerLabels(LABELLED_WORKERS_MAX)
        self._health_events = instruments.counter(
            "health_events", help="Changes of the health of workers, by kind.", labels=("kind",)
        )
        self._add_queue_gauges()
        self._add_worker_gauges()

    def _add_queue_gauges(self) -> None:
        core, gauge = self._core, self._instruments.gauge_function
        gauge("reservations", "Placed requests that are not finished.", lambda: len(core.book))
        gauge("queue_kinds", "Kinds of queued requests.", lambda: len(core.queue.subqueues))
        requests = self._instruments.gauge("queue_requests", help="Queued requests.", labels=("priority",))
        tokens = self._instruments.gauge(
            "queue_tokens", help="Prompt tokens of queued requests that no worker has cached.", labels=("priority",)
        )
        for name in PRIORITY_CLASSES:
            requests.labels(name).set_function(partial(self._sum_of_queued, name, 0))
            tokens.labels(name).set_function(partial(self._sum_of_queued, name, 1))

    def _add_worker_gauges(self) -> None:
        core, gauge = self._core, self._instruments.gauge_function
        index, health = core.index, core.health
        gauge("index_blocks", "Distinct blocks in the index.", lambda: len(index.device))
        gauge(
            "predicted_placements", "Placements whose blocks are predicted to be cached.", lambda: len(index.predicted)
        )
        gauge("kv_feed_gaps", "Gaps in the KV events of present workers.", partial(self._sum_of_feeds, "gaps"))
        gauge(
            "kv_feed_snapshots",
            "KV snapshots of present workers that were applied.",
            partial(self._sum_of_feeds, "snapshots"),
        )
        gauge("wedged_workers", "Workers with work that make no step.", health.count_wedged)
        for role in (Role.PREFILL, Role.DECODE):
            gauge(f"{role.value}_workers", "Workers that get requests.", partial(self._count_available, role))
        for trust in Trust:
            about = f"Workers whose part of the index is {trust.value}."
            gauge(f"{trust.value}_feeds", about, partial(self._count_feeds, trust))
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            about = f"Workers whose breaker is {state.value}."
            gauge(f"{state.value}_breakers", about, partial(health.count_breakers, state))
        gauge(
            "failing_kv_pairs",
            "Pairs of workers between which KV does not pass.",
            lambda: len(core.fleet.failing_kv_pairs()),
        )
        gauge("slow_pairs", "Pairs of workers whose handoffs take longer than expected.", self._count_slow_pairs)
        gauge("open_paths", "Paths from a frontend to a worker that are paused or probed.", health.paths.count_open)
        for fault in OverlapFault:
            about = "Workers whose cached blocks can never match the prompts."
            gauge(f"{fault.value}_workers", about, partial(health.count_overlap_faults, fault))

    def add_peer_gauges(self, peers: PeerReservations) -> None:
        counts, add = peers.counts, self._instruments.gauge_function
        add("peers", "Other routers with an open stream.", lambda: sum(1 for each in peers if each.origin))
        add("peer_reservations", "Reservations of peers that are counted.", lambda: peers.counted)
        add("peer_reservations_unknown_worker", "Reservations of peers on unknown workers.", lambda: peers.pending)
        add("peer_reservations_received", "Reservations received from peers.", lambda: counts.received)
        add("peer_reservations_ignored", "Reservations of peers beyond the limits.", lambda: counts.ignored)
        add("peers_lost", "Streams to peers that ended.", lambda: counts.lost)

    def count_refusal(self, error: MeshError) -> None:
        self._refused.labels(error.reason).inc()

    def count_queue_outcome(self, outcome: QueueOutcome) -> None:
        if isinstance(outcome.outcome, MeshError):
            self._waits.labels("refused").observe(outcome.queued_s)
            self.count_refusal(outcome.outcome)
            return
        self._waits.labels("placed").observe(outcome.queued_s)
        self._served.labels(priority_class(outcome.ask.priority)).inc(outcome.ask.prompt_tokens)
        self.count_placement(outcome.outcome, outcome.ask.prompt_tokens)

    def count_report(self, kind: ReportKind) -> None:
        self._reports_by[kind].value += 1

    def count_expired(self, reservations: int) -> None:
        self._expired.inc(reservations)

    def count_health_event(self, event: HealthEvent) -> None:
        self._health_events.labels(event.kind).inc()

    def observe_prediction(self, reservation: Reservation, report: Report) -> None:
        """Compares a report with what was expected of the placement."""
        if report.kind is PREFILLED:
            if reservation.prefill is not None:
                expected_s = reservation.expected_prefill_s
                self._observe_error(
                    phase="prefill", target=reservation.prefill, expected_s=expected_s, observed_s=report.elapsed_s
                )
        elif report.kind is FIRST_TOKEN:
            self._observe_error(
                phase="ttft",
                target=reservation.decode,
                expected_s=reservation.expected_ttft_s,
                observed_s=report.elapsed_s,
            )

    def remove_absent_workers(self) -> None:
        for worker_id in self._labels.remove_absent(self._core.fleet.workers):
            for phase, spreads in self._errors_by_worker.items():
                spreads.pop(worker_id, None)
                self._errors.forget(phase, worker_id)

    def count_placement(self, placement: Placement, prompt_tokens: int) -> None:
        reason = placement.reasons[0]
        count = self._placed_by.get(reason)
        if count is None:
            count = self._placed_by[reason] = self._placed.of(reason)
        count.value += 1
        self._prompt.value += prompt_tokens
        self._cached.value += placement.cached_tokens

    def _observe_error(self, *, phase: str, target: Target, expected_s: float | None, observed_s: float) -> None:
        ratio = error_ratio(expected_s=expected_s, observed_s=observed_s)
        if ratio is None:
            return
        worker_id, spreads = target.worker.worker_id, self._errors_by_worker[phase]
        spread = spreads.get(worker_id)
        if spread is None:
            label = self._labels.label_of(worker_id)
            spread = self._errors.of(phase, label)
            if label == worker_id:
                spreads[worker_id] = spread
        spread.observe(ratio)

    def _sum_of_queued(self, name: str, column: int) -> int:
        """Queued requests (0) or tokens (1) of a class of priorities."""
        sums = self._core.queue.sums().items()
        return sum(each[column] for priority, each in sums if priority_class(priority) == name)

    def _count_available(self, role: Role) -> int:
        return sum(1 for w in self._core.fleet.workers.values() if w.role is role and not w.excluded_by)

    def _count_slow_pairs(self) -> int:
        return sum(len(by_prefill) for by_prefill in self._core.placer.slow_pairs.factors.values())

    def _count_feeds(self, trust: Trust) -> int:
        return sum(1 for w in self._core.fleet.workers.values() if w.feed is not None and w.feed.trust is trust)

    def _sum_of_feeds(self, count: str) -> int:
        return sum(getattr(w.feed, count) for w in self._core.fleet.workers.values() if w.feed is not None)


PRIORITY_CLASSES = ("high", "normal", "low", "late")


def priority_class(priority: int) -> str:
    """Above, at or below 0, or far below, where late requests are: one label per priority would be 201 labels."""
    if priority < -PRIORITY_MAX:
        return "late"
    return "normal" if priority == 0 else "high" if priority > 0 else "low"


_REASONS = (
    "kv_overlap",
    "least_loaded",
    "round_robin",
    "random",
    "pinned",
    "no_prefill_pool",
    "local_prefill",
    "short_prompt",
    "deflected",
    "prefill_congested",
    "no_kv_path",
)
