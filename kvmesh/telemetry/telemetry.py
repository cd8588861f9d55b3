"""The three of them together."""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector

from kvmesh.telemetry.metrics import Instruments
from kvmesh.telemetry.rpc_metrics import RpcMetrics
from kvmesh.telemetry.settings import TelemetrySettings
from kvmesh.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a process's interceptors and services report to."""

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
        """Telemetry of one service on a registry of its own, with the process's figures, unless one is given."""
        if registry is None:
            registry = CollectorRegistry()
            # CPU seconds and memory of the process, under Prometheus's standard names.
            ProcessCollector(registry=registry)
        instruments = Instruments(registry, service)
        return cls(
            instruments=instruments,
            tracing=tracing or Tracing(settings or TelemetrySettings(), service=service),
            server_calls=RpcMetrics(instruments, side="server"),
            client_calls=RpcMetrics(instruments, side="client"),
            registry=registry,
        )
