"""The router's clockwork: ends reservations whose time is over, frees index memory that workers left behind."""

import logging

from kvmesh.clock import Clock
from services.router.core import RouterCore
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
            until_s = self._clock.now() + EXPIRE_INTERVAL_S
            while self._core.index.sweep(self._sweep_blocks) and self._clock.now() < until_s:
                await self._clock.sleep(SWEEP_PAUSE_S)
            await self._clock.sleep(until_s - self._clock.now())

    async def aclose(self) -> None:
        """Nothing to free; the runner cancels `run`."""
