"""`kvmesh explain ID`: why the router placed a request on its workers.

ID is the request's id: the header x-request-id of the response (x-kvmesh-request-id if the client sent an id of its own), the id of
the answer, with or without its prefix such as `chatcmpl-`, or `request_id` in the log.
"""

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvmesh.cli.connection import CALL_TIMEOUT_S, MeshChoice, MeshTarget, connect, run_command
from kvmesh.cli.output import Row, render_table
from kvmesh.core import Candidate, EarlierPlacement, Explanation, Report
from kvmesh.discovery.base import ROUTER
from kvmesh.rpc.router.explanations import find_explanation, is_chosen, request_id_in, shown_candidates, worker_name
from kvmesh.settings import setting, split_operands

SECONDS = "s"
USAGE = (
    "Usage: kvmesh explain ID [--mesh NAME]. ID is in the header x-request-id of a response, in the answer's field id,"
    " and in the log"
)


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(MeshChoice):
    """Settings of `kvmesh explain`."""

    candidates_max: int = setting(20, "rows in the table of candidates; the chosen candidate is always shown", min=1)
    timeout_s: float = setting(CALL_TIMEOUT_S, "longest wait for a router's answer", min=0.01)


def render(explanation: Explanation, router_id: str, candidates_max: int) -> str:
    parts = [*_head(explanation, router_id), "", _table(explanation, candidates_max)]
    if explanation.reports:
        parts += ["", "then: " + "; ".join(map(_report_text, explanation.reports))]
    return "\n".join(parts)


def _head(explanation: Explanation, router_id: str) -> Iterable[str]:
    decided = datetime.fromtimestamp(explanation.decided_at_s, UTC).isoformat(sep=" ", timespec="milliseconds")
    yield f"request   {explanation.request_id}"
    for earlier in explanation.earlier:
        yield f"earlier   {_earlier_text(earlier)}"
    if explanation.attempt:
        yield f"attempt   {explanation.attempt}, {_computed(explanation)}"
    yield f"decided   {decided} by {router_id}, policy {explanation.policy}"
    placement = explanation.placement
    if placement is not None:
        prefill = f"prefill {placement.prefill.worker_id}, " if placement.prefill is not None else "no prefill worker, "
        yield f"placed    {prefill}decode {placement.decode.worker_id} ({', '.join(placement.reasons)})"
        yield f"cached    {placement.cached_tokens} prompt tokens expected{_observed_cached(explanation)}"
        yield f"ttft      {_ttft(explanation)}"
    elif explanation.error is not None:
        yield f"refused   {explanation.error.reason}: {explanation.error.message}"
    else:
        yield "waits     in the router's queue"
    if explanation.margin is not None:
        yield f"margin    {_cost(explanation.margin, explanation.cost_unit)} to the second best"


def _earlier_text(earlier: EarlierPlacement) -> str:
    """Returns one placement that failed, on a line."""
    if earlier.placement is not None:
        where = " and ".join(
            worker.worker_id for worker in (earlier.placement.prefill, earlier.placement.decode) if worker
        )
    else:
        where = earlier.error.reason if earlier.error is not None else "not placed"
    reports = "; ".join(map(_report_text, earlier.reports))
    return f"attempt {earlier.attempt}: {where}{f', {reports}' if reports else ''}"


def _computed(explanation: Explanation) -> str:
    first = explanation.earlier[0].prompt_tokens if explanation.earlier else explanation.prompt_tokens
    emitted = explanation.prompt_tokens - first
    return f"continues after {emitted} tokens of the answer" if emitted > 0 else "from the beginning of the answer"


def _observed_cached(explanation: Explanation) -> str:
    found = [report.cached_tokens for report in explanation.reports if report.cached_tokens is not None]
    return f", {found[-1]} found" if found else ""


def _ttft(explanation: Explanation) -> str:
    expected_s = explanation.placement.expected_ttft_s if explanation.placement is not None else None
    observed_s, queued_s = explanation.observed_ttft_s, explanation.queued_s
    parts = [f"{_seconds(expected_s)} expected" if expected_s is not None else "not estimated"]
    if observed_s is None:
        parts.append("none observed")
    else:
        parts.append(f"{_seconds(observed_s)} observed")
        served_s = observed_s - (queued_s or 0.0)
        if expected_s:
            parts.append(f"{(served_s - expected_s) / expected_s:+.0%}")
    if queued_s is not None:
        parts.append(f"{_seconds(queued_s)} of it in the queue")
    return ", ".join(parts)


def _table(explanation: Explanation, candidates_max: int) -> str:
    shown = shown_candidates(explanation, candidates_max)
    # A dict keeps the router's order of the cost terms.
    names = list(dict.fromkeys(name for candidate in shown for name, _ in candidate.terms))
    columns = ("", "PREFILL", "DECODE", "COST", *(name.upper() for name in names), "REMOVED BY")
    text = render_table(columns, [_row(candidate, explanation, names) for candidate in shown])
    left = len(explanation.candidates) - len(shown)
    return f"{text}\n... and {left} more" if left else text


def _row(candidate: Candidate, explanation: Explanation, names: Sequence[str]) -> Row:
    terms = dict(candidate.terms)
    unit = explanation.cost_unit
    costs = [_cost(terms[name], unit) if name in terms else "-" for name in names]
    is_scored = not candidate.removed_by and bool(candidate.terms)
    return (
        "*" if is_chosen(candidate, explanation) else "",
        worker_name(candidate.prefill) or "-",
        worker_name(candidate.decode) or "-",
        _cost(candidate.cost, unit) if is_scored else "-",
        *costs,
        candidate.removed_by,
    )


def _report_text(report: Report) -> str:
    text = f"{report.kind.value} after {_seconds(report.elapsed_s)}"
    if report.error is not None:
        text += f" ({report.error.reason}{f' at {report.failed_worker_id}' if report.failed_worker_id else ''})"
    return text


def _cost(value: float, unit: str) -> str:
    return _seconds(value) if unit == SECONDS else f"{value:.4g}{f' {unit}' if unit else ''}"


def _seconds(value: float) -> str:
    return f"{1000 * value:.1f} ms" if abs(value) < 10 else f"{value:.1f} s"


async def _explain(settings: ExplainSettings, target: MeshTarget, request_id: str) -> str:
    async with connect(target) as connection:
        view = await connection.registry.instances(ROUTER)
        explanation, router_id = await find_explanation(
            view.instances, connection.channels, request_id, timeout_s=settings.timeout_s
        )
        return render(explanation, router_id, settings.candidates_max)


def main(argv: Sequence[str]) -> int:
    operands, flags = split_operands(ExplainSettings, argv)

    def act(settings: ExplainSettings) -> int:
        if len(operands) != 1:
            problem = f"{len(operands)} ids are given: {' '.join(operands)}" if operands else "no request is named"
            print(f"kvmesh: {problem}. {USAGE}", file=sys.stderr)
            return 2
        print(asyncio.run(_explain(settings, settings.target(), request_id_in(operands[0]))))
        return 0

    return run_command(ExplainSettings, flags, act, program="kvmesh explain ID", description=__doc__)
