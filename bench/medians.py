"""Compares two systems over the rounds of one run."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

OURS, THEIRS = "kvmesh", "dynamo"
FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "tokens/s": lambda summary: float(summary["tokens_per_s"]),
    "TTFT p50 ms": lambda summary: float(summary["ttft_ms"].get("p50", 0.0)),
    "TTFT p99 ms": lambda summary: float(summary["ttft_ms"].get("p99", 0.0)),
    "tokens per CPU-s": lambda summary: 1000 / max(1e-9, float(summary["server_cpu_s_per_1k_tokens"])),
    "requests/s": lambda summary: float(summary["requests_per_s"]),
    "requests per CPU-s": lambda summary: 1000 / max(1e-9, sum(map(float, summary["cpu_ms_per_request"].values()))),
    "CPU-s per 1k tokens": lambda summary: float(summary["server_cpu_s_per_1k_tokens"]),
    "loop ms": lambda summary: float(summary["calibration_ms"]),
    "others": lambda summary: float(summary["others_cores"]),
}
USUAL = ("tokens/s", "TTFT p50 ms", "TTFT p99 ms", "CPU-s per 1k tokens", "loop ms", "others")


def columns(figures: Sequence[str] = USUAL) -> Sequence[str]:
    """Returns the column names of a comparison."""
    return ("engines", "load", *figures, "errors")


def compare(points: Sequence[Mapping[str, Any]], figures: Sequence[str] = USUAL) -> list[list[str]]:
    """Returns one row per point that both systems have: `ours / theirs = ratio` of the medians over the rounds.

    `points` have the form of the JSON file, in the order in which they were measured.
    """
    return [_line(place, systems, figures) for place, systems in _by_place(points).items()]


def compare_quietest(points: Sequence[Mapping[str, Any]], figures: Sequence[str] = USUAL) -> list[list[str]]:
    """Like `compare`, but for the quietest round of each point: that in which unrelated processes used least CPU during the noisier of its two
    halves.

    Medians mislead if only one system's rounds were disturbed.
    """
    lines = []
    for place, systems in _by_place(points).items():
        rounds = list(zip(systems[OURS], systems[THEIRS], strict=False))
        ours, theirs = min(rounds, key=lambda both: max(summary["others_cores"] for summary in both))
        lines.append(_line(place, {OURS: [ours], THEIRS: [theirs]}, figures))
    return lines


def ratios(points: Sequence[Mapping[str, Any]], figure: str) -> Mapping[tuple[str, str], float]:
    """Returns the ratios of one figure's medians, ours / theirs, by engines and load."""
    read = FIGURES[figure]
    found = {}
    for place, systems in _by_place(points).items():
        ours, theirs = (median([read(summary) for summary in systems[system]]) for system in (OURS, THEIRS))
        if theirs:
            found[place] = ours / theirs
    return found


def _by_place(
    points: Sequence[Mapping[str, Any]],
) -> Mapping[tuple[str, str], Mapping[str, Sequence[Mapping[str, Any]]]]:
    found: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for point in points:
        found.setdefault((point["kind"], point["scenario"]), {}).setdefault(point["system"], []).append(point)
    return {place: systems for place, systems in found.items() if systems.keys() >= {OURS, THEIRS}}


def _line(
    place: tuple[str, str], systems: Mapping[str, Sequence[Mapping[str, Any]]], figures: Sequence[str]
) -> list[str]:
    return [*place, *(_cell(FIGURES[name], systems) for name in figures), _errors(systems)]


def _cell(figure: Callable[[Mapping[str, Any]], float], systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    ours, theirs = (median([figure(summary) for summary in systems[system]]) for system in (OURS, THEIRS))
    return f"{_number(ours)} / {_number(theirs)}" + (f" = {ours / theirs:.2f}" if theirs else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _errors(systems: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    return " / ".join(str(sum(summary["errors"] for summary in systems[system])) for system in (OURS, THEIRS))
