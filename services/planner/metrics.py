"""Metrics of the planner."""

from kvmesh.telemetry import Instruments


class PlannerMetrics:
    """Counts observations and their problems."""

    def __init__(self, instruments: Instruments) -> None:
        self._observations = instruments.counter("observations", "Observations made.")
        self._problems = instruments.gauge("problems", "Problems of the newest observation.")

    def record_observation(self, problems: int) -> None:
        """Records an observation and its number of problems."""
        self._observations.inc()
        self._problems.set(problems)
