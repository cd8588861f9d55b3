"""What a load gets from pools of a given size. The formulas are explained in docs/operate/planner.md.

A request meets the targets if its first token comes within `ttft_s` and its mean time per later token is at most `itl_s`. Both are taken as
independent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from kvmesh.core.planning import Shape, Targets
from services.planner.sizing.bursts import Bursts, BurstWaits
from services.planner.sizing.demand import Demand
from services.planner.sizing.queueing import batching_factor, erlang_c, mean_wait_s, normal_below, wait_within
from services.planner.sizing.speed import PoolTimes, PromptTimes, Speed, prompt_times, uncached_tokens

FIRST_STEPS = 1.5
"""Decode steps until the first token of a transferred prompt: on average half of the running one, and the next one."""
TTFT_MAX_S = 3600.0
BISECTIONS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Observed over predicted waits for prefill workers, and inter-token latencies; already limited."""

    wait: float = 1.0
    itl: float = 1.0


# No slots: `cached_property` needs `__dict__`.
@dataclass(frozen=True, kw_only=True)
class LatencyForecast:
    """The latencies of `demand` on `shape`. Without prefill workers, decode workers compute all prompts."""

    speed: Speed
    demand: Demand
    shape: Shape
    targets: Targets
    corrections: Corrections = field(default_factory=Corrections)
    bursts: Bursts | None = None

    @cached_property
    def is_stable(self) -> bool:
        """Whether the pools can serve the load at all."""
        # If no request goes to prefill workers, there may be none: 0 < 0 + 1.
        return self.prefill_load < self.shape.prefill_workers + (not self.prefill_rate) and math.isfinite(self.batch)

    @cached_property
    def attainment(self) -> float:
        """Share of requests within both targets; 0 if the pools cannot serve the load."""
        if not self.is_stable:
            return 0.0
        ttft_s, itl_s = self.targets.ttft_s, self.targets.itl_s
        within_ttft = 1.0 if ttft_s is None else self.ttft_within(ttft_s)
        return within_ttft * (1.0 if itl_s is None else self.itl_within(itl_s))

    @property
    def meets(self) -> bool:
        return self.is_stable and self.attainment >= self.targets.percentile

    def ttft_within(self, limit_s: float) -> float:
        """Returns the share of requests whose first token arrives within `limit_s`: the smaller of the formulas' and the burst replay's
        result.
        """
        return min(self._ttft_within(limit_s), self._ttft_within_in_bursts(limit_s))

    def _ttft_within_in_bursts(self, limit_s: float) -> float:
        waits = self._burst_waits
        if waits is None:
            return 1.0
        rest_s = limit_s - FIRST_STEPS * self.step_s
        # A prompt that shares a step is ready when the whole step is: on average half of the others' time later.
        shared_s = (self.prompts_per_step - 1) / 2 * self._times.prefill.mean_s
        share = 0.0
        for part, is_deflected, own_s in self._times.own_s:
            spare_s = rest_s - own_s
            within = waits.within(max(0.0, spare_s - shared_s)) if spare_s >= 0 else 0.0
            share += part * (1.0 if is_deflected else within)
        return share

    def _ttft_within(self, limit_s: float) -> float:
        rest_s = limit_s - self._slot_wait_s
        corrected = self.corrections.wait
        share = 0.0
        for part, is_deflected, own_s in self._times.own_s:
            if is_deflected:
                # The prompt shares its steps with the batch, so a step and its own computing pass.
                wait_s = rest_s - own_s - self.step_s
                share += part * wait_within(
                    wait_s, waiting=self._deflect_waiting, mean_s=corrected * self._deflect_wait_s
                )
            else:
                wait_s = rest_s - own_s - FIRST_STEPS * self.step_s
                share += part * wait_within(
                    wait_s, waiting=self._prefill_waiting, mean_s=corrected * self._prefill_wait_s
                )
        return share

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to first token, without the correction; infinite if the pools cannot serve the load."""
        return self.own_mean_s + self.wait_mean_s if self.is_stable else math.inf

    @cached_property
    def own_mean_s(self) -> float:
        """The part of the mean time to first token that a request takes on idle prefill workers, decode steps included."""
        return sum(
            part * (own_s + (1.0 if is_deflected else FIRST_STEPS) * self.step_s)
            for part, is_deflected, own_s in self._times.own_s
        )

    @cached_property
    def wait_mean_s(self) -> float:
        """Mean wait for a worker and a slot."""
        deflected, prefill = self._times.deflected.share, self._times.prefill.share
        waits = self._burst_waits
        prefill_wait_s = max(self._prefill_wait_s, waits.mean_s if waits is not None else 0.0)
        return self._slot_wait_s + deflected * self._deflect_wait_s + prefill * prefill_wait_s

    def itl_within(self, limit_s: float) -> float:
        """Returns the share of time in which the batches are small enough for steps of `limit_s`.

        The number of decoding requests is about Poisson, whatever the lengths of answers (an M/G/infinity queue), and routers spread them
        evenly.
        """
        batch_max = self._batch_within(limit_s / self.corrections.itl)
        if batch_max < 0:
            return 0.0
        mean = self.batch * self.shape.decode_workers
        # 0.5 is the continuity correction for the normal approximation of a count.
        return normal_below(
            batch_max * self.shape.decode_workers + 0.5, mean=mean, variance=mean * max(1.0, self.demand.burstiness)
        )

    @property
    def ttft_s(self) -> float | None:
        """Time to first token at the targets' percentile. None if the pools cannot serve the load."""
        return self._quantile(self.ttft_within, TTFT_MAX_S) if self.is_stable else None

    @property
    def itl_s(self) -> float | None:
        """Inter-token latency at the targets' percentile. None if the pools cannot serve the load."""
        return self._quantile(self.itl_within, TTFT_MAX_S) if self.is_stable else None

    @cached_property
    def prefill_rate(self) -> float:
        """Requests per second that go to prefill workers."""
        return self.demand.requests_per_s * self._times.prefill.share

    @cached_property
    def prefill_load(self) -> float:
        """Prefill workers that the load keeps busy: rate times mean service time."""
        return self.prefill_rate * self._prefill_times.mean_s

    @cached_property
    def batch(self) -> float:
        """Mean decoding requests per decode worker, by Little's law; infinite if they cannot keep up, or lack slots or KV blocks."""
        workers = self.shape.decode_workers
        prefill_share = self._deflect_load / workers if workers else 1.0
        if prefill_share >= 1:
            return math.inf
        # Steps per second of each worker's requests, and the step time as a function of the batch: batch = started * step_s(batch).
        started = self.demand.requests_per_s * max(1.0, self.demand.output_tokens) / workers
        per_request_s = (
            self.speed.decode_s(batch=1, context_tokens=self.context_tokens) - self.speed.decode_step_base_s
        ) / (1 - prefill_share)
        if started * per_request_s >= 1:
            return math.inf
        batch = started * self.speed.decode_step_base_s / (1 - prefill_share) / (1 - started * per_request_s)
        # `batch_max` below 1: the KV blocks of a worker do not suffice for a single request.
        return batch if 1 <= self.batch_max > batch else math.inf

    @cached_property
    def step_s(self) -> float:
        """Mean time of a decode step, including the prompts that decode workers compute."""
        return self.speed.decode_s(batch=self.batch, context_tokens=self.context_tokens) / (
            1 - self._deflect_load / self.shape.decode_workers
        )

    @property
    def context_tokens(self) -> float:
        """Mean tokens that a decoding request holds: its prompt and half of its answer."""
        return self.demand.prompt_tokens + self.demand.output_tokens / 2

    @cached_property
    def batch_max(self) -> float:
        """Largest batch that a decode worker has slots and KV blocks for. It reserves blocks for whole answers."""
        return min(float(self.speed.running_max), self.kv_batch_max)

    @property
    def kv_batch_max(self) -> float:
        return self.speed.kv_tokens / max(1.0, self.demand.prompt_tokens + self.demand.output_tokens)

    @cached_property
    def _times(self) -> PromptTimes:
        deflect_tokens = float(self.shape.deflect_tokens) if self.shape.prefill_workers else math.inf
        return prompt_times(
            self.speed, tuple(self.demand.prompt_lengths), hit_rate=self.demand.hit_rate, deflect_tokens=deflect_tokens
        )

    @cached_property
    def _prefill_times(self) -> PoolTimes:
        """The prefill workers' service times.

        Prompts that wait share a step and its fixed part. About 1 / (1 - rho) prompts are on a worker (M/M/1), and a step holds at most
        `prompts_per_step`.
        """
        alone = self._times.prefill
        utilisation = self.prefill_rate * alone.mean_s / max(1, self.shape.prefill_workers)
        shared = self.prompts_per_step if utilisation >= 1 else min(self.prompts_per_step, 1 / (1 - utilisation))
        return alone if shared <= 1 else alone.less(self.speed.prefill_base_s * (1 - 1 / shared))

    @cached_property
    def prompts_per_step(self) -> float:
        """Prompts of mean length that fit into a step; at least 1."""
        return max(
            1.0, self.speed.step_tokens_max / uncached_tokens(self.demand.prompt_tokens, hit_rate=self.demand.hit_rate)
        )

    @cached_property
    def _prefill_wait_s(self) -> float:
        """Mean wait for a prefill worker."""
        if not self.prefill_rate:
            return 0.0
        workers = self.shape.prefill_workers
        times = self._prefill_times
        wait_s = mean_wait_s(
            servers=workers,
            rate=self.prefill_rate,
            service_s=times.mean_s,
            service_cv2=times.cv2,
            arrival_cv2=self.demand.burstiness,
        )
        return wait_s * batching_factor(utilisation=self.prefill_load / workers, prompts_per_step=self.prompts_per_step)

    @cached_property
    def _burst_waits(self) -> BurstWaits | None:
        """None: arrivals are not known, or nothing goes to prefill workers."""
        if self.bursts is None or not self.prefill_rate or not self.shape.prefill_workers:
            return None
        return self.bursts.waits(self.prefill_load, self.shape.prefill_workers)

    @cached_property
    def _prefill_waiting(self) -> float:
        return erlang_c(self.shape.prefill_workers, self.prefill_load) if self.prefill_rate else 0.0

    @cached_property
    def _deflected_rate(self) -> float:
        return self.demand.requests_per_s * self._times.deflected.share

    @cached_property
    def _deflect_load(self) -> float:
        """Decode workers that computing prompts keeps busy."""
        return self._deflected_rate * self._times.deflected.mean_s

    @cached_property
    def _deflect_wait_s(self) -> float:
        if not self._deflected_rate:
            return 0.0
        times = self._times.deflected
        workers = self.shape.decode_workers
        # The batch continues while prompts are computed, so the wait grows by the same factor as the steps.
        stretch = self.step_s / self.speed.decode_s(batch=self.batch, context_tokens=self.context_tokens)
        return stretch * mean_wait_s(
            servers=workers,
            rate=self._deflected_rate,
            service_s=times.mean_s,
            service_cv2=times.cv2,
            arrival_cv2=self.demand.burstiness,
        )

    @cached_property
    def _deflect_waiting(self) -> float:
        return erlang_c(self.shape.decode_workers, self._deflect_load) if self._deflected_rate else 0.0

    @cached_property
    def _slot_wait_s(self) -> float:
        """Mean wait for a slot or KV blocks on decode workers; every slot is a server that a request holds for its whole answer."""
        slots = max(1, int(self.shape.decode_workers * self.batch_max))
        service_s = max(1.0, self.demand.output_tokens) * self.step_s
        return mean_wait_s(servers=slots, rate=self.demand.requests_per_s, service_s=service_s, service_cv2=1.0)

    def _batch_within(self, step_s: float) -> float:
        """Largest batch whose steps take at most `step_s`; below 0 if even an empty one takes longer."""
        share = 1 - self._deflect_load / self.shape.decode_workers
        per_request_s = self.speed.decode_s(batch=1, context_tokens=self.context_tokens) - self.speed.decode_step_base_s
        room_s = step_s * share - self.speed.decode_step_base_s
        if per_request_s <= 0:
            return math.inf if room_s >= 0 else -1.0
        return min(self.batch_max, room_s / per_request_s) if room_s >= 0 else -1.0

    def _quantile(self, within: Callable[[float], float], high_s: float) -> float:
        """Returns the smallest limit within which the targets' percentile of the requests is."""
        low_s = 0.0
        for _ in range(BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if within(middle_s) >= self.targets.percentile:
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s
