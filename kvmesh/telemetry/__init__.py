"""Logs, metrics and traces of a process."""

from opentelemetry.trace import Span

from kvmesh.telemetry.logging import LogFormat, LogLevel, configure_logging
from kvmesh.telemetry.loop_lag import LoopLag
from kvmesh.telemetry.metrics import Instruments
from kvmesh.telemetry.metrics_server import MetricsServer
from kvmesh.telemetry.settings import TelemetrySettings
from kvmesh.telemetry.telemetry import Telemetry
from kvmesh.telemetry.tracing import (
    Tracing,
    current_span,
    current_traceparent,
    fail_span,
    is_traceparent,
    traceparent_of,
)

__all__ = [
    "Instruments",
    "LogFormat",
    "LogLevel",
    "LoopLag",
    "MetricsServer",
    "Span",
    "Telemetry",
    "TelemetrySettings",
    "Tracing",
    "configure_logging",
    "current_span",
    "current_traceparent",
    "fail_span",
    "is_traceparent",
    "traceparent_of",
]
