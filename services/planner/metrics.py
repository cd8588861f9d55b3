"""Metrics of the planner."""

from kvmesh.core.planning import Decision
from kvmesh.telemetry import Instruments


class PlannerMetrics:
    """Counts observations, their problems, and decisions. Labels are served models and closed sets."""

    def __init__(self, instruments: Instruments) -> None:
        self._observations = instruments.counter("observations", help="Observations made.")
        self._problems = instruments.gauge("problems", help="Problems of the newest observation.")
        self._decisions = instruments.counter(
            "decisions", help="Decisions that differ from the one before.", labels=("action", "outcome")
        )
        self._planned = instruments.gauge(
            "planned_workers", help="Workers that the newest decision wants.", labels=("model", "role")
        )
        self._rate = instruments.gauge("predicted_rate", help="Predicted requests per second.", labels=("model",))
        self._error = instruments.gauge(
            "predictor_error_ratio",
            help="Mean error of the predictor in back-tests, over the mean rate.",
            labels=("model",),
        )
        self._correction = instruments.gauge(
            "correction_ratio", help="Observed over predicted latency, within its bounds.", labels=("model", "latency")
        )

    def record_observation(self, problems: int) -> None:
        """Records an observation and its number of problems."""
        self._observations.inc()
        self._problems.set(problems)

    def record_decision(self, decision: Decision, *, is_new: bool) -> None:
        """Records a decision. `is_new`: it differs from the model's decision before."""
        if is_new:
            self._decisions.labels(decision.action.value, decision.outcome.value).inc()
        model, inputs = decision.model, decision.inputs
        self._planned.labels(model, "prefill").set(decision.shape.prefill_workers)
        self._planned.labels(model, "decode").set(decision.shape.decode_workers)
        self._rate.labels(model).set(inputs.predicted.requests_per_s)
        if inputs.predictor_error is not None:
            self._error.labels(model).set(inputs.predictor_error)
        self._correction.labels(model, "ttft").set(inputs.ttft_correction)
        self._correction.labels(model, "itl").set(inputs.itl_correction)
