"""Learns coefficients from reports: how long prompts and handoffs took, compared with the forecast of the placement. Pure."""

from kvmesh.core import Report
from kvmesh.core.routing import FIRST_TOKEN, PREFILLED
from services.router.workers.handoff_times import HandoffEstimator
from services.router.workers.reservations import Forecast, Reservation

QUEUE_FRACTION_MAX = 0.5
"""Prompts with a longer expected queue, as a fraction of their own time, are not learned from."""


def learn(reservation: Reservation, report: Report, handoffs: HandoffEstimator) -> None:
    """Corrects the coefficients of the target that computed the prompt, and of the handoff. Only the first report of a kind counts."""
    forecast = reservation.forecast
    if forecast is None:
        return
    if report.kind is PREFILLED and forecast.prefilled_after_s is None:
        forecast.prefilled_after_s = report.elapsed_s
        _learn_prefill(reservation, forecast, report)
    elif report.kind is FIRST_TOKEN:
        if reservation.prefill is None:
            _learn_prefill(reservation, forecast, report)
        elif forecast.prefilled_after_s is not None and not forecast.wait_s and forecast.distance is not None:
            decode = reservation.decode
            step_s = decode.coefficients.step_s(decode.requests_active, decode.kv_tokens_active)
            # The handoff ends one step before the first token at the latest.
            observed_s = report.elapsed_s - forecast.prefilled_after_s - step_s
            handoffs.learn(forecast.distance, transfer_bytes=forecast.transfer_bytes, observed_s=observed_s)
        reservation.forecast = None


def _learn_prefill(reservation: Reservation, forecast: Forecast, report: Report) -> None:
    if forecast.queue_s > QUEUE_FRACTION_MAX * reservation.prefill_s:
        return
    uncached = reservation.uncached_tokens
    if report.cached_tokens is not None:
        uncached = max(1, forecast.prompt_tokens - report.cached_tokens)
    computing = reservation.computing_prompt
    token_pairs = uncached * (forecast.prompt_tokens - uncached / 2)
    computing.coefficients.prefill.learn(report.elapsed_s - forecast.queue_s, 1, uncached, token_pairs)
    computing.write_prefill_coefficients()
