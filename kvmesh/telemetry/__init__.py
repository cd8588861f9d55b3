"""Logs, metrics and traces: one object per process that everything else is given."""

from kvmesh.telemetry.logging import EventLogger, LogFormat, LogLevel, configure_logging, event_logger
from kvmesh.telemetry.metrics import Instruments
from kvmesh.telemetry.metrics_server import MetricsServer
from kvmesh.telemetry.settings import TelemetrySettings
from kvmesh.telemetry.telemetry import Telemetry
from kvmesh.telemetry.tracing import Tracing, current_traceparent

__all__ = [
    "EventLogger",
    "Instruments",
    "LogFormat",
    "LogLevel",
    "MetricsServer",
    "Telemetry",
    "TelemetrySettings",
    "Tracing",
    "configure_logging",
    "current_traceparent",
    "event_logger",
]
