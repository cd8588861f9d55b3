"""Regular work of the router: expires reservations and predictions, checks the workers' health, frees index memory."""

from collections.abc import Iterable
from dataclasses import asdict

from kvmesh.clock import Clock
from kvmesh.event_log import event_logger
from services.router.core import RouterCore
from services.router.health.monitor import GOOD_EVENTS, HealthEvent
from services.router.metrics import RouterMetrics

_log = event_logger(__name__)

INTERVAL_S = 1.0
SWEEP_BLOCKS = 5000
"""Blocks per sweep step: about a millisecond of the event loop."""
SWEEP_PAUSE_S = 0.005
"""Between two steps, for everything else in the event loop."""


class Maintenance:
    """A running part."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, clock: Clock) -> None:
        self._core = core
        self._metrics = metrics
        self._clock = clock

    async def start(self) -> None:
        """Part of the interface; `run` does the work."""

    async def run(self) -> None:
        while True:
            now = self._clock.now()
            if expired := list(self._core.expire(now=now)):
                self._metrics.count_expired(len(expired))
                _log.warning("reservations_expired", count=len(expired))
            self._core.index.expire(now)
            self._metrics.remove_absent_workers()
            self._log_events(self._core.check_health(now=now))
            until_s = now + INTERVAL_S
            # A sweep may need more time than an interval; the rest continues after the next round of the other work.
            while self._core.index.sweep(SWEEP_BLOCKS) and self._clock.now() < until_s:
                await self._clock.sleep(SWEEP_PAUSE_S)
            await self._clock.sleep(until_s - self._clock.now())

    def _log_events(self, events: Iterable[HealthEvent]) -> None:
        for event in events:
            self._metrics.count_health_event(event)
            log = _log.info if event.kind in GOOD_EVENTS else _log.warning
            log(event.kind, **{key: value for key, value in asdict(event).items() if value and key != "kind"})

    async def aclose(self) -> None:
        """Part of the interface; the runner cancels `run`."""
