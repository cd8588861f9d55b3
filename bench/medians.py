"""Two systems compared, point by point, over the rounds of one run."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.points import Point

OURS, THEIRS = "kvmesh", "dynamo"
FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "tokens/s": lambda summary: float(summary["tokens_per_s"]),
    "TTFT p50 ms": lambda summary: float(summary["ttft_ms"].get("p50", 0.0)),
    "TTFT p99 ms": lambda summary: float(summary["ttft_ms"].get("p99", 0.0)),
    "CPU-s per 1k tokens": lambda summary: float(summary["server_cpu_s_per_1k_tokens"]),
    "loop ms": lambda summary: float(summary["calibration_ms"]),
    "others": lambda summary: float(summary["others_cores"]),
}
COLUMNS = ("engines", "load", *FIGURES, "errors")


def compare(points: Sequence[Point]) -> list[list[str]]:
    """One row per point that both systems have: `ours / theirs = ratio` of the medians over the rounds."""
    found: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for point in points:
        systems = found.setdefault((point.kind, point.scenario.name), {})
        systems.setdefault(point.system, []).append(point.summary)
    return [
        [kind, name, *(_cell(figure, systems) for figure in FIGURES.values()), _errors(systems)]
        for (kind, name), systems in found.items()
        if systems.keys() >= {OURS, THEIRS}
    ]


def _cell(figure: Callable[[Mapping[str, Any]], float], systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    ours, theirs = (median([figure(summary) for summary in systems[system]]) for system in (OURS, THEIRS))
    return f"{_number(ours)} / {_number(theirs)}" + (f" = {ours / theirs:.2f}" if theirs else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _errors(systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    return " / ".join(str(sum(summary["errors"] for summary in systems[system])) for system in (OURS, THEIRS))
