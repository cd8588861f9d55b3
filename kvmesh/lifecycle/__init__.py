"""Starts the parts of a process in order and stops them in reverse. Every wait is bounded."""

from kvmesh.lifecycle.parts import Part, PartFailedError, RunningPart
from kvmesh.lifecycle.process import die_with_parent, end_process, run, run_process
from kvmesh.lifecycle.runner import STOP_TIMEOUT_S, LifecycleSettings, run_parts
from kvmesh.lifecycle.signals import run_until_signalled, stop_on_signals
from kvmesh.lifecycle.supervise import Supervisor, SupervisorSettings, SupervisorStatistics
from kvmesh.lifecycle.together import run_together

__all__ = [
    "STOP_TIMEOUT_S",
    "LifecycleSettings",
    "Part",
    "PartFailedError",
    "RunningPart",
    "Supervisor",
    "SupervisorSettings",
    "SupervisorStatistics",
    "die_with_parent",
    "end_process",
    "run",
    "run_parts",
    "run_process",
    "run_together",
    "run_until_signalled",
    "stop_on_signals",
]
