"""Finds the cheapest pools that meet the targets, or what limits them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvmesh.core.planning import PoolLimits, Shape, Targets
from services.planner.sizing.bursts import Bursts
from services.planner.sizing.demand import Demand
from services.planner.sizing.forecast import Corrections, LatencyForecast
from services.planner.sizing.speed import Speed

RATE_BISECTIONS = 12
WORKERS_MAX_DEFAULT = 1000
HUGE = 100_000
"""Workers of a pool whose size limits nothing."""
IDLE_RATE = 1e-6
RELAXED = 0.97
"""Part of what is reachable that is still aimed at: the rest would take many workers."""
NO_WORKERS_HELP = ("step_time", "transfer", "prefill_time")
"""Limits that more workers do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A shape, and what it gives. `limit`: what keeps the targets from being met; empty: they are met."""

    shape: Shape
    forecast: LatencyForecast
    cost: float
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizer:
    """Sizes the pools of one model. `workers_max`: limit of a pool whose targets name none. `bursts` None: arrivals are Poisson ones."""

    speed: Speed
    targets: Targets
    corrections: Corrections = field(default_factory=Corrections)
    workers_max: int = WORKERS_MAX_DEFAULT
    bursts: Bursts | None = None

    def forecast(self, demand: Demand, shape: Shape) -> LatencyForecast:
        return LatencyForecast(
            speed=self.speed,
            demand=demand,
            shape=shape,
            targets=self.targets,
            corrections=self.corrections,
            bursts=self.bursts,
        )

    def cost(self, shape: Shape) -> float:
        """Cost per hour."""
        return cost_of(shape, self.targets)

    def goodput_per_s(self, demand: Demand, shape: Shape) -> float:
        """Returns the highest rate, at most that of the demand, of which the targets' percentile is within the targets."""
        rate = demand.requests_per_s
        if shape.decode_workers < 1 or not rate:
            return 0.0
        if self.forecast(demand, shape).meets:
            return rate
        low, high = 0.0, rate
        for _ in range(RATE_BISECTIONS):
            middle = (low + high) / 2
            if self.forecast(demand.at_rate(middle), shape).meets:
                low = middle
            else:
                high = middle
        return low

    def size(self, demand: Demand) -> Sizing:
        """Returns the cheapest shape that meets the targets. If there is none, returns the shape with the highest goodput."""
        if (shape := self._cheapest(demand)) is not None:
            return self._sizing(demand, shape)
        limit = self.limit(demand)
        if limit in (*NO_WORKERS_HELP, ""):
            return self._sizing(demand, self._relaxed(demand), limit)
        return self._sizing(demand, self._most_goodput(demand), limit)

    def limit(self, demand: Demand) -> str:
        """Returns what keeps the targets from being met even by the largest pools. Empty: nothing."""
        # At this rate no request waits for another one, so more workers do not change what fails here.
        alone = self.forecast(demand.at_rate(IDLE_RATE), self._huge)
        ttft_s, itl_s, percentile = self.targets.ttft_s, self.targets.itl_s, self.targets.percentile
        if alone.kv_batch_max < 1:
            return "kv_capacity"
        if itl_s is not None and alone.itl_within(itl_s) < percentile:
            return "step_time"
        if ttft_s is not None and alone.ttft_within(ttft_s) < percentile:
            within = alone.ttft_within(ttft_s + self.speed.transfer_s(max(n for n, _ in demand.prompt_lengths)))
            return "transfer" if within >= percentile else "prefill_time"
        most = self._most(demand)
        # 0 stays 0: decode workers compute the prompts.
        more_prefill = Shape(prefill_workers=most.prefill_workers and HUGE, decode_workers=most.decode_workers)
        if self.forecast(demand, most).meets:
            return ""
        if self.forecast(demand, more_prefill).meets:
            return "prefill_capacity"
        kv_bound = alone.kv_batch_max < self.speed.running_max and not math.isfinite(self.forecast(demand, most).batch)
        return "kv_capacity" if kv_bound else "decode_capacity"

    @property
    def _huge(self) -> Shape:
        return Shape(prefill_workers=HUGE if self._has_prefill else 0, decode_workers=HUGE)

    @property
    def _has_prefill(self) -> bool:
        return self._most_of(self.targets.prefill) > 0

    def _cheapest(self, demand: Demand) -> Shape | None:
        return min(self._candidates(demand), key=lambda shape: (self.cost(shape), shape.prefill_workers), default=None)

    def _candidates(self, demand: Demand) -> Iterator[Shape]:
        """For each number of prefill workers the fewest decode workers that meet the targets, as long as that may be cheaper."""
        low, high = self._bounds()
        fewest = self._fewest_decode(
            demand, prefill=high.prefill_workers, low=low.decode_workers, high=high.decode_workers
        )
        if fewest is None:
            return
        first = self._fewest_prefill(demand, self._stable_prefill(demand, low.prefill_workers), high)
        for prefill in range(first, high.prefill_workers + 1):
            decode = self._fewest_decode(demand, prefill=prefill, low=fewest, high=high.decode_workers)
            if decode is None:
                continue
            shape = Shape(prefill_workers=prefill, decode_workers=decode)
            if self._fits(shape):
                yield shape
            # Further prefill workers only cost more, because the decode pool cannot be smaller.
            if decode == fewest:
                return

    def _fewest_prefill(self, demand: Demand, low: int, high: Shape) -> int:
        """With the largest decode pool, which meets the targets with the largest prefill pool."""
        return _first(
            lambda prefill: self._meets(demand, prefill=prefill, decode=high.decode_workers),
            low=low,
            high=high.prefill_workers,
        )

    def _fewest_decode(self, demand: Demand, *, prefill: int, low: int, high: int) -> int | None:
        """More decode workers never make a latency longer. Often the lowest number is the answer."""
        low = max(1, low)
        if high < 1:
            return None
        if self._meets(demand, prefill=prefill, decode=low):
            return low
        if not self._meets(demand, prefill=prefill, decode=high):
            return None
        return _first(lambda decode: self._meets(demand, prefill=prefill, decode=decode), low=low + 1, high=high)

    def _meets(self, demand: Demand, prefill: int, decode: int) -> bool:
        return self.forecast(demand, Shape(prefill_workers=prefill, decode_workers=decode)).meets

    def _most_goodput(self, demand: Demand) -> Shape:
        """Returns the cheapest shape for the highest rate that the limits allow; the smallest shape if they allow none."""
        best = self._bounds()[0]
        low, high = 0.0, demand.requests_per_s
        for _ in range(RATE_BISECTIONS):
            middle = (low + high) / 2
            shape = self._cheapest(demand.at_rate(middle))
            if shape is None:
                high = middle
            else:
                low, best = middle, shape
        return best

    def _relaxed(self, demand: Demand) -> Shape:
        """Returns a shape for the share of requests that can meet the targets; if none can, one that serves the load."""
        reachable = RELAXED * self.forecast(demand.at_rate(IDLE_RATE), self._huge).attainment
        targets = replace(self.targets, percentile=min(self.targets.percentile, reachable))
        if not reachable:
            targets = replace(targets, ttft_s=None, itl_s=None, percentile=self.targets.percentile)
        other = replace(self, targets=targets)
        return other._cheapest(demand) or other._most_goodput(demand)

    def _stable_prefill(self, demand: Demand, low: int) -> int:
        if not low and not self._has_prefill:
            return 0
        busy = self.forecast(demand, Shape(prefill_workers=1, decode_workers=1)).prefill_load
        return max(low, math.floor(busy) + 1) if low or busy else low

    def _bounds(self) -> tuple[Shape, Shape]:
        prefill, decode = self.targets.prefill, self.targets.decode
        low = Shape(prefill_workers=prefill.workers_min, decode_workers=decode.workers_min)
        high = Shape(prefill_workers=self._most_of(prefill), decode_workers=self._most_of(decode))
        return low, high

    def _most_of(self, limits: PoolLimits) -> int:
        return max(limits.workers_min, self.workers_max if limits.workers_max is None else limits.workers_max)

    def _most(self, demand: Demand) -> Shape:
        """Returns the largest shape within the limits, with the split of the highest goodput if the cost is limited."""
        if self.targets.cost_max is not None:
            return self._most_goodput(demand)
        return self._bounds()[1]

    def _fits(self, shape: Shape) -> bool:
        return self.targets.cost_max is None or self.cost(shape) <= self.targets.cost_max + 1e-9

    def _sizing(self, demand: Demand, shape: Shape, limit: str = "") -> Sizing:
        return Sizing(shape=shape, forecast=self.forecast(demand, shape), cost=self.cost(shape), limit=limit)


def cost_of(shape: Shape, targets: Targets) -> float:
    """Cost per hour."""
    return (
        shape.prefill_workers * targets.prefill.cost_per_worker + shape.decode_workers * targets.decode.cost_per_worker
    )


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the smallest number from `low` on for which something holds, by bisection. It holds for `high`, and for all after the first."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
