"""Limits how many requests a frontend places again, so that a failure of many workers does not double the load of the remaining ones.

A token bucket for each model, as in Finagle and in gRPC's retry throttling: each request adds a part of a token, time adds some, and a
request that is placed again takes one. Answers that continue after their first token take none: each of them has been admitted once,
and `continuations_max` limits them. Pure: times are arguments.
"""

BURST = 1000.0
"""Requests that may be placed again in one burst: one lost worker may have that many."""
RATIO = 0.2
"""Part of a request that each new request adds to them: so a fifth of the load at most is placed again."""
PER_S = 10.0
"""Requests that each second adds to them, so that a quiet frontend has some, too."""
RETRY_BUDGET_SPENT = "retry_budget_spent"
"""Reason of a request that failed and was not placed again, because too many others were."""


class RetryBudget:
    """The bucket of one model. It is full at the start."""

    def __init__(self, now_s: float) -> None:
        self.requests = 0
        """New requests since the last call of `take_nowait`; callers add to it."""
        self._tokens = BURST
        self._filled_s = now_s

    def take_nowait(self, now_s: float) -> bool:
        """Takes a token for a request that is to be placed again. False: the bucket is empty."""
        tokens = self.requests * RATIO + max(0.0, now_s - self._filled_s) * PER_S
        self.requests, self._filled_s = 0, now_s
        self._tokens = min(BURST, self._tokens + tokens)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
