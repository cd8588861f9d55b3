"""Limits how many requests a frontend places again, so that a failure of many workers does not double the load of those that are left.

A token bucket for each model, as in Finagle and in gRPC's retry throttling: each request adds a part of a token, time adds some, and a
request that is placed again takes one. Answers that continue after their first token take none: each of them has been admitted once,
and `continuations_max` limits them. Pure: times are arguments.
"""

from services.frontend.settings import RetryBudgetSettings

RETRY_BUDGET_SPENT = "retry_budget_spent"
"""Reason of a request that failed and was not placed again, because too many others were."""


class RetryBudget:
    """The bucket of one model. It is full at the start."""

    def __init__(self, settings: RetryBudgetSettings, now_s: float) -> None:
        self._settings = settings
        self.requests = 0
        """New requests since the last call of `take_nowait`; callers add to it."""
        self._tokens = float(settings.burst)
        self._filled_s = now_s

    def take_nowait(self, now_s: float) -> bool:
        """Takes a token for a request that is to be placed again. False: none is left."""
        tokens = self.requests * self._settings.ratio + max(0.0, now_s - self._filled_s) * self._settings.per_s
        self.requests, self._filled_s = 0, now_s
        self._tokens = min(float(self._settings.burst), self._tokens + tokens)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def retry_after_s(self) -> float:
        """Returns after how long time alone will have added a token; at most a minute."""
        missing = max(0.0, 1.0 - self._tokens)
        return min(60.0, missing / self._settings.per_s) if self._settings.per_s else 60.0
