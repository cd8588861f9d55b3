"""The tables of a side-by-side run, in the form of docs/contribute/benchmarks.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.medians import columns, compare, compare_quietest, ratios
from bench.side_memory import COLUMNS as MEMORY_COLUMNS
from bench.side_memory import MemoryResult
from bench.side_parts import FIGURES, TARGETS
from bench.table import NOTE, render

VERDICT_COLUMNS = ("figure", "engines", "load", "target", "kvmesh / Dynamo", "")


def tables(points: Sequence[Mapping[str, Any]], memory: Sequence[MemoryResult]) -> Iterator[str]:
    """Yields Markdown, block by block."""
    yield "kvmesh / Dynamo = ratio; above 1 is better for rates, also per CPU-second, below 1 for times."
    verdicts = list(_verdicts(points))
    if verdicts:
        yield "Compared with the targets, medians over the rounds:"
        yield render(VERDICT_COLUMNS, verdicts)
    for part, figures in FIGURES.items():
        of_part = [point for point in points if point["part"] == part]
        if of_part:
            yield f"`{part}`, medians over the rounds:"
            yield render(columns(figures), compare(of_part, figures))
            if _has_rounds(of_part):
                yield f"`{part}`, only the quietest round of each point:"
                yield render(columns(figures), compare_quietest(of_part, figures))
    if memory:
        yield (
            "Memory over many requests of 8 tokens in and 1 out, 32 in flight; totals count a shared page once (PSS). "
            "`serving`: the processes that take part in requests. Planner and `up` (registry, supervisor) do not; Dynamo ran none."
        )
        yield render(MEMORY_COLUMNS, [row for result in memory for row in result.rows()])
    yield NOTE


def _has_rounds(points: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether any point was measured more than once."""
    seen = [(point["system"], point["kind"], point["scenario"]) for point in points]
    return len(set(seen)) < len(seen)


def _verdicts(points: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for target in TARGETS:
        of_part = [point for point in points if point["part"] == target.part]
        for (engines, load), ratio in ratios(of_part, target.figure).items():
            if engines.startswith(target.engines):
                aim = f"{'at most' if target.is_at_most else 'at least'} {target.ratio:g}"
                verdict = "met" if target.is_met(ratio) else "missed"
                yield [target.figure, engines, load, aim, f"{ratio:.2f}", verdict]
