"""What the planner measures of itself."""

from kvmesh.telemetry import Instruments


class PlannerMetrics:
    """Observations and what stood in their way."""

    def __init__(self, instruments: Instruments) -> None:
        self._observations = instruments.counter("observations", "Observations made.")
        self._problems = instruments.gauge("problems", "Problems of the newest observation.")

    def observed(self, problems: int) -> None:
        """An observation was made."""
        self._observations.inc()
        self._problems.set(problems)
