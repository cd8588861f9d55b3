"""A simulation as one HTML page. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvmesh.cli.charts import ChartLine, chart, distribution, html_page
from kvmesh.core.planning import Decision, Targets
from kvmesh.core.whatif import SimulationOutcome
from services.whatif.result import WhatIfResult

INTERVALS = 120
DECISIONS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulated way to have pools."""

    name: str
    outcome: SimulationOutcome
    result: WhatIfResult
    decisions: Sequence[Decision] = ()


def report(title: str, targets: Targets, runs: Sequence[Run]) -> str:
    """Returns the page. Times and lengths only: a simulation knows no text."""
    charts = [
        chart(title="Load", x_name="seconds", y_name="requests/s", lines=[
            ChartLine(name="arrivals", points=_rate(runs[0].result), is_step=True)
        ]),
        chart(title="Within targets", x_name="seconds", y_name="% of the requests that arrive", lines=[
            ChartLine(name=run.name, points=_within(run.result), is_step=True) for run in runs
        ]),
        chart(title="Workers", x_name="seconds", y_name="wanted workers", lines=[line for run in runs for line in _workers(run)]),
        chart(title="Time to first token", x_name="percentile", y_name="seconds", lines=[
            ChartLine(name=run.name, points=distribution(run.result.ttft_s)) for run in runs
        ]),
        chart(title="Inter-token latency", x_name="percentile", y_name="milliseconds", lines=[
            ChartLine(name=run.name, points=distribution([1000 * value for value in run.result.itl_s])) for run in runs
        ]),
    ]  # fmt: skip
    body = [f"<p>{_targets(targets)}</p>", _table(COLUMNS, [_row(run) for run in runs])]
    body += charts
    for run in runs:
        if run.decisions:
            body += [f"<h2>Decisions: {escape(run.name)}</h2>", _table(DECISION_COLUMNS, _decisions(run.decisions))]
    return html_page(title, body)


COLUMNS = (
    "pools",
    "requests",
    "within targets",
    "goodput/s",
    "TTFT p50",
    "p95",
    "p99",
    "ITL p50",
    "p95",
    "p99",
    "hits",
    "worker-hours",
    "cost",
)
DECISION_COLUMNS = ("second", "action", "pools", "reason", "detail")


def _targets(targets: Targets) -> str:
    ttft = f"TTFT {targets.ttft_s:g} s" if targets.ttft_s is not None else "any TTFT"
    itl = f"ITL {1000 * targets.itl_s:g} ms" if targets.itl_s is not None else "any ITL"
    return f"Targets: {targets.percentile:.2%} of the requests within {ttft} and {itl}."


def _row(run: Run) -> Sequence[str]:
    outcome = run.outcome
    return (
        run.name,
        str(outcome.requests),
        f"{outcome.attainment:.1%}",
        f"{outcome.goodput_per_s:.2f}",
        *(f"{value:.3f} s" for value in (outcome.ttft_p50_s, outcome.ttft_p95_s, outcome.ttft_p99_s)),
        *(f"{1000 * value:.1f} ms" for value in (outcome.itl_p50_s, outcome.itl_p95_s, outcome.itl_p99_s)),
        f"{outcome.hit_rate:.1%}",
        f"{outcome.worker_hours:.2f}",
        f"{outcome.cost:.2f}",
    )


def _decisions(decisions: Sequence[Decision]) -> list[Sequence[str]]:
    return [
        (f"{each.decided_at_s:.0f}", each.action.value, each.shape.text, each.reason, each.detail)
        for each in decisions[:DECISIONS_MAX]
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _intervals(result: WhatIfResult) -> tuple[float, list[list[bool]]]:
    """Returns the requests by time of arrival."""
    span_s = max(1e-9, result.within[-1][0])
    width_s = span_s / INTERVALS
    found: list[list[bool]] = [[] for _ in range(INTERVALS)]
    for at_s, is_good in result.within:
        found[min(INTERVALS - 1, int(at_s / width_s))].append(is_good)
    return width_s, found


def _rate(result: WhatIfResult) -> list[tuple[float, float]]:
    width_s, found = _intervals(result)
    return [(i * width_s, len(each) / width_s) for i, each in enumerate(found)]


def _within(result: WhatIfResult) -> list[tuple[float, float]]:
    width_s, found = _intervals(result)
    return [(i * width_s, 100 * sum(each) / len(each)) for i, each in enumerate(found) if each]


def _workers(run: Run) -> list[ChartLine]:
    shapes = [*run.result.shapes, (run.result.within[-1][0], run.result.shapes[-1][1])]
    return [
        ChartLine(
            name=f"{run.name}: {role}",
            points=[(at_s, getattr(shape, f"{role}_workers")) for at_s, shape in shapes],
            is_step=True,
        )
        for role in ("prefill", "decode")
    ]
