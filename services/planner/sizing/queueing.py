"""Waiting times of a pool. Pure formulas."""

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/k. `offered`: arrival rate times mean service time. 1 from `servers` on.

    Source: Erlang 1917; by the recursion B(k) = a B(k-1) / (k + a B(k-1)) of Erlang B, and C = B / (1 - rho (1 - B)).
    """
    if offered >= servers:
        return 1.0
    # Ten standard deviations below the number of servers it is less than 1e-20, and the recursion would take long.
    if offered + 10 * math.sqrt(offered) + 10 < servers:
        return 0.0
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = offered * blocking / (k + offered * blocking)
    return blocking / (1.0 - offered / servers * (1.0 - blocking))


def mean_wait_s(*, servers: int, rate: float, service_s: float, service_cv2: float, arrival_cv2: float = 1.0) -> float:
    """Returns the mean wait in G/G/k; infinite without enough servers.

    Allen-Cunneen: (Ca^2 + Cs^2) / 2 times the wait of M/M/k. For Poisson arrivals (Ca^2 = 1) this is the M/G/k approximation of
    Lee and Longton (1959), exact for one server (Pollaczek-Khinchine). Source: A. O. Allen, Probability, Statistics, and Queueing
    Theory, 2nd edition 1990, section 5.3.5.
    """
    offered = rate * service_s
    if offered >= servers:
        return math.inf
    return (arrival_cv2 + service_cv2) / 2 * erlang_c(servers, offered) * service_s / (servers - offered)


def batching_factor(utilisation: float, prompts_per_step: float) -> float:
    """Returns how much longer prompts take when a worker computes all that wait in one step and none is ready before the step ends.

    A prompt that arrives within a step waits for its rest R, then for the prompts that came before it within that step (rho R), and, when
    steps are shared, also for those that came after it (rho R): (1 + 2 rho) / (1 + rho) times the wait. A step that holds at most one
    prompt has none of the last.
    """
    shared = min(1.0, max(0.0, prompts_per_step - 1.0))
    return 1.0 + shared * utilisation / (1.0 + utilisation)


def wait_within(limit_s: float, *, waiting: float, mean_s: float) -> float:
    """P(wait <= limit). `waiting`: the probability to wait at all. Waits are exponentially distributed (exact for M/M/k)."""
    if limit_s < 0 or math.isinf(mean_s):
        return 0.0
    if mean_s <= 0:
        return 1.0
    # `mean_s` includes requests that do not wait: the mean of those that wait is mean_s / waiting.
    return 1.0 - waiting * math.exp(-limit_s * waiting / mean_s)


def normal_below(value: float, *, mean: float, variance: float) -> float:
    """P(X <= value) of a normal distribution; a step function without variance."""
    if variance <= 0:
        return 1.0 if value >= mean else 0.0
    return 0.5 * math.erfc((mean - value) / math.sqrt(2 * variance))
