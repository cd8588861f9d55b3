"""Learns coefficients from reports: how long prompts and handoffs took, compared with the forecast of the placement. Pure."""

from kvmesh.core import Report
from kvmesh.core.routing import FINISHED, FIRST_TOKEN, PREFILLED
from services.router.workers.handoff_times import HandoffEstimator
from services.router.workers.reservations import PlacementForecast, Reservation
from services.router.workers.slow_pairs import SlowPairs

QUEUE_FRACTION_MAX = 0.5
"""Prompts with a longer expected queue, as a fraction of their own time, are not learned from."""
HANDOFFS_MIN = 20
"""Number of handoffs at a distance before a pair can count as slow. Until then the expected time is a guess."""


def learn(
    reservation: Reservation, report: Report, handoffs: HandoffEstimator, *, slow_pairs: SlowPairs, now: float
) -> None:
    """Corrects the coefficients of the target that computed the prompt, and of the handoff. Only the first report of a kind counts.

    A handoff counts when its request is finished, unless the decode worker computed the prompt again.
    """
    forecast = reservation.forecast
    if forecast is None:
        return
    if report.kind is PREFILLED and forecast.prefilled_after_s is None:
        forecast.prefilled_after_s = report.elapsed_s
        _learn_prefill(reservation, forecast, report)
    elif report.kind is FIRST_TOKEN:
        if reservation.prefill is None:
            _learn_prefill(reservation, forecast, report)
            reservation.forecast = None
        # Without a wait for a slot, which would count as a part of the handoff.
        elif forecast.handoff_s is None and forecast.prefilled_after_s is not None and not forecast.wait_s:
            decode = reservation.decode
            step_s = decode.coefficients.step_s(decode.requests_active, kv_tokens=decode.kv_tokens_active)
            # The handoff ends one step before the first token at the latest.
            forecast.handoff_s = report.elapsed_s - forecast.prefilled_after_s - step_s
    elif report.kind is FINISHED:
        if not (report.was_recomputed or report.is_answered_by_prefill):
            _learn_handoff(reservation, forecast, handoffs, slow_pairs=slow_pairs, now=now)
        reservation.forecast = None


def _learn_handoff(
    reservation: Reservation,
    forecast: PlacementForecast,
    handoffs: HandoffEstimator,
    *,
    slow_pairs: SlowPairs,
    now: float,
) -> None:
    prefill, distance, observed_s = reservation.prefill, forecast.distance, forecast.handoff_s
    if prefill is None or distance is None or observed_s is None:
        return
    if handoffs.observations(distance) >= HANDOFFS_MIN:
        expected_s = handoffs.times[distance].seconds_of(forecast.transfer_bytes)
        ids = prefill.worker.worker_id, reservation.decode.worker.worker_id
        slow_pairs.learn(*ids, expected_s=expected_s, observed_s=observed_s, now=now)
    handoffs.learn(distance, transfer_bytes=forecast.transfer_bytes, observed_s=observed_s)


def _learn_prefill(reservation: Reservation, forecast: PlacementForecast, report: Report) -> None:
    if forecast.queue_s > QUEUE_FRACTION_MAX * reservation.prefill_s:
        return
    uncached = reservation.uncached_tokens
    if report.cached_tokens is not None:
        uncached = max(1, forecast.prompt_tokens - report.cached_tokens)
    computing = reservation.computing_prompt
    token_pairs = uncached * (forecast.prompt_tokens - uncached / 2)
    computing.coefficients.prefill.learn(report.elapsed_s - forecast.queue_s, 1, uncached, token_pairs)
    computing.write_prefill_coefficients()
