"""The published formulas of Dynamo's SLA planner, as a policy for comparison.

Source: ai-dynamo/dynamo, components/src/dynamo/planner, `core/throughput_scaling.py`, `core/load_scaling.py` and
`core/perf_model/engine_query.py`, as of release 1.6. The time of a forward pass comes from the simulated workers' own linear model, which
favours Dynamo: its planner uses a regression. Its defaults: throughput scaling every 180 s gives the lower bound; load scaling every 5 s adds or
removes one worker, unless a scaling is in progress.
"""

import math
from dataclasses import dataclass

from kvmesh.core import Role
from kvmesh.core.planning import Shape, Targets
from services.planner.observation import ModelObservation
from services.planner.predict.predictors import LocalTrend
from services.planner.sizing.demand import Demand
from services.planner.sizing.speed import Speed
from services.whatif.engine import ReplayEngine
from services.whatif.fleet import ChangingFleet

THROUGHPUT_INTERVAL_S = 180.0
LOAD_INTERVAL_S = 5.0
HIT_RATE_MAX = 0.95
PREFILL_BATCH_MAX = 128
SENSITIVITY = 0.8


def forward_s(speed: Speed, prefill_tokens: int) -> float:
    """Returns the time to prefill `prefill_tokens`, in chunks of a step."""
    chunks = max(1, math.ceil(prefill_tokens / speed.step_tokens_max))
    return chunks * speed.prefill_base_s + speed.prefill_s_per_token * prefill_tokens


def prefill_capacity(speed: Speed, *, isl: float, hit_rate: float, ttft_s: float) -> float:
    """Returns the requests per second of a prefill engine: the best batch with TTFT within the target, or the best of all if none is."""
    tokens = math.ceil(isl * (1 - min(HIT_RATE_MAX, hit_rate)))
    points = [(batch, forward_s(speed, batch * tokens)) for batch in range(1, PREFILL_BATCH_MAX + 1)]
    feasible = [batch / time_s for batch, time_s in points if time_s <= ttft_s]
    return max(feasible or [batch / time_s for batch, time_s in points])


def decode_capacity(speed: Speed, *, isl: float, osl: float, itl_s: float) -> float:
    """Returns the requests per second of a decode engine: the best batch with ITL within the target, or the best of all if none is."""
    context = isl + osl / 2
    batch_max = max(1, min(speed.running_max, int(speed.kv_tokens / context)))
    points = [(batch, speed.decode_s(batch, context)) for batch in range(1, batch_max + 1)]
    feasible = [batch / (osl * step_s) for batch, step_s in points if step_s <= itl_s]
    return max(feasible or [batch / (osl * step_s) for batch, step_s in points])


def replicas(demand_rps: float, engine_rps: float, *, least: int = 1) -> int:
    return max(math.ceil(demand_rps / engine_rps), least)


@dataclass(slots=True, kw_only=True)
class _Bounds:
    prefill: int = 1
    decode: int = 1


class DynamoFormulas:
    """Dynamo's mode `sla` with both scalings on."""

    def __init__(self, targets: Targets, speed: Speed) -> None:
        assert targets.ttft_s is not None
        assert targets.itl_s is not None
        self._ttft_s, self._itl_s = targets.ttft_s, targets.itl_s
        self._speed = speed
        self._bounds = _Bounds()
        self._rates: list[float] = []
        self._sum, self._ticks = 0.0, 0
        self._next_throughput_s = THROUGHPUT_INTERVAL_S
        self._next_load_s = LOAD_INTERVAL_S

    def tick(self, observation: ModelObservation, fleet: ChangingFleet, now_s: float) -> None:
        self._sum, self._ticks = self._sum + observation.recent_rate, self._ticks + 1
        demand = observation.demand
        if demand is None:
            return
        if now_s >= self._next_throughput_s:
            self._next_throughput_s += THROUGHPUT_INTERVAL_S
            self._set_bounds(demand)
        if now_s < self._next_load_s:
            return
        self._next_load_s += LOAD_INTERVAL_S
        wanted = fleet.wanted()
        engines = fleet.engines()
        if len(engines) != wanted.prefill_workers + wanted.decode_workers:
            return  # A scaling is in progress.
        prefill = wanted.prefill_workers + self._prefill_change(demand, engines)
        decode = wanted.decode_workers + self._decode_change(demand, engines)
        shape = Shape(
            prefill_workers=max(prefill, self._bounds.prefill), decode_workers=max(decode, self._bounds.decode)
        )
        if (shape.prefill_workers, shape.decode_workers) != (wanted.prefill_workers, wanted.decode_workers):
            fleet.scale(shape)

    def _set_bounds(self, demand: Demand) -> None:
        self._rates.append(self._sum / self._ticks)
        self._sum, self._ticks = 0.0, 0
        rate = LocalTrend()(self._rates, 1)[0]
        isl, osl = demand.prompt_tokens, demand.output_tokens
        self._bounds = _Bounds(
            prefill=replicas(
                rate, prefill_capacity(self._speed, isl=isl, hit_rate=demand.hit_rate, ttft_s=self._ttft_s)
            ),
            decode=replicas(rate, decode_capacity(self._speed, isl=isl, osl=osl, itl_s=self._itl_s)),
        )

    def _prefill_change(self, demand: Demand, engines: list[tuple[Role, ReplayEngine]]) -> int:
        queued = [engine.waiting_tokens for role, engine in engines if role is Role.PREFILL]
        own_s = forward_s(self._speed, math.ceil(demand.prompt_tokens * (1 - min(HIT_RATE_MAX, demand.hit_rate))))
        return prefill_change(self._speed, queued, own_s=own_s, ttft_s=self._ttft_s)

    def _decode_change(self, demand: Demand, engines: list[tuple[Role, ReplayEngine]]) -> int:
        running = [engine.running for role, engine in engines if role is Role.DECODE]
        context = demand.prompt_tokens + demand.output_tokens / 2
        return decode_change(self._speed, running, context=context, itl_s=self._itl_s)


def prefill_change(speed: Speed, queued_tokens: list[int], *, own_s: float, ttft_s: float) -> int:
    """Returns +1 if the TTFT of all engines would exceed the target, and -1 if it would keep it with one engine less and a margin of 20 %."""
    count = len(queued_tokens)
    waits_s = [forward_s(speed, tokens) if tokens else 0.0 for tokens in queued_tokens]
    if count and all(wait_s + own_s > ttft_s for wait_s in waits_s):
        return 1
    fits = (
        all(wait_s * count / (count - 1) < (ttft_s - own_s) * SENSITIVITY for wait_s in waits_s) if count > 1 else False
    )
    return -1 if fits else 0


def decode_change(speed: Speed, running: list[int], *, context: float, itl_s: float) -> int:
    """Returns +1 if the ITL of all engines exceeds the target, and -1 if with one engine less KV fits and ITL has a margin of 20 %."""
    count = len(running)
    if count and all(speed.decode_s(batch, context) > itl_s for batch in running):
        return 1
    if count < 2:
        return 0
    fuller = [batch * count / (count - 1) for batch in running]
    fits = all(
        batch * context < speed.kv_tokens and speed.decode_s(batch, context) < SENSITIVITY * itl_s for batch in fuller
    )
    return -1 if fits else 0
