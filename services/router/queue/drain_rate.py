"""The rate at which a queue drains, measured while it is not empty. Pure; times are arguments.

The rate is tokens served over time, both decaying with `DECAY_S`: sum(tokens e^-age/D) / sum(dt e^-age/D). Time in which the queue is
empty does not count: it says nothing about how fast the queue would drain.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp

DECAY_S = 10.0
"""Observations of this age count a third."""
OBSERVED_S_MIN = 0.25
"""Observed time without which no rate is known: one ask that waited for a millisecond is no measurement."""
RATES_MAX = 256
"""Kinds of requests with a rate of their own."""


class DrainRate:
    """Tokens per second that leave one queue."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._queued = 0
        self._updated_s = 0.0

    def on_added(self, now: float) -> None:
        self._advance(now)
        self._queued += 1

    def on_removed(self, now: float, *, served_tokens: float) -> None:
        """`served_tokens` is 0 for an ask that was not placed."""
        self._advance(now)
        self._queued -= 1
        self._tokens += served_tokens

    def tokens_per_s(self, now: float) -> float | None:
        """Returns the rate. None: too little was observed. It falls while nothing leaves."""
        self._advance(now)
        if self._seconds < OBSERVED_S_MIN or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def _advance(self, now: float) -> None:
        if self._queued and now > self._updated_s:
            # The seconds grow by the integral of e^(-age/D) over the time since the last update: D (1 - e^(-dt/D)).
            decay = exp((self._updated_s - now) / DECAY_S)
            self._tokens *= decay
            self._seconds = self._seconds * decay + DECAY_S * (1 - decay)
        self._updated_s = max(now, self._updated_s)


class DrainRates:
    """Rates by kind of request. Beyond `RATES_MAX` the least recently used one is forgotten."""

    def __init__(self) -> None:
        self._rates: OrderedDict[Hashable, DrainRate] = OrderedDict()

    def rate(self, kind: Hashable) -> DrainRate:
        """Returns the rate of a kind. A queue keeps its rate, so forgetting one loses a measurement and no count."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = DrainRate()
            if len(self._rates) > RATES_MAX:
                self._rates.popitem(last=False)
        self._rates.move_to_end(kind)
        return rate
