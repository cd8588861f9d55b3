"""Tables of results."""

from collections.abc import Sequence

from bench.points import Point

COLUMNS = (
    *("engines", "load", "req/s", "tokens/s", "TTFT p50 ms", "p99", "gap p50 ms", "p99", "errors"),
    *("CPU-s per 1k tokens", "of which", "client", "loop ms", "others"),
)


def rows(points: Sequence[Point], *, with_system: bool = False) -> list[list[str]]:
    """Returns one row per point: COLUMNS, optionally after the system's name."""
    return [[*([point.system] if with_system else []), *_row(point)] for point in points]


def _row(point: Point) -> list[str]:
    summary = point.summary
    ttft_ms, gap_ms = summary["ttft_ms"], summary["gap_ms"]
    parts = {name: cpu_s for name, cpu_s in summary["cpu_s_per_1k_tokens"].items() if cpu_s >= 0.0001}
    return [
        point.kind,
        point.scenario.name,
        f"{summary['requests_per_s']:.0f}",
        f"{summary['tokens_per_s']:.0f}",
        *(f"{ttft_ms.get(name, 0):.2f}" for name in ("p50", "p99")),
        *(f"{gap_ms.get(name, 0):.2f}" for name in ("p50", "p99")),
        str(summary["errors"]),
        f"{summary['server_cpu_s_per_1k_tokens']:.4f}",
        " ".join(f"{name} {cpu_s:.4f}" for name, cpu_s in parts.items()),
        f"{summary['client_cpu_s_per_1k_tokens']:.4f}",
        f"{summary['calibration_ms']:.1f}",
        f"{summary['others_cores']:.2f}",
    ]


def render(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, padded for terminals."""
    table = [list(columns), *map(list, lines)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    padded = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in table
    ]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def memory_rows(points: Sequence[Point]) -> list[list[str]]:
    """Returns the resident memory of each process after its last point, by system and kind of mesh."""
    last = {(point.system, point.kind): point.summary["rss_mib"] for point in points}
    return [
        [system, kind, " ".join(f"{name} {mib:.0f}" for name, mib in used.items()), f"{sum(used.values()):.0f}"]
        for (system, kind), used in last.items()
    ]


MEMORY_COLUMNS = ("system", "engines", "resident MiB", "sum")
NOTE = (
    "CPU of all server processes; `loop ms` is the time of a fixed single-core loop (the slower of before and after the point) "
    "and `others` the cores that unrelated processes used meanwhile. Compare only points for which both are similar."
)
