"""Finds the cheapest plan for a known future: pools over time by dynamic programming, in a fluid model of the workers.

The model proposes plans; the simulation verifies them (see `find_oracle` in `__main__.py`).

* Prefill: work arrives as recorded, second by second, and is served first come, first served: *B = max(0, B + work - workers)*. A request is
  within its target if *B / workers* and its own time are.
* Decode: each request is in flight for as long as its answer takes in the largest batch that keeps the ITL target. The requests in flight per
  worker must not exceed that batch.
* A worker costs its time, and `start_s` more for each start.

`reward_s` is the worker time that one more request within the targets is worth. Each reward gives the plan with the most requests within the
targets for its cost (a Lagrange multiplier). Bisection finds the reward for a share of the requests.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmesh.core.planning import Shape, Targets
from kvmesh.core.whatif import RecordedRequest
from services.planner.observation import ModelObservation
from services.planner.sizing.forecast import FIRST_STEPS
from services.planner.sizing.speed import Speed
from services.whatif.fleet import ChangingFleet

Values = NDArray[np.float64]

STEP_S = 5
"""Plans change at multiples of this time."""
BACKLOG_STEPS_S = 0.05, 1.12
"""Grid of backlogs: the first value, and the ratio between consecutive ones. Values in between are interpolated."""
BACKLOG_MAX_STARTS = 4.0
"""Longest backlog, as a multiple of a worker's start time, with all workers."""
BISECTIONS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One pool's load, second by second. `good(second, workers, backlog)` returns the requests within the target, for arrays of workers and
    backlogs.

    `work` is the worker time, in seconds, that arrives in each second. A pool without a queue has none.
    """

    seconds: int
    work: Sequence[float]
    good: Callable[[int, Values, Values], Values]
    workers_max: int
    has_queue: bool


def plan_pool(pool: Pool, *, reward_s: float, start_s: float) -> Sequence[int]:
    """Returns the workers of each step that maximise `reward_s` times the requests within the target, minus the worker time."""
    workers = np.arange(1, pool.workers_max + 1, dtype=float)
    backlogs = _backlogs(pool, start_s)
    steps = math.ceil(pool.seconds / STEP_S)
    after = np.zeros((len(workers), len(backlogs)))
    choices = np.zeros((steps, len(workers), len(backlogs)), dtype=np.int16)
    starts_s = start_s * np.maximum(0.0, workers[None, :] - workers[:, None])
    for step in reversed(range(steps)):
        value = _value_of_step(pool, step, workers, backlogs=backlogs, after=after, reward_s=reward_s)
        # (workers before, workers now, backlog)
        total = value[None, :, :] - starts_s[:, :, None]
        choices[step] = total.argmax(axis=1)
        after = total.max(axis=1)
    return _follow(pool, choices, workers, backlogs=backlogs)


def _backlogs(pool: Pool, start_s: float) -> Values:
    if not pool.has_queue:
        return np.zeros(1)
    first, ratio = BACKLOG_STEPS_S
    most = BACKLOG_MAX_STARTS * start_s * pool.workers_max
    count = math.ceil(math.log(most / first, ratio))
    return np.concatenate([[0.0], first * ratio ** np.arange(count)])


def _value_of_step(
    pool: Pool, step: int, workers: Values, *, backlogs: Values, after: Values, reward_s: float
) -> Values:
    """Returns the value of a step by workers and by the backlog at its start."""
    backlog = np.broadcast_to(backlogs, after.shape).copy()
    value = np.zeros_like(after)
    for second in range(step * STEP_S, min(pool.seconds, (step + 1) * STEP_S)):
        later = np.clip(backlog + pool.work[second] - workers[:, None], 0.0, backlogs[-1])
        value += reward_s * pool.good(second, workers[:, None], (backlog + later) / 2) - workers[:, None]
        backlog = later
    for row in range(len(workers)):
        value[row] += np.interp(backlog[row], backlogs, after[row])
    return value


def _follow(pool: Pool, choices: NDArray[np.int16], workers: Values, *, backlogs: Values) -> Sequence[int]:
    """Follows the choices from the first step. The number of workers in the first step is free, because they start before the load."""
    plan: list[int] = []
    row, backlog = len(workers) - 1, 0.0
    for step in range(len(choices)):
        column = int(np.abs(backlogs - backlog).argmin())
        row = int(choices[step, row, column])
        plan.append(int(workers[row]))
        for second in range(step * STEP_S, min(pool.seconds, (step + 1) * STEP_S)):
            backlog = min(backlogs[-1], max(0.0, backlog + pool.work[second] - workers[row]))
    return plan


def share_within(pool: Pool, plan: Sequence[int], requests: int) -> float:
    """Returns the share of the requests that the model expects within the target."""
    backlog, good = 0.0, 0.0
    for second in range(pool.seconds):
        workers = np.array([float(plan[second // STEP_S])])
        later = max(0.0, backlog + pool.work[second] - workers[0])
        good += float(pool.good(second, workers, np.array([(backlog + later) / 2]))[0])
        backlog = later
    return good / requests


def prefill_pool(
    trace: Sequence[RecordedRequest], targets: Targets, speed: Speed, *, hit_rate: float, workers_max: int
) -> Pool:
    assert targets.ttft_s is not None
    limit_s = targets.ttft_s
    seconds = int(trace[-1].at_s) + 1
    work = [0.0] * seconds
    own_s: list[list[float]] = [[] for _ in range(seconds)]
    for request in trace:
        uncached = max(1.0, request.prompt_tokens * (1 - hit_rate))
        time_s = speed.prefill_s(uncached, request.prompt_tokens)
        second = int(request.at_s)
        work[second] += time_s
        # One decode step at the ITL target is a conservative estimate.
        first_s = FIRST_STEPS * (targets.itl_s or 0.0)
        own_s[second].append(time_s + speed.transfer_s(request.prompt_tokens) + first_s)
    ordered = [np.array(sorted(each)) for each in own_s]

    def good(second: int, workers: Values, backlog: Values) -> Values:
        spare_s = limit_s - backlog / workers
        return np.searchsorted(ordered[second], spare_s, side="right").astype(float)

    return Pool(seconds=seconds, work=work, good=good, workers_max=workers_max, has_queue=True)


def decode_pool(trace: Sequence[RecordedRequest], targets: Targets, speed: Speed, *, workers_max: int) -> Pool:
    assert targets.itl_s is not None
    seconds = int(trace[-1].at_s) + 1
    arrived = [0.0] * seconds
    batch_max, step_s = _largest_batch(trace, targets.itl_s, speed)
    changes = [0.0] * (seconds + 1)
    for request in trace:
        first = int(request.at_s)
        arrived[first] += 1
        changes[first] += 1
        changes[min(seconds, math.ceil(request.at_s + request.output_tokens * step_s))] -= 1
    in_flight = np.cumsum(changes)

    def good(second: int, workers: Values, backlog: Values) -> Values:
        return np.where(in_flight[second] <= batch_max * workers, arrived[second], 0.0) + 0.0 * backlog

    return Pool(seconds=seconds, work=[0.0] * seconds, good=good, workers_max=workers_max, has_queue=False)


def _largest_batch(trace: Sequence[RecordedRequest], itl_s: float, speed: Speed) -> tuple[float, float]:
    """Returns the largest batch that keeps the target, and its step time: the target, unless slots or KV blocks limit the batch."""
    requests = len(trace)
    prompt = sum(request.prompt_tokens for request in trace) / requests
    output = sum(request.output_tokens for request in trace) / requests
    per_request_s = speed.decode_s(1, prompt + output / 2) - speed.decode_step_base_s
    by_time = (itl_s - speed.decode_step_base_s) / per_request_s if per_request_s > 0 else math.inf
    batch = min(by_time, speed.running_max, speed.kv_tokens / (prompt + output))
    return batch, speed.decode_s(batch, prompt + output / 2)


def cheapest(pool: Pool, *, share: float, requests: int, start_s: float) -> Sequence[int]:
    """Returns the cheapest plan of the family with this share of the requests within the target, or the one with the highest share if none
    reaches it."""
    low, high = 0.0, 4.0 * start_s * pool.workers_max
    best = plan_pool(pool, reward_s=high, start_s=start_s)
    for _ in range(BISECTIONS):
        if high - low < 1e-3 * high:
            break
        middle = (low + high) / 2 if low else high / 8
        plan = plan_pool(pool, reward_s=middle, start_s=start_s)
        if share_within(pool, plan, requests) >= share:
            high, best = middle, plan
        else:
            low = middle
    return best


def cheapest_constant(pool: Pool, *, share: float, requests: int) -> int:
    """Returns the smallest constant number of workers with this share of the requests within the target, or the maximum if none reaches it."""
    steps = math.ceil(pool.seconds / STEP_S)
    for workers in range(1, pool.workers_max):
        if share_within(pool, [workers] * steps, requests) >= share:
            return workers
    return pool.workers_max


def least_missed(
    trace: Sequence[RecordedRequest], targets: Targets, speed: Speed, *, hit_rate: float, workers: int, start_s: float
) -> float:
    """Returns the least share of all requests that a policy without knowledge of the future misses in the worst overload, if it has `workers`
    prefill workers when the overload begins.

    The policy may start any number of workers, but not before the first request of the busy period in which requests miss their TTFT, and they
    serve `start_s` later. Until then requests are served first come, first served. All later requests count as within the target.
    """
    assert targets.ttft_s is not None
    backlog_s, now_s, began_s, missed, most = 0.0, 0.0, 0.0, 0, 0
    for request in trace:
        backlog_s, now_s = max(0.0, backlog_s - workers * (request.at_s - now_s)), request.at_s
        if missed and now_s >= began_s + start_s:
            backlog_s, missed = 0.0, 0
        if not backlog_s and not missed:
            began_s = now_s
        uncached = max(1.0, request.prompt_tokens * (1 - hit_rate))
        own_s = speed.prefill_s(uncached, request.prompt_tokens)
        missed += backlog_s / workers + own_s + speed.transfer_s(request.prompt_tokens) > targets.ttft_s
        most = max(most, missed)
        backlog_s += own_s
    return most / len(trace)


class Planned:
    """Changes pools as planned: each worker starts so early that it serves in time."""

    def __init__(self, *, prefill: Sequence[int], decode: Sequence[int], start_s: float) -> None:
        self._plans = (prefill, decode)
        self._start_s = start_s

    @property
    def first(self) -> Shape:
        return Shape(prefill_workers=self._plans[0][0], decode_workers=self._plans[1][0])

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        first = int(now_s / STEP_S)
        last = math.ceil((now_s + self._start_s) / STEP_S)
        sizes = [max(plan[first : last + 1], default=plan[-1]) for plan in self._plans]
        wanted = fleet.wanted()
        if sizes != [wanted.prefill_workers, wanted.decode_workers]:
            fleet.scale(Shape(prefill_workers=sizes[0], decode_workers=sizes[1]))
