"""Decides which changes of the load the pools follow: they grow immediately, shrink late, and do not grow for bursts that end soon. Pure."""

from collections import deque

from kvmesh.core.planning import Shape

HIGH, LOW = 1.5, 1.25
"""A rise begins when the rate exceeds this many times the level, and ends when it falls below."""
BRIEF_MIN = 2
"""Fewer brief rises are not a pattern."""
LEVEL_STARTS = 4.0
"""The level is a mean over this many start times of a worker."""
REMEMBERED_STARTS = 20.0
RECORDS_MAX = 100
SPANS_MAX = 1000


class Stabiliser:
    """Keeps the sizes that were needed within `calm_s`. A pool shrinks to the largest of them.

    Source: `stabilizationWindowSeconds` of Kubernetes' HorizontalPodAutoscaler, with 0 s for growth.
    """

    def __init__(self, calm_s: float) -> None:
        self._calm_s = calm_s
        self._needed: deque[tuple[float, Shape]] = deque()
        self._began_s: float | None = None

    def restart(self) -> None:
        """Forgets everything: the next shrinking is `calm_s` away."""
        self._needed.clear()
        self._began_s = None

    def settle(self, needed: Shape, wanted: Shape, now_s: float) -> Shape:
        """Adds a needed size. Returns the size to have, given the size that is wanted so far."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - self._calm_s:
            self._needed.popleft()
        is_calm = now_s - self._began_s >= self._calm_s
        return Shape(
            prefill_workers=self._settle(
                needed.prefill_workers,
                wanted=wanted.prefill_workers,
                largest=max(shape.prefill_workers for _, shape in self._needed) if is_calm else wanted.prefill_workers,
            ),
            decode_workers=self._settle(
                needed.decode_workers,
                wanted=wanted.decode_workers,
                largest=max(shape.decode_workers for _, shape in self._needed) if is_calm else wanted.decode_workers,
            ),
            deflect_tokens=wanted.deflect_tokens,
        )

    @staticmethod
    def _settle(needed: int, wanted: int, largest: int) -> int:
        return needed if needed > wanted else min(wanted, largest)


class Excursions:
    """Tells bursts that go by themselves from rises of the load that workers should start for.

    A worker that starts for a burst is ready when the burst is over. Whether a rise lasts is not known when it begins; how long the earlier
    ones lasted is. Bursts are served by what is there: see `services/planner/sizing/bursts.py`.
    `start_s`: time until a new worker serves; shorter rises are brief.
    """

    def __init__(self, start_s: float) -> None:
        self._start_s = max(1.0, start_s)
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS_MAX)
        self._total_s = self._sum = 0.0
        self._newest_s: float | None = None
        self._began_s: float | None = None
        self._ended: deque[tuple[float, float]] = deque(maxlen=RECORDS_MAX)
        """(time of the end, length)."""
        self.are_usual = False
        """Brief rises are a pattern of this load."""

    def settle(self, rate: float, newest: float, now_s: float) -> float:
        """Returns the rate for which to start workers: the present rate, or the level if rises like the present one did not last before.

        `newest`: arrivals per second since the previous call. The level is its mean; the present rate starts again with each rise.
        """
        level = self._level(newest, now_s=now_s)
        if self._total_s < self._start_s:
            # A level of a few seconds is chance, and so is what exceeds it.
            return rate
        self._follow(rate, level=level, now_s=now_s)
        while self._ended and self._ended[0][0] < now_s - REMEMBERED_STARTS * self._start_s:
            self._ended.popleft()
        brief = [length_s for _, length_s in self._ended if length_s < self._start_s]
        self.are_usual = len(brief) >= BRIEF_MIN
        if not self.are_usual:
            return rate
        if self._began_s is None:
            return level
        age_s = now_s - self._began_s
        lasting = 1 + len(self._ended) - len(brief)
        # Of the earlier rises that reached the age of this one: did at least as many last as ended soon? `lasting` assumes one more that lasted.
        return rate if lasting >= sum(length_s >= age_s for length_s in brief) else level

    def _level(self, rate: float, now_s: float) -> float:
        span_s = 0.0 if self._newest_s is None else now_s - self._newest_s
        self._newest_s = now_s
        if len(self._spans) == SPANS_MAX:
            self._forget()
        self._spans.append((span_s, rate))
        self._total_s += span_s
        self._sum += span_s * rate
        while self._total_s - self._spans[0][0] > LEVEL_STARTS * self._start_s:
            self._forget()
        return self._sum / self._total_s if self._total_s else rate

    def _forget(self) -> None:
        span_s, rate = self._spans.popleft()
        self._total_s -= span_s
        self._sum -= span_s * rate

    def _follow(self, rate: float, level: float, now_s: float) -> None:
        if self._began_s is None:
            if rate > HIGH * level:
                self._began_s = now_s
        elif rate < LOW * level:
            self._ended.append((now_s, now_s - self._began_s))
            self._began_s = None
