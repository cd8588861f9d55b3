"""Settings of logs, metrics and traces."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting
from kvmesh.telemetry.logging import LogFormat, LogLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Logs, metrics and traces of a process."""

    log_level: LogLevel = setting(LogLevel.INFO, "Lowest severity that is logged.")
    log_format: LogFormat = setting(LogFormat.AUTO, "JSON lines, or text for people; auto: text on a terminal.")
    metrics_host: str = setting("", "Address of /metrics, /health and /live; empty: that of `address`.")
    metrics_port: int = setting(0, "Port of /metrics, /health and /live; 0: a free one.", min=0, max=65535)
    otlp_endpoint: str = setting("", "OTLP gRPC collector, such as http://localhost:4317. Empty: no spans are made.")
    otlp_timeout_s: float = internal(5.0, "Longest export of a batch, and of the last spans on exit.")
    trace_ratio: float = setting(
        1.0, "Share of new traces that are recorded. Traces of callers keep the caller's decision.", min=0, max=1
    )
    spans_max: int = internal(2048, "Spans that wait for export. More are dropped.")
