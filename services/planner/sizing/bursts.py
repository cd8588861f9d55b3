"""The wait for prefill workers under arrivals that come in bursts: recorded arrivals, replayed through a queue. Pure.

The formulas of queues take arrivals for Poisson ones. Waits of real ones follow from their own order: a burst of seconds needs workers that are
there before it. The replay is a fluid queue (Lindley's recursion): work arrives at the recorded rate, and `workers` remove it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

LEFT_OUT_STARTS = 2.0
"""Length of the part with the longest waits that a replay omits, in start times of a worker: a single event is not a pattern."""
LEVEL_STARTS = 4.0
"""Slower changes are not bursts, because workers start in time for them. The level is a mean over this many start times of a worker."""
HISTORY_STARTS = 20.0
SPANS_MAX = 600
"""More, and shorter, spans would only cost time."""
LOADS_KEPT = 64
RATIO_STEPS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstWaits:
    """Waits of a replay, shortest first, and for each the share of the work that waits at most that long."""

    mean_s: float
    limits_s: Sequence[float]
    shares: Sequence[float]

    def within(self, limit_s: float) -> float:
        found = bisect_right(self.limits_s, limit_s)
        return self.shares[found - 1] if found else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Bursts:
    """Work that arrived, relative to its level: (seconds, factor), oldest first. `left_out_s`: see LEFT_OUT_STARTS."""

    spans: Sequence[tuple[float, float]]
    left_out_s: float
    _known: dict[int, BurstWaits] = field(default_factory=dict)

    def waits(self, load: float, workers: int) -> BurstWaits:
        """`load`: workers that the level keeps busy. Loads of up to a fiftieth of the pool more share a replay."""
        # Rounded up, so a shared replay has at least the work of each load.
        ratio = -int(-load / workers * RATIO_STEPS // 1)
        known = self._known.get(ratio)
        if known is None:
            if len(self._known) >= LOADS_KEPT:
                self._known.clear()
            known = self._known[ratio] = self._replay(ratio / RATIO_STEPS)
        return known

    def _replay(self, ratio: float) -> BurstWaits:
        """`ratio`: work that the level brings per second and worker."""
        backlog_s, points = 0.0, list[tuple[float, float, float]]()
        at_s = 0.0
        for span_s, factor in self.spans:
            before_s = backlog_s
            backlog_s = max(0.0, backlog_s + (factor * ratio - 1.0) * span_s)
            # Half of the span's work comes while the backlog is nearer to the earlier value, half while it is nearer to the later one.
            weight = factor * span_s / 2
            points.append((at_s, before_s + (backlog_s - before_s) / 4, weight))
            points.append((at_s, before_s + (backlog_s - before_s) * 3 / 4, weight))
            at_s += span_s
        kept = self._without_worst(points)
        kept.sort()
        total = sum(weight for _, weight in kept) or 1.0
        return BurstWaits(
            mean_s=sum(wait_s * weight for wait_s, weight in kept) / total,
            limits_s=[wait_s for wait_s, _ in kept],
            shares=[done / total for done in accumulate(weight for _, weight in kept)],
        )

    def _without_worst(self, points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
        """(wait, weight) without the time of `left_out_s` in which most was waited."""
        window: deque[tuple[float, float]] = deque()
        waited = most = 0.0
        until_s = -1.0
        for at_s, wait_s, weight in points:
            window.append((at_s, wait_s * weight))
            waited += wait_s * weight
            while window and window[0][0] <= at_s - self.left_out_s:
                waited -= window.popleft()[1]
            if waited > most:
                most, until_s = waited, at_s
        return [(wait_s, weight) for at_s, wait_s, weight in points if not until_s - self.left_out_s < at_s <= until_s]


class BurstHistory:
    """Work that arrived lately. `start_s`: time until a new worker serves."""

    def __init__(self, start_s: float) -> None:
        self._start_s = max(1.0, start_s)
        self._spans: deque[tuple[float, float]] = deque()
        self._total_s = 0.0

    def add(self, span_s: float, tokens_per_s: float) -> None:
        if span_s <= 0:
            return
        least_s = HISTORY_STARTS * self._start_s / SPANS_MAX
        # Short spans are merged with the newest one, so that the history has about SPANS_MAX spans at most.
        if self._spans and self._spans[-1][0] + span_s <= least_s:
            known_s, known = self._spans.pop()
            self._total_s -= known_s
            span_s, tokens_per_s = known_s + span_s, (known_s * known + span_s * tokens_per_s) / (known_s + span_s)
        self._spans.append((span_s, tokens_per_s))
        self._total_s += span_s
        while self._total_s - self._spans[0][0] >= HISTORY_STARTS * self._start_s:
            self._total_s -= self._spans.popleft()[0]

    def bursts(self) -> Bursts | None:
        """Returns None until the history is as long as the level is a mean of."""
        if self._total_s < LEVEL_STARTS * self._start_s:
            return None
        levels = self._levels()
        relative = [
            (span_s, rate / level if level else 0.0) for (span_s, rate), level in zip(self._spans, levels, strict=True)
        ]
        return Bursts(spans=relative, left_out_s=LEFT_OUT_STARTS * self._start_s)

    def _levels(self) -> Sequence[float]:
        """Means around each span; at both ends over the part of that time that is known."""
        half_s = LEVEL_STARTS * self._start_s / 2
        ends_s = [0.0, *accumulate(span_s for span_s, _ in self._spans)]
        sums = [0.0, *accumulate(span_s * rate for span_s, rate in self._spans)]
        levels, first, last = [], 0, 0
        for i in range(len(self._spans)):
            middle_s = (ends_s[i] + ends_s[i + 1]) / 2
            while ends_s[first + 1] < middle_s - half_s:
                first += 1
            while last < len(self._spans) and ends_s[last] < middle_s + half_s:
                last += 1
            levels.append((sums[last] - sums[first]) / (ends_s[last] - ends_s[first]))
        return levels
