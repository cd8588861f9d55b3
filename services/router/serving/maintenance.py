"""The router's clockwork: ends reservations whose time is over, frees index memory that workers left behind."""

import logging
from collections.abc import Iterable
from dataclasses import asdict

from kvmesh.clock import Clock
from services.router.core import RouterCore
from services.router.health.monitor import GOOD_NEWS, HealthEvent
from services.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

EXPIRE_INTERVAL_S = 1.0
SWEEP_PAUSE_S = 0.005


class Upkeep:
    """A running part."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, clock: Clock, *, sweep_blocks: int) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._sweep_blocks = sweep_blocks

    async def start(self) -> None:
        """Nothing to begin."""

    async def run(self) -> None:
        """Goes on until cancelled."""
        while True:
            expired = list(self._core.expire(now=self._clock.now()))
            if expired:
                self._metrics.expired(len(expired))
                log.warning("reservations_expired", extra={"data": {"count": len(expired)}})
            self._core.index.expire(self._clock.now())
            self._metrics.forget_workers()
            self._tell(self._core.check_health(now=self._clock.now()))
            until_s = self._clock.now() + EXPIRE_INTERVAL_S
            while self._core.index.sweep(self._sweep_blocks) and self._clock.now() < until_s:
                await self._clock.sleep(SWEEP_PAUSE_S)
            await self._clock.sleep(until_s - self._clock.now())

    def _tell(self, events: Iterable[HealthEvent]) -> None:
        for event in events:
            self._metrics.health_changed(event)
            level = logging.INFO if event.kind in GOOD_NEWS else logging.WARNING
            log.log(level, event.kind, extra={"data": {key: value for key, value in asdict(event).items() if value}})

    async def aclose(self) -> None:
        """Nothing to free; the runner cancels `run`."""
