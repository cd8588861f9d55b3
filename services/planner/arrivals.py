"""Estimates how many requests start per second, from counts between scrapes. Pure.

Counts vary by chance, and loads change. A mean over a long time follows a change late; a mean over a short one takes chance for a change. The
estimate is therefore the mean since the newest change that chance does not explain (as in ADWIN: A. Bifet and R. Gavalda, Learning from
Time-Changing Data with Adaptive Windowing, 2007).
"""

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

HISTORY_S = 300.0
"""Time over which the variation of the counts is measured."""
STEADY_S = 20.0
"""Usual time that the estimate is a mean of. A longer mean follows a slowly rising load late."""
STEADY_S_MAX = 150.0
"""Longest such time, for few requests or bursts."""
STANDARD_ERROR = 0.1
"""The mean is over at least as many requests as make its standard error so small a part of it."""
SIGMAS = 3.5
"""At 3 there is a false alarm each few minutes, since each tick makes several comparisons."""
SURGE_SIGMAS = 3.0
"""For the newest count alone, which is compared once: a false alarm each 12 minutes at a tick of 1 s."""
CHANGES = 3
"""Largest differences that do not count as variation: a spike is two changes of the rate. Bursts that come back are more than that."""
SQUARES_MIN = 5


@dataclass(slots=True, kw_only=True)
class Arrivals:
    """Counts of one model, oldest first, each as (seconds, requests)."""

    counts: deque[tuple[float, float]] = field(default_factory=deque)
    steady: int = 0
    """How many of the newest counts belong to the present rate."""
    kept_s: float = 0.0
    surge: float = 0.0
    """Rate of the newest count if it is above the present rate by more than chance explains; else 0. One count may be all of a burst."""

    def add(self, span_s: float, requests: float) -> None:
        if span_s <= 0:
            return
        self.surge = self._surge(span_s=span_s, requests=requests)
        self.counts.append((span_s, requests))
        self.kept_s += span_s
        while self.kept_s - self.counts[0][0] >= HISTORY_S:
            self.kept_s -= self.counts.popleft()[0]
        self.steady = self._limited(min(self.steady + 1, len(self.counts)))
        # After a change, only the counts since then belong to the present rate.
        self.steady = self._changed_at() or self.steady

    @property
    def rate(self) -> float | None:
        """Requests per second. None without a count."""
        return _rate(list(self.counts)[-self.steady :]) if self.steady else None

    def _surge(self, span_s: float, requests: float) -> float:
        present = list(self.counts)[-self.steady :] if self.steady else []
        old_s, old = sum(each[0] for each in present), sum(each[1] for each in present)
        if old_s < span_s or requests / span_s <= old / old_s:
            return 0.0
        sigmas = _difference(new_s=span_s, new=requests, old_s=old_s, old=old) / math.sqrt(self._dispersion(1))
        return requests / span_s if sigmas > SURGE_SIGMAS else 0.0

    def _limited(self, steady: int) -> int:
        total_s, newest = 0.0, 0
        steady_s = self._steady_s()
        for span_s, _ in reversed(self.counts):
            if newest >= steady or (newest and total_s + span_s > steady_s):
                break
            total_s, newest = total_s + span_s, newest + 1
        return newest

    def _steady_s(self) -> float:
        """Returns the time in which a rate is steady. The relative variance of a mean is the dispersion over the number of requests."""
        rate = sum(requests for _, requests in self.counts) / self.kept_s
        if not rate:
            return STEADY_S_MAX
        newest = max(1, round(STEADY_S * len(self.counts) / self.kept_s))
        needed = self._dispersion(newest) / STANDARD_ERROR**2
        return min(STEADY_S_MAX, max(STEADY_S, needed / rate))

    def _changed_at(self) -> int:
        """Returns the number of newest counts since a change; 0: there is none. The most significant one, if several are."""
        present = list(self.counts)[-self.steady :]
        best, most = 0, SIGMAS
        new_s = new = 0.0
        for newest in range(1, len(present)):
            span_s, requests = present[-newest]
            new_s, new = new_s + span_s, new + requests
            before = present[:-newest]
            old_s = sum(each[0] for each in before)
            if old_s < new_s:
                break
            sigmas = _difference(new_s=new_s, new=new, old_s=old_s, old=sum(each[1] for each in before))
            # The dispersion is at least 1 and costs most of the time, so it is computed only if the difference is large enough without it.
            if sigmas > most and (sigmas := sigmas / math.sqrt(self._dispersion(newest))) > most:
                best, most = newest, sigmas
        return best

    def _dispersion(self, newest: int) -> float:
        """Variance over mean of sums of `newest` counts; 1 for Poisson arrivals, more if requests come in groups.

        From differences between neighbours, so that trends do not count; the largest few, where the rate changed, are left out.
        """
        requests = [each[1] for each in self.counts]
        sums = [sum(requests[i : i + newest]) for i in range(len(requests) % newest, len(requests), newest)]
        # Half of the squared difference of two independent values is an estimate of their variance.
        squares = sorted((later - earlier) ** 2 / 2 for earlier, later in pairwise(sums))
        kept = len(squares) - CHANGES
        mean = sum(sums) / len(sums) if sums else 0.0
        if kept < SQUARES_MIN or not mean:
            return 1.0
        # Without the largest squares the mean is too small; for normal variables, `_trimmed_mean` is the factor.
        return max(1.0, sum(squares[:kept]) / kept / _trimmed_mean(kept / len(squares)) / mean)


def _trimmed_mean(share: float) -> float:
    """Returns the mean of the smallest `share` of squared normal variables of variance 1: 1 - 2 z phi(z) / share, with P(|Z| < z) = share."""
    normal = NormalDist()
    z = normal.inv_cdf((1 + share) / 2)
    return 1 - 2 * z * normal.pdf(z) / share


def _difference(*, new_s: float, new: float, old_s: float, old: float) -> float:
    """Standard deviations between two rates of Poisson arrivals, by Anscombe's square roots (1948), which suit small counts too."""
    # 2 sqrt(x + 3/8) of a Poisson count has variance 1 for any mean. Scaled to `new_s`, that of the older count has new_s / old_s.
    expected = (old + 0.375) * new_s / old_s
    return 2 * abs(math.sqrt(new + 0.375) - math.sqrt(expected)) / math.sqrt(1 + new_s / old_s)


def _rate(counts: list[tuple[float, float]]) -> float:
    return sum(requests for _, requests in counts) / sum(span_s for span_s, _ in counts)
