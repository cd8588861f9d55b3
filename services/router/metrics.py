"""What the router measures."""

from contextlib import suppress

from prometheus_client import Histogram

from kvmesh.core import Placement, ReportKind, Role
from kvmesh.errors import MeshError
from kvmesh.telemetry import Instruments
from services.router.admission import Answer
from services.router.breaker import BreakerState
from services.router.core import RouterCore
from services.router.feed import Trust
from services.router.health import HealthEvent
from services.router.overlap import OverlapFault
from services.router.prediction import PHASES, RATIO_BUCKETS, WorkerLabels, error_ratio
from services.router.replica import Replica
from services.router.reservations import Reservation
from services.router.target import Target

# A decision takes tens of microseconds.
DECISION_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class RouterMetrics:
    """Counters of decisions, and gauges that look at the core when scraped."""

    def __init__(self, instruments: Instruments, core: RouterCore) -> None:
        self._core = core
        self._instruments = instruments
        self._placed = instruments.counter("placed_requests", "Placements by what decided.", ("reason",))
        self._refused = instruments.counter("refused_requests", "Refusals by reason.", ("reason",))
        self._reports = instruments.counter("reports", "Reports by kind.", ("kind",))
        self._expired = instruments.counter("expired_reservations", "Reservations that nobody settled.")
        self._prompt = instruments.counter("prompt_tokens", "Prompt tokens of placed requests.")
        self._cached = instruments.counter(
            "cached_prompt_tokens", "Those believed to be cached where they were placed."
        )
        self._seconds = instruments.histogram("decision_seconds", "Time of one decision.", buckets=DECISION_BUCKETS_S)
        # Looking a label's values up takes longer than counting.
        self._placed_by = {reason: self._placed.labels(reason) for reason in (*_REASONS, core.policy_name)}
        self._reports_by = {kind.value: self._reports.labels(kind.value) for kind in ReportKind}
        instruments.gauge_function(
            "index_blocks",
            "Distinct blocks in the index; one that nobody asked about may count twice.",
            lambda: len(core.index.device),
        )
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
        self._errors = instruments.histogram(
            "prediction_error_ratio",
            "(observed - expected) / expected, of the time to prefill or to the first token, by worker.",
            ("phase", "worker"),
            buckets=RATIO_BUCKETS,
        )
        self._errors_by: dict[tuple[str, str], Histogram] = {}
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
        reason = placement.reasons[0]
        child = self._placed_by.get(reason)
        if child is None:
            child = self._placed_by[reason] = self._placed.labels(reason)
        child.inc()
        self._prompt.inc(prompt_tokens)
        self._cached.inc(placement.cached_tokens)
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
        self._placed.labels(answer.outcome.reasons[0]).inc()
        self._prompt.inc(answer.ask.prompt_tokens)
        self._cached.inc(answer.outcome.cached_tokens)

    def reported(self, kind: str) -> None:
        """A report came."""
        self._reports_by[kind].inc()

    def expired(self, count: int) -> None:
        """Reservations ran out."""
        self._expired.inc(count)

    def health_changed(self, event: HealthEvent) -> None:
        """Something happened to a worker."""
        self._health_events.labels(event.kind).inc()

    def observed(self, reservation: Reservation, kind: ReportKind, elapsed_s: float) -> None:
        """A placed request got so far, so long after its placement: how wrong was the router?"""
        if kind is ReportKind.PREFILLED and reservation.prefill is not None:
            self._error("prefill", reservation.prefill, reservation.expected_prefill_s, elapsed_s)
        elif kind is ReportKind.FIRST_TOKEN:
            self._error("ttft", reservation.decode, reservation.expected_ttft_s, elapsed_s)

    def forget_workers(self) -> None:
        """Drops what is kept under the names of workers that have left."""
        for label in self._labels.left(self._core.fleet.workers):
            for phase in PHASES:
                self._errors_by.pop((phase, label), None)
                with suppress(KeyError):
                    self._errors.remove(phase, label)

    def _error(self, phase: str, target: Target, expected_s: float | None, observed_s: float) -> None:
        ratio = error_ratio(expected_s, observed_s)
        if ratio is not None:
            key = (phase, self._labels.label(target.worker.worker_id))
            child = self._errors_by.get(key)
            if child is None:
                child = self._errors_by[key] = self._errors.labels(*key)
            child.observe(ratio)

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
