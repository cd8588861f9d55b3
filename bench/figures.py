"""Results of one load run: rates, percentiles, CPU and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.noise import Noise
from bench.target import LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All measurements of one run."""

    results: Sequence[LoadResult]
    wall_s: float
    client_cpu_s: float
    cpu_s: Mapping[str, float]
    rss_mib: Mapping[str, float]
    noise: Noise

    def summary(self) -> dict[str, Any]:
        """Returns rates, percentiles in milliseconds, CPU-seconds per 1 000 streamed tokens and per request, and noise."""
        good = [result for result in self.results if not result.error]
        bad = [result for result in self.results if result.error]
        tokens = sum(result.output_tokens for result in good)
        return {
            "requests": len(good),
            "errors": len(bad),
            "error_sample": bad[0].error if bad else "",
            "wall_s": self.wall_s,
            "requests_per_s": len(good) / self.wall_s,
            "tokens_per_s": tokens / self.wall_s,
            "prompt_tokens_mean": _mean([result.prompt_tokens for result in good]),
            "cached_tokens_mean": _mean([result.cached_tokens for result in good]),
            "chunks_per_request": _mean([result.chunks for result in good]),
            "ttft_ms": percentiles([result.ttft_s for result in good]),
            "total_ms": percentiles([result.total_s for result in good]),
            "gap_ms": percentiles([gap for result in good for gap in result.gaps_s]),
            "cpu_s_per_1k_tokens": {name: 1000 * cpu / max(1, tokens) for name, cpu in self.cpu_s.items()},
            "cpu_ms_per_request": {name: 1000 * cpu / max(1, len(good)) for name, cpu in self.cpu_s.items()},
            "rss_mib": dict(self.rss_mib),
            "server_cpu_s_per_1k_tokens": 1000 * sum(self.cpu_s.values()) / max(1, tokens),
            "client_cpu_s_per_1k_tokens": 1000 * self.client_cpu_s / max(1, tokens),
            "client_cores": self.client_cpu_s / self.wall_s,
            "calibration_ms": self.noise.calibration_ms,
            "others_cores": self.noise.others_cores,
        }


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90, p99 (nearest rank) and mean in milliseconds; empty if there are no values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    picked = {
        name: 1000 * ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] for name, share in ranks.items()
    }
    return {**picked, "mean": 1000 * sum(ordered) / len(ordered)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
