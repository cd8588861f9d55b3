"""Fits the linear model of a worker's speed to measured points. Pure.

Prefill: base x steps + per token x uncached tokens + per pair x pairs of tokens. Prompts that arrive together share steps on some
engines, and cost the base time each on others: the better fit says which. Decode: base + per request x batch + per KV token x tokens
held. Errors are relative, so that long prompts do not outweigh short ones. Coefficients are never negative: a term that would be is
omitted.
"""

from collections.abc import Sequence

import numpy as np

from kvmesh.core import PerformanceProfile
from kvmesh.core.engine_profile import DecodePoint, HandoffPoint, PrefillPoint, Residuals

Rows = Sequence[tuple[float, ...]]


def fit_prefill(points: Sequence[PrefillPoint]) -> tuple[PerformanceProfile, Residuals, bool]:
    """Returns the last value: prompts that arrive together share steps, the first one alone and the others another one."""
    times_s = _means([(p.prompt_tokens, p.uncached_tokens, p.batch) for p in points], [p.time_s for p in points])
    fits = []
    for shares_steps in (True, False):
        rows = [
            (
                float(min(2, p.batch) if shares_steps else p.batch),
                float(p.batch * p.uncached_tokens),
                p.batch * pairs(p),
            )
            for p in points
        ]
        found = _solve(rows, times_s)
        fits.append((_residuals(rows, found, times_s), found, shares_steps))
    residuals, (base_s, token_s, pair_s), shares_steps = min(fits, key=lambda fit: fit[0].rms)
    profile = PerformanceProfile(
        prefill_base_s=base_s, prefill_s_per_token=max(token_s, 1e-12), prefill_s_per_token_pair=pair_s
    )
    return profile, residuals, shares_steps


def fit_decode(points: Sequence[DecodePoint]) -> tuple[PerformanceProfile, Residuals]:
    rows = [(1.0, float(point.batch), float(point.batch * point.context_tokens)) for point in points]
    times_s = _means([(p.batch, p.context_tokens) for p in points], [p.step_s for p in points])
    base_s, request_s, token_s = _solve(rows, times_s)
    profile = PerformanceProfile(
        decode_step_base_s=base_s, decode_s_per_request=request_s, decode_s_per_kv_token=token_s
    )
    return profile, _residuals(rows, (base_s, request_s, token_s), times_s)


def fit_bandwidth(points: Sequence[HandoffPoint], kv_bytes_per_token: int) -> float | None:
    """Returns the bytes per second, from the slope over the length. None: fewer than two lengths, or no slope beyond the noise."""
    if len({point.prompt_tokens for point in points}) < 2 or not kv_bytes_per_token:
        return None
    rows = [(1.0, float(point.prompt_tokens * kv_bytes_per_token)) for point in points]
    _, byte_s = _solve(rows, _means([point.prompt_tokens for point in points], [point.time_s for point in points]))
    return 1 / byte_s if byte_s > 0 else None


def pairs(point: PrefillPoint) -> float:
    """Pairs of a computed token and a token before it, cached ones included."""
    return point.uncached_tokens * (point.prompt_tokens - point.uncached_tokens / 2)


def _means(configurations: Sequence[object], times_s: Sequence[float]) -> Sequence[float]:
    """Replaces each time by the mean of its configuration.

    Errors are relative, so that noise would count more where it makes a time short: with a noise of 30 % the fit would be 15 % too low.
    """
    of: dict[object, list[float]] = {}
    for configuration, time_s in zip(configurations, times_s, strict=True):
        of.setdefault(configuration, []).append(time_s)
    return [sum(of[configuration]) / len(of[configuration]) for configuration in configurations]


def _solve(rows: Rows, times_s: Sequence[float]) -> tuple[float, ...]:
    """Least squares of relative errors without negative coefficients, by leaving out the most negative column until none is."""
    weights = 1 / np.maximum(np.asarray(times_s), 1e-9)
    matrix = np.asarray(rows) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    kept = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while kept:
        solved = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(times_s)), rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved / scale[kept]
            break
        kept.pop(int(solved.argmin()))
    return tuple(float(value) for value in found)


def _residuals(rows: Rows, coefficients: Sequence[float], times_s: Sequence[float]) -> Residuals:
    predicted = np.asarray(rows) @ np.asarray(coefficients)
    errors = predicted / np.maximum(np.asarray(times_s), 1e-9) - 1
    return Residuals(rms=float(np.sqrt((errors**2).mean())), largest=float(np.abs(errors).max()))
