"""Decides when a child that died is restarted. Pure: no clock, no randomness."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
DELAY_MAX_S = 30.0
"""Long enough that a child which loads a model for minutes does not keep the machine busy, short enough to watch."""
DOUBLINGS_MAX = 30
"""Bounds the exponent. The delay reaches its maximum long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Allows `restarts_max` restarts in a row. The count returns to 0 after a child has run for `window_s`."""

    restarts_max: int
    window_s: float


class RestartHistory:
    """The restarts of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.restarts = 0

    def on_death(self, lived_s: float) -> float | None:
        """Returns the delay before the next start, doubled with each restart in a row; None if the limit is reached."""
        if lived_s >= self._policy.window_s:
            self.restarts = 0
        if self.restarts >= self._policy.restarts_max:
            return None
        delay_s = min(FIRST_DELAY_S * 2.0 ** min(self.restarts, DOUBLINGS_MAX), DELAY_MAX_S)
        self.restarts += 1
        return delay_s
