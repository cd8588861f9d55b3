"""How fast a queue empties, measured while somebody waits. Pure; times are arguments.

The rate is tokens that left by tokens' time, both fading with `MEMORY_S`: sum(tokens e^-age/M) / sum(dt e^-age/M), over the time in
which the queue was not empty. An idle queue says nothing about how fast it would empty, so its time does not count.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp

MEMORY_S = 10.0
"""Older observations have faded to a third."""
SECONDS_MIN = 0.25
"""Time that must have been watched before a rate is told: one ask that waited a millisecond says nothing."""
RATES_MAX = 256


class DrainRate:
    """Tokens per second that leave one queue."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._waiting = 0
        self._seen_s = 0.0

    def entered(self, now: float) -> None:
        """An ask begins to wait."""
        self._advance(now)
        self._waiting += 1

    def left(self, now: float, *, served_tokens: float = 0) -> None:
        """An ask waits no more. `served_tokens` is 0 when it was not placed: that empties the queue, but not by work."""
        self._advance(now)
        self._waiting -= 1
        self._tokens += served_tokens

    def tokens_per_s(self, now: float) -> float | None:
        """The rate; None while too little was seen. Falls while nothing leaves."""
        self._advance(now)
        if self._seconds < SECONDS_MIN or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def _advance(self, now: float) -> None:
        if self._waiting and now > self._seen_s:
            fade = exp((self._seen_s - now) / MEMORY_S)
            self._tokens *= fade
            self._seconds = self._seconds * fade + MEMORY_S * (1 - fade)
        self._seen_s = max(now, self._seen_s)


class DrainRates:
    """Rates by kind of request; the least recently used is forgotten beyond `RATES_MAX`."""

    def __init__(self) -> None:
        self._rates: OrderedDict[Hashable, DrainRate] = OrderedDict()

    def rate(self, kind: Hashable) -> DrainRate:
        """The rate of a kind. Whoever waits holds on to its object, so forgetting one loses a measurement, no count."""
        rate = self._rates.get(kind)
        if rate is None:
            rate = self._rates[kind] = DrainRate()
            if len(self._rates) > RATES_MAX:
                self._rates.popitem(last=False)
        self._rates.move_to_end(kind)
        return rate
