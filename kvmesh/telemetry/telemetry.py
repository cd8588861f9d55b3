"""One process's telemetry: metrics of gRPC calls, instruments and traces."""

import asyncio
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector

from kvmesh.telemetry.metrics import ClosedSet, Instruments
from kvmesh.telemetry.settings import TelemetrySettings
from kvmesh.telemetry.tracing import Tracing

_METHODS_MAX = 256
_REASONS_MAX = 64


class RpcMetrics:
    """Calls by method, code and reason. `method` is package.Service/Method; `reason` is `none` after success."""

    def __init__(self, instruments: Instruments, *, side: str) -> None:
        self._started = instruments.counter(f"rpc_{side}_started_calls", help="Calls begun.", labels=["method"])
        self._finished = instruments.counter(
            f"rpc_{side}_finished_calls", help="Calls ended.", labels=["method", "code", "reason"]
        )
        self._duration = instruments.histogram(
            f"rpc_{side}_duration_seconds", help="From begin to end.", labels=["method"]
        )
        self._methods = ClosedSet(_METHODS_MAX, is_word=False)
        self._reasons = ClosedSet(_REASONS_MAX)

    def started(self, method: str) -> None:
        self._started.labels(self._methods.label(method)).inc()

    def finished(self, method: str, *, code: str, reason: str, duration_s: float) -> None:
        method = self._methods.label(method)
        self._finished.labels(method, code, self._reasons.label(reason or "none")).inc()
        self._duration.labels(method).observe(duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The process's interceptors and services report to this."""

    instruments: Instruments
    tracing: Tracing
    server_calls: RpcMetrics
    client_calls: RpcMetrics
    registry: CollectorRegistry = field(repr=False)

    @classmethod
    def create(
        cls,
        service: str,
        *,
        settings: TelemetrySettings | None = None,
        registry: CollectorRegistry | None = None,
        tracing: Tracing | None = None,
    ) -> "Telemetry":
        """Telemetry of one service. Without a `registry` it makes one, with metrics of the process."""
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
        instruments = Instruments(registry, service)
        instruments.gauge_function("event_loop_tasks", help="Unfinished asyncio tasks of the process.", function=_tasks)
        return cls(
            instruments=instruments,
            tracing=tracing or Tracing(settings or TelemetrySettings(), service=service),
            server_calls=RpcMetrics(instruments, side="server"),
            client_calls=RpcMetrics(instruments, side="client"),
            registry=registry,
        )


def _tasks() -> float:
    """Called by the scrape, which runs on the event loop."""
    try:
        return float(len(asyncio.all_tasks()))
    except RuntimeError:  # There is no loop, as in a test that reads the registry.
        return 0.0
