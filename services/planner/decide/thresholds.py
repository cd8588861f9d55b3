"""Sizes pools by thresholds on their load: needs no targets and no profile. Pure."""

import math
from dataclasses import dataclass, replace

from kvmesh.core.planning import PoolLimits, Shape, Targets
from kvmesh.errors import InvalidRequestError
from kvmesh.settings import setting
from services.planner.observation import ModelObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSettings:
    """Sizes pools by thresholds: one worker more above a high threshold, one less below a low one."""

    backlog_high: float = setting(8192.0, "Waiting prompt tokens per prefill worker above which the pool grows.", min=1)
    backlog_low: float = setting(
        512.0, "Waiting prompt tokens per worker of the smaller pool below which it shrinks.", min=0
    )
    kv_high: float = setting(
        0.8, "Share of KV blocks in use on decode workers above which the pool grows.", min=0, max=1
    )
    kv_low: float = setting(0.5, "Share of KV blocks in use in the smaller pool below which it shrinks.", min=0, max=1)

    def __post_init__(self) -> None:
        if self.backlog_low >= self.backlog_high:
            raise InvalidRequestError("backlog_low must be below backlog_high", field="backlog_low")
        if self.kv_low >= self.kv_high:
            raise InvalidRequestError("kv_low must be below kv_high", field="kv_low")


@dataclass(slots=True, kw_only=True)
class _Pool:
    """`calm_since_s`: from when on the pool has been below its low threshold; infinite: it is not."""

    changed_s: float = -math.inf
    calm_since_s: float = math.inf


class Thresholds:
    """Each pool changes by one worker at a time: it grows again when the last new worker serves, and shrinks after `calm_s` below the threshold.

    Hysteresis: a pool shrinks only if the smaller one would be below the low threshold, which is below the high one.
    """

    def __init__(self, settings: ThresholdSettings, *, start_s: float, calm_s: float, workers_max: int) -> None:
        self._settings = settings
        self._start_s, self._calm_s, self._workers_max = start_s, calm_s, workers_max
        self._prefill, self._decode = _Pool(), _Pool()

    def choose(self, observation: ModelObservation, wanted: Shape, targets: Targets | None, *, now_s: float) -> Shape:
        """Returns the sizes to have; those that are wanted already if nothing changes."""
        limits = targets or Targets(model=observation.model)
        settings, ready = self._settings, observation.ready
        return replace(
            wanted,
            prefill_workers=self._size(
                self._prefill,
                wanted.prefill_workers,
                observation.backlog_tokens / max(1, ready.prefill_workers),
                bounds=(settings.backlog_low, settings.backlog_high),
                limits=limits.prefill,
                now_s=now_s,
            )
            if wanted.prefill_workers
            else 0,
            decode_workers=self._size(
                self._decode,
                wanted.decode_workers,
                observation.kv_usage or 0.0,
                bounds=(settings.kv_low, settings.kv_high),
                limits=limits.decode,
                now_s=now_s,
            ),
        )

    def _size(
        self, pool: _Pool, size: int, value: float, *, bounds: tuple[float, float], limits: PoolLimits, now_s: float
    ) -> int:
        low, high = bounds
        most = self._workers_max if limits.workers_max is None else limits.workers_max
        if value > high:
            pool.calm_since_s = math.inf
            if size < most and now_s - pool.changed_s >= self._start_s:
                pool.changed_s = now_s
                return size + 1
            return size
        # `value * size / (size - 1)` is the load per worker that the smaller pool would have.
        if size <= max(1, limits.workers_min) or value * size / (size - 1) >= low:
            pool.calm_since_s = math.inf
            return size
        pool.calm_since_s = min(pool.calm_since_s, now_s)
        if now_s - pool.calm_since_s < self._calm_s:
            return size
        pool.changed_s, pool.calm_since_s = now_s, math.inf
        return size - 1
