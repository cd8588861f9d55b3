"""Limits each tenant to its share of the requests in flight while the event loop is overloaded. Pure.

The event loop serves all streams equally. A tenant with forty streams gets forty times the CPU time of a tenant with one, and when CPU
time is short, the tokens of both arrive late. So while timers of the loop run late, a limit on the requests in flight falls, and a tenant
with more than an equal part of it starts no further request. While timers run on time, the limit grows until no request waits. A single
tenant is never limited, because no other tenant would benefit.

Invariants:
1. Without a limit every request may start.
2. A request of a tenant without requests in flight may always start.
"""

from collections.abc import Mapping

LAG_S_MAX = 0.1
"""Delay of a timer above which the event loop is overloaded: the tokens of all streams are late by as much, which readers notice."""
FALL, RISE = 0.9, 1.02
"""Factors for each measurement, of which there are 20 a second: the limit halves in 0.35 s and doubles in 1.75 s."""
LIMIT_MIN = 16.0
"""The loop may be late for want of CPU time, whatever is in flight. So the limit does not fall to what would leave workers idle."""
PERIOD = 20
"""Measurements after which a tenant without requests is forgotten, at the latest after twice as many."""


class OverloadLimit:
    """`in_flight`: the number of requests by tenant."""

    def __init__(self, in_flight: Mapping[str, int]) -> None:
        self._in_flight = in_flight
        self.limit: float | None = None
        """Requests in flight of all tenants together. None: no limit."""
        self._active: set[str] = set()
        self._seen: set[str] = set()
        self._measurements = 0

    def on_lag(self, lag_s: float, *, has_waiting: bool) -> None:
        """Applies one measurement of the event loop. `has_waiting`: whether requests wait for their start."""
        self._measurements += 1
        if self._measurements % PERIOD == 0:
            self._active = {*self._seen, *self._in_flight}
            self._seen = set()
        in_flight = sum(self._in_flight.values())
        if lag_s > LAG_S_MAX:
            # Starts from what is in flight: a higher limit would have to fall for a while before it limits anything.
            self.limit = max(LIMIT_MIN, FALL * min(self.limit or in_flight, in_flight))
        elif self.limit is not None:
            self.limit *= RISE
            if not has_waiting and self.limit > 2 * in_flight:
                self.limit = None

    def allows(self, tenant: str) -> bool:
        """Returns whether a request of the tenant may start."""
        self._active.add(tenant)
        self._seen.add(tenant)
        own = self._in_flight.get(tenant, 0)
        return self.limit is None or not own or len(self._active) == 1 or own < self.limit / len(self._active)
