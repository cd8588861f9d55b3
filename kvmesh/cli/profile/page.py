"""A profile as one HTML page with plots. Pure."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import median
from typing import TypeVar

from kvmesh.cli.charts import ChartLine, chart, html_page
from kvmesh.cli.profile.fit import pairs
from kvmesh.core import PerformanceProfile
from kvmesh.core.engine_profile import DecodePoint, EngineProfile, PrefillPoint

MS = 1000.0

Point = TypeVar("Point")


def page(profile: EngineProfile, summary: str) -> str:
    """Measured medians, and the fit beside them. `summary`: text with the coefficients."""
    title = f"{profile.engine} {profile.engine_version}, {profile.model}"
    machine = ", ".join(f"{name} {value}" for name, value in profile.machine.items())
    handoff = _medians(profile.handoff, lambda point: point.prompt_tokens, lambda point: point.time_s)
    charts = [
        chart(title="Prefill", x_name="uncached prompt tokens", y_name="milliseconds", lines=_prefill_lines(profile)),
        chart(title="Decode step", x_name="requests that decode", y_name="milliseconds", lines=_decode_lines(profile)),
        chart(
            title="Handoff",
            x_name="prompt tokens",
            y_name="milliseconds",
            lines=[ChartLine(name="until the first token", points=handoff)],
        ),
    ]
    about = f"<p>{escape(profile.measured_at)} on {escape(machine)}</p><pre>{escape(summary)}</pre>"
    return html_page(title, [about, *charts])


def _prefill_lines(profile: EngineProfile) -> list[ChartLine]:
    """Returns two lines for each number of prompts that arrive together. Prompts with a cached part are used in the fit but not shown."""
    whole = [point for point in profile.prefill if point.uncached_tokens == point.prompt_tokens]
    lines = []
    for batch in sorted({point.batch for point in whole}):
        mine = [point for point in whole if point.batch == batch]
        lines += _lines(
            f"{batch} at once", mine, lambda point: point.uncached_tokens, measured_s=lambda point: point.time_s,
            fitted_s=lambda point: prefill_s(profile, point),
        )  # fmt: skip
    return lines


def _decode_lines(profile: EngineProfile) -> list[ChartLine]:
    lines = []
    for context in sorted({point.context_tokens for point in profile.decode}):
        mine = [point for point in profile.decode if point.context_tokens == context]
        lines += _lines(
            f"context {context}", mine, lambda point: point.batch, measured_s=lambda point: point.step_s,
            fitted_s=lambda point: decode_s(profile.fit, point),
        )  # fmt: skip
    return lines


def _lines(
    name: str,
    points: Sequence[Point],
    x: Callable[[Point], float],
    *,
    measured_s: Callable[[Point], float],
    fitted_s: Callable[[Point], float],
) -> list[ChartLine]:
    return [
        ChartLine(name=f"{name}, measured", points=_medians(points, x, measured_s)),
        ChartLine(name=f"{name}, fit", points=_medians(points, x, fitted_s)),
    ]


def _medians(
    points: Iterable[Point], x: Callable[[Point], float], time_s: Callable[[Point], float]
) -> list[tuple[float, float]]:
    found: dict[float, list[float]] = {}
    for point in points:
        found.setdefault(float(x(point)), []).append(MS * time_s(point))
    return [(at, median(values)) for at, values in sorted(found.items())]


def prefill_s(profile: EngineProfile, point: PrefillPoint) -> float:
    """Returns what the fit expects."""
    fit, steps = profile.fit, min(2, point.batch) if profile.shares_steps else point.batch
    per_prompt_s = (fit.prefill_s_per_token or 0.0) * point.uncached_tokens
    per_prompt_s += (fit.prefill_s_per_token_pair or 0.0) * pairs(point)
    return steps * (fit.prefill_base_s or 0.0) + point.batch * per_prompt_s


def decode_s(fit: PerformanceProfile, point: DecodePoint) -> float:
    """Returns what the fit expects."""
    per_request_s = (fit.decode_s_per_request or 0.0) + (fit.decode_s_per_kv_token or 0.0) * point.context_tokens
    return (fit.decode_step_base_s or 0.0) + point.batch * per_request_s
