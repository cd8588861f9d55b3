"""A circuit breaker per worker. Pure; times are arguments.

    CLOSED --failures in a row, or their share of the newest outcomes, or `trip`--> OPEN
    OPEN --pause over--> HALF_OPEN --enough probes succeeded--> CLOSED
    OPEN --`half_open_early`--> HALF_OPEN
                         HALF_OPEN --a probe failed--> OPEN, with a pause twice as long

1. While OPEN nothing is placed; while HALF_OPEN at most `PROBES_MAX` requests are in flight, the probes; after
   `half_open_early` one.
2. While OPEN no outcome counts; while HALF_OPEN only those of probes do. Requests placed before say nothing new.
3. A probe whose reservation ends without a report, or without a report for `PROBE_S_MAX`, gives its place back without a verdict.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kvmesh.settings import setting

NEVER_S = float("inf")


class BreakerState(StrEnum):
    """Whether the worker gets requests: all, none, or probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


FAILED_FRACTION = 0.5
"""Share of failures among the newest outcomes that opens the breaker, also when they are not consecutive.

Above this share a worker does more harm than good. Below it, retries on other workers cost less than the loss of the worker.
"""
OUTCOMES_MIN = 20
"""Outcomes before their share of failures counts; also how many are kept."""
PROBES_MAX = 2
"""Requests at a time that try whether the worker is well again: what is lost if it is not."""
PROBE_SUCCESSES = 2
"""Probes that must reach their first token before the breaker closes. One may succeed by chance."""
PROBE_S_MAX = 60.0
"""Longest time that a probe without a report blocks another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a worker's breaker opens, and for how long."""

    failures_max: int = setting(
        5, "Consecutive failures for which the worker is to blame that open its breaker.", min=1
    )
    pause_min_s: float = setting(1.0, "First pause of an open breaker; it doubles each time a probe fails.", min=0.001)
    pause_max_s: float = setting(
        60.0, "Longest pause; a breaker that was closed for so long starts with the first pause again.", min=0.001
    )


class Breaker:
    """One worker's breaker."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self.state = BreakerState.CLOSED
        self.cause = ""
        """Why it is not closed: `failures` or the cause given to `trip`."""
        self._consecutive_failures = 0
        self._outcomes: deque[bool] = deque(maxlen=OUTCOMES_MIN)
        self._pause_s = 0.0
        self._half_open_at = NEVER_S
        self._early_at = NEVER_S
        self._probes_max = PROBES_MAX
        self._closed_at = -NEVER_S
        self._probes: dict[str, float] = {}
        self._succeeded_probes = 0

    @property
    def admits(self) -> bool:
        """True while a request may be placed."""
        if self.state is BreakerState.HALF_OPEN:
            return len(self._probes) < self._probes_max
        return self.state is BreakerState.CLOSED

    @property
    def next_change_at(self) -> float:
        """When `advance` will change something. Infinite: only outcomes can."""
        if self.state is BreakerState.OPEN:
            return self._half_open_at
        return min(self._probes.values(), default=NEVER_S)

    def retry_after_s(self, now: float) -> float:
        """The earliest time at which a request that is refused now may be placed.

        If all probes are in flight, the first pause serves as an estimate.
        """
        if self.state is BreakerState.OPEN:
            return max(0.0, self._half_open_at - now)
        return 0.0 if self.admits else self._settings.pause_min_s

    def early_after_s(self, now: float) -> float:
        """Returns the same when no other worker is left, so that `half_open_early` shortens the pause."""
        return min(self.retry_after_s(now), max(0.0, self._early_at - now))

    def half_open_early(self, now: float) -> bool:
        """Half-opens for one probe at a time before the pause is over. False: the first `pause_min_s` is not over."""
        if self.state is not BreakerState.OPEN or now < self._early_at:
            return False
        self._half_open(probes_max=1)
        return True

    def advance(self, now: float) -> None:
        """Half-opens after the pause, and drops probes that are too old."""
        if self.state is BreakerState.OPEN and now >= self._half_open_at:
            self._half_open(probes_max=PROBES_MAX)
        for probe in [probe for probe, ends_at in self._probes.items() if now >= ends_at]:
            del self._probes[probe]

    def on_placed(self, reservation_id: str, now: float) -> None:
        """A request was placed; while half open it is a probe."""
        if self.state is BreakerState.HALF_OPEN:
            self._probes[reservation_id] = now + PROBE_S_MAX

    def on_first_result(self, reservation_id: str, now: float) -> None:
        """A request got its first result: a success for a probe, no verdict for others, which may still fail."""
        if self._probes.pop(reservation_id, None) is not None and self.state is BreakerState.HALF_OPEN:
            self._succeeded_probes += 1
            if self._succeeded_probes >= PROBE_SUCCESSES:
                self.close(now)

    def on_success(self, reservation_id: str, now: float) -> None:
        if self.state is BreakerState.CLOSED:
            self._consecutive_failures = 0
            self._outcomes.append(True)
        else:
            self.on_first_result(reservation_id, now)

    def on_failure(self, reservation_id: str, now: float, *, pause_max_s: float = NEVER_S) -> None:
        """A request failed, and the worker is to blame. `pause_max_s` bounds the pause if this opens the breaker."""
        if self.state is BreakerState.CLOSED:
            self._consecutive_failures += 1
            self._outcomes.append(False)
            if self._consecutive_failures >= self._settings.failures_max or self._fails_too_often():
                self._open(now, "failures", pause_max_s)
        elif self._probes.pop(reservation_id, None) is not None and self.state is BreakerState.HALF_OPEN:
            self._open(now, "failures", pause_max_s)

    def on_no_verdict(self, reservation_id: str, now: float) -> None:
        """A request ended for a reason that is neither the worker's success nor its failure."""
        self._probes.pop(reservation_id, None)

    def trip(self, now: float, cause: str, *, pause_max_s: float = NEVER_S) -> None:
        """Opens the breaker for another cause than a failed request."""
        if self.state is not BreakerState.OPEN:
            self._open(now, cause, pause_max_s)

    def close(self, now: float) -> None:
        if self.state is not BreakerState.CLOSED:
            self._closed_at = now
        self.state, self.cause = BreakerState.CLOSED, ""
        self._reset_counts()

    def _half_open(self, *, probes_max: int) -> None:
        self.state = BreakerState.HALF_OPEN
        self._succeeded_probes = 0
        self._probes_max = probes_max

    def _fails_too_often(self) -> bool:
        outcomes = self._outcomes
        return len(outcomes) == OUTCOMES_MIN and outcomes.count(False) >= FAILED_FRACTION * OUTCOMES_MIN

    def _open(self, now: float, cause: str, pause_max_s: float) -> None:
        settings = self._settings
        # A worker that fails again soon after its breaker closed gets a longer pause, as after a failed probe.
        is_fresh = self.state is BreakerState.CLOSED and now - self._closed_at >= settings.pause_max_s
        pause_s = settings.pause_min_s if is_fresh else 2 * self._pause_s
        self._pause_s = max(settings.pause_min_s, min(settings.pause_max_s, pause_max_s, pause_s))
        self.state, self.cause = BreakerState.OPEN, cause
        self._half_open_at = now + self._pause_s
        self._early_at = now + settings.pause_min_s
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._consecutive_failures = 0
        self._outcomes.clear()
        self._probes.clear()
