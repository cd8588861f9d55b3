"""What the router measures."""

from kvmesh.core import Placement, ReportKind, Role
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
from services.router.queue.admission import Answer
from services.router.replicas.peer_state import Replica
from services.router.workers.reservations import Reservation
from services.router.workers.target import Target

# A decision takes tens of microseconds.
DECISION_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class RouterMetrics:
    """Counters of decisions, and gauges that look at the core when scraped."""

    def __init__(self, instruments: Instruments, core: RouterCore) -> None:
        self._core = core
        self._instruments = instruments
        self._placed = instruments.tally("placed_requests", "Placements by what decided.", ("reason",))
        self._refused = instruments.counter("refused_requests", "Refusals by reason.", ("reason",))
        self._reports = instruments.tally("reports", "Reports by kind.", ("kind",))
        self._expired = instruments.counter("expired_reservations", "Reservations that nobody settled.")
        self._prompt = instruments.tally("prompt_tokens", "Prompt tokens of placed requests.").of()
        self._cached = instruments.tally(
            "cached_prompt_tokens", "Those believed to be cached where they were placed."
        ).of()
        self._seconds = instruments.spreads(
            "decision_seconds", "Time of one decision.", buckets=DECISION_BUCKETS_S
        ).of()
        # Looking a label's values up takes longer than counting.
        self._placed_by = {reason: self._placed.of(reason) for reason in (*_REASONS, core.policy_name)}
        self._reports_by = {kind: self._reports.of(kind.value) for kind in ReportKind}
        instruments.gauge_function("index_blocks", "Distinct blocks in the index.", lambda: len(core.index.device))
        instruments.gauge_function("reservations", "Placed and not settled.", lambda: len(core.book))
        self._waits = instruments.histogram(
            "queue_wait_seconds", "Time in the queue of asks that waited, by how it ended.", ("outcome",)
        )
        self._served = instruments.counter(
            "queue_served_prompt_tokens", "Prompt tokens of asks that waited and were placed.", ("priority",)
        )
        requests = instruments.gauge("queue_requests", "Asks that wait.", ("priority",))
        tokens = instruments.gauge("queue_tokens", "Prompt tokens that wait and that nobody holds.", ("priority",))
        for name in PRIORITY_CLASSES:
            requests.labels(name).set_function(lambda name=name: self._waiting(name)[0])  # type: ignore[misc]
            tokens.labels(name).set_function(lambda name=name: self._waiting(name)[1])  # type: ignore[misc]
        instruments.gauge_function("queue_lanes", "Kinds of asks that wait.", lambda: len(core.queue.lanes))
        for role in (Role.PREFILL, Role.DECODE):
            instruments.gauge_function(
                f"{role.value}_workers",
                "Workers that take requests.",
                lambda role=role: self._taking(role),  # type: ignore[misc]
            )
        for trust in Trust:
            instruments.gauge_function(
                f"{trust.value}_feeds",
                f"Workers whose index is {trust.value}.",
                lambda trust=trust: self._trusted(trust),  # type: ignore[misc]
            )
        # The one label that is not from a closed set. See WorkerLabels for what bounds it.
        self._errors = instruments.spreads(
            "prediction_error_ratio",
            "(observed - expected) / expected, of the time to prefill or to the first token, by worker.",
            ("phase", "worker"),
            buckets=RATIO_BUCKETS,
        )
        self._errors_of_prefill: dict[str, Spread] = {}
        self._errors_of_ttft: dict[str, Spread] = {}
        self._labels = WorkerLabels(core.health.settings.labelled_workers_max)
        self._health_events = instruments.counter("health_events", "News of workers' health by kind.", ("kind",))
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            instruments.gauge_function(
                f"{state.value}_breakers",
                f"Workers whose breaker is {state.value}.",
                lambda state=state: core.health.count(state),  # type: ignore[misc]
            )
        instruments.gauge_function("wedged_workers", "Workers with work that make no step.", core.health.wedged)
        for fault in OverlapFault:
            instruments.gauge_function(
                f"{fault.value}_workers",
                "Workers whose blocks can never match what is asked for.",
                lambda fault=fault: core.health.faulty(fault),  # type: ignore[misc]
            )
        instruments.gauge_function("kv_feed_gaps", "Gaps seen in KV feeds of present workers.", self._gaps)
        instruments.gauge_function(
            "kv_feed_snapshots", "Snapshots taken over from present workers.", lambda: self._sum_of_feeds("snapshots")
        )
        instruments.gauge_function(
            "believed_placements",
            "Own placements that stand for blocks no event told of.",
            lambda: len(core.index.predicted),
        )

    def watch_peers(self, replica: Replica) -> None:
        """Looks at what peers tell, too."""
        counts = replica.counts
        add = self._instruments.gauge_function
        add("peers", "Other routers with which a stream stands.", lambda: sum(1 for each in replica if each.origin))
        add("peer_reservations", "Reservations that peers made and that count here.", lambda: replica.told)
        add("stranger_reservations", "Peers' reservations on workers not known here.", lambda: replica.strangers)
        add("peer_reservations_heard", "Reservations heard of since the start.", lambda: counts.told)
        add("peer_reservations_ignored", "Those beyond the limits.", lambda: counts.ignored)
        add("peers_lost", "Streams with peers that ended.", lambda: counts.lost)

    def placed(self, placement: Placement, prompt_tokens: int, elapsed_s: float) -> None:
        """A request was placed."""
        self._count_placed(placement, prompt_tokens)
        self._seconds.observe(elapsed_s)

    def refused(self, error: MeshError) -> None:
        """A request was refused."""
        self._refused.labels(error.reason).inc()

    def waited(self, answer: Answer) -> None:
        """An ask waits no more."""
        if isinstance(answer.outcome, MeshError):
            self._waits.labels("refused").observe(answer.waited_s)
            self.refused(answer.outcome)
            return
        self._waits.labels("placed").observe(answer.waited_s)
        self._served.labels(priority_class(answer.ask.priority)).inc(answer.ask.prompt_tokens)
        self._count_placed(answer.outcome, answer.ask.prompt_tokens)

    def reported(self, kind: ReportKind) -> None:
        """A report came."""
        self._reports_by[kind].value += 1

    def expired(self, count: int) -> None:
        """Reservations ran out."""
        self._expired.inc(count)

    def health_changed(self, event: HealthEvent) -> None:
        """Something happened to a worker."""
        self._health_events.labels(event.kind).inc()

    def observed(self, reservation: Reservation, kind: ReportKind, elapsed_s: float) -> None:
        """A placed request got so far, so long after its placement: how wrong was the router?"""
        if kind is PREFILLED:
            if reservation.prefill is not None:
                expected_s = reservation.expected_prefill_s
                self._error("prefill", self._errors_of_prefill, reservation.prefill, expected_s, elapsed_s)
        elif kind is FIRST_TOKEN:
            expected_s = reservation.expected_ttft_s
            self._error("ttft", self._errors_of_ttft, reservation.decode, expected_s, elapsed_s)

    def forget_workers(self) -> None:
        """Drops what is kept under the names of workers that have left."""
        for worker_id in self._labels.left(self._core.fleet.workers):
            for phase, known in (("prefill", self._errors_of_prefill), ("ttft", self._errors_of_ttft)):
                known.pop(worker_id, None)
                self._errors.forget(phase, worker_id)

    def _count_placed(self, placement: Placement, prompt_tokens: int) -> None:
        reason = placement.reasons[0]
        count = self._placed_by.get(reason)
        if count is None:
            count = self._placed_by[reason] = self._placed.of(reason)
        count.value += 1
        self._prompt.value += prompt_tokens
        self._cached.value += placement.cached_tokens

    def _error(
        self, phase: str, known: dict[str, Spread], target: Target, expected_s: float | None, observed_s: float
    ) -> None:
        """`known` are those of the phase that have a label of their own."""
        ratio = error_ratio(expected_s, observed_s)
        if ratio is None:
            return
        worker_id = target.worker.worker_id
        spread = known.get(worker_id)
        if spread is None:
            label = self._labels.label(worker_id)
            spread = self._errors.of(phase, label)
            if label == worker_id:
                known[worker_id] = spread
        spread.observe(ratio)

    def _waiting(self, name: str) -> tuple[int, int]:
        """Requests and tokens of a class of priorities."""
        sums = [each for priority, each in self._core.queue.sums().items() if priority_class(priority) == name]
        return sum(requests for requests, _ in sums), sum(tokens for _, tokens in sums)

    def _taking(self, role: Role) -> int:
        return sum(1 for w in self._core.fleet.workers.values() if w.role is role and not w.excluded_by)

    def _trusted(self, trust: Trust) -> int:
        return sum(1 for w in self._core.fleet.workers.values() if w.feed is not None and w.feed.trust is trust)

    def _gaps(self) -> int:
        return self._sum_of_feeds("gaps")

    def _sum_of_feeds(self, count: str) -> int:
        return sum(getattr(w.feed, count) for w in self._core.fleet.workers.values() if w.feed is not None)


PRIORITY_CLASSES = ("high", "normal", "low")


def priority_class(priority: int) -> str:
    """Above, at or below 0: 201 priorities would be too many labels."""
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
    "prefill_congested",
)
