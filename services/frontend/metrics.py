"""Metrics of the frontend. The planner reads them by name."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import Gauge, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvmesh.telemetry import Instruments
from kvmesh.telemetry.metrics import DURATION_BUCKETS_S

UNKNOWN_MODEL = "unknown"
LENGTH_BUCKETS = tuple(float(base << power) for power in range(3, 17) for base in (2, 3))
"""Tokens: 16, 24, 32, 48 and so on up to 196 608."""


class GapHistogram(Collector):
    """Inter-token latency by model, as `kvmesh_frontend_itl_seconds`.

    Each chunk is one observation, on the hot path. The library's histogram takes a lock and walks the buckets each time.
    """

    NAME = "kvmesh_frontend_itl_seconds"

    def __init__(self) -> None:
        self._models: dict[str, ModelGaps] = {}

    def of_model(self, model: str) -> "ModelGaps":
        """Returns the counts of one served model."""
        gaps = self._models.get(model)
        if gaps is None:
            gaps = self._models[model] = ModelGaps()
        return gaps

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        family = HistogramMetricFamily(self.NAME, "Time between two tokens of a choice.", labels=["model"])
        for model, gaps in list(self._models.items()):
            family.add_metric([model], gaps.cumulative(), gaps.sum_s)
        yield family


class ModelGaps:
    """Counts per bucket of one model. Not thread-safe.

    Tokens of one frame mostly have the same gap to the tokens before them. A caller that sees the gap `last_s` again may
    increment `repeats` instead of calling `observe`.
    """

    __slots__ = ("_at", "_counts", "_sum_s", "last_s", "repeats")

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BUCKETS_S) + 1)
        self._sum_s = 0.0
        # The bucket of `last_s`, and so of the `repeats`.
        self._at = 0
        self.last_s = 0.0
        self.repeats = 0

    @property
    def sum_s(self) -> float:
        """Sum of all gaps."""
        self._settle()
        return self._sum_s

    def observe(self, gap_s: float, tokens: int) -> None:
        """Records `tokens` tokens that came `gap_s` after the previous one."""
        self._settle()
        self.last_s = gap_s / tokens
        self._at = bisect_left(DURATION_BUCKETS_S, self.last_s)
        self._counts[self._at] += tokens
        self._sum_s += gap_s

    def _settle(self) -> None:
        repeats, self.repeats = self.repeats, 0
        self._counts[self._at] += repeats
        self._sum_s += repeats * self.last_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns the number of gaps at or below each bound, in Prometheus' form."""
        self._settle()
        total, buckets = 0, []
        for bound, count in zip((*DURATION_BUCKETS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        return buckets


class FrontendMetrics:
    """Labels are served models and status codes only."""

    def __init__(self, instruments: Instruments, in_flight: Callable[[], float] = lambda: 0.0) -> None:
        self.requests = instruments.tally(
            "requests", help="Requests that ended, by HTTP status.", labels=["model", "code"]
        )
        self.ttft = instruments.spreads("ttft_seconds", help="Time to the first token.", labels=["model"])
        self.prompt_lengths = instruments.spreads(
            "prompt_length_tokens",
            help="Length of the prompts of started requests.",
            labels=["model"],
            buckets=LENGTH_BUCKETS,
        )
        self.prompt_tokens = instruments.tally(
            "prompt_tokens", help="Prompt tokens of started requests.", labels=["model"]
        )
        self.output_tokens = instruments.tally("output_tokens", help="Tokens received from workers.", labels=["model"])
        self.continued = instruments.tally(
            "continued_requests", help="Times that an answer was continued on another worker.", labels=["model"]
        )
        self.hedged = instruments.tally(
            "hedged_requests", help="Prompts that were sent to a second prefill worker.", labels=["model"]
        )
        self.hedges_won = instruments.tally(
            "hedges_won_requests", help="Prompts that the second prefill worker computed first.", labels=["model"]
        )
        self.retried = instruments.tally(
            "retried_requests", help="Times that a request without a token was placed again.", labels=["model"]
        )
        self.restarted = instruments.tally(
            "restarted_requests",
            help="Times that an answer of which the client had nothing was begun anew, since it could not be continued.",
            labels=["model"],
        )
        self.inflight: Gauge = instruments.gauge_function(
            "inflight_requests", help="Requests in flight.", function=in_flight
        )
        self.local_placements = instruments.counter(
            "local_placements", help="Requests that the frontend placed itself because no router answered."
        )
        self.gaps = GapHistogram()
        instruments.registry.register(self.gaps)
        self._models: dict[str, ModelMetrics] = {}

    def of_model(self, model: str) -> "ModelMetrics":
        """Returns the metrics of one served model. Looking each up by its label costs more than counting."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return found


class ModelMetrics:
    """Metrics that every request of one model updates."""

    __slots__ = (
        "continued",
        "gaps",
        "hedged",
        "hedges_won",
        "output_tokens",
        "prompt_lengths",
        "prompt_tokens",
        "restarted",
        "retried",
        "ttft",
    )

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self.gaps = metrics.gaps.of_model(model)
        self.output_tokens = metrics.output_tokens.of(model)
        self.prompt_lengths = metrics.prompt_lengths.of(model)
        self.prompt_tokens = metrics.prompt_tokens.of(model)
        self.continued = metrics.continued.of(model)
        self.restarted = metrics.restarted.of(model)
        self.retried = metrics.retried.of(model)
        self.hedged = metrics.hedged.of(model)
        self.hedges_won = metrics.hedges_won.of(model)
        self.ttft = metrics.ttft.of(model)
