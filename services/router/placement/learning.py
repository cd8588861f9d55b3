"""What reports teach: how long prompts and handoffs took, against what was expected when the request was placed. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvmesh.core.routing import FIRST_TOKEN, PREFILLED, ReportKind
from services.router.placement.links import Distance, Links

if TYPE_CHECKING:
    from services.router.workers.reservations import Reservation

QUEUE_PART_MAX = 0.5
"""A prompt that was expected to wait longer than this part of its own time teaches nothing of its own time."""


class Note(Protocol):
    """What is read of a report."""

    @property
    def kind(self) -> ReportKind:
        """What happened."""
        ...

    @property
    def elapsed_s(self) -> float:
        """Since the placement was received."""
        ...

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found cached; None: not known."""
        ...


@dataclass(slots=True, eq=False)
class Forecast:
    """What was expected of a placed request, and when its prompt was computed."""

    prompt_tokens: int
    queue_s: float
    wait_s: float
    distance: Distance | None
    transfer_bytes: float
    prefilled_after_s: float | None = None


def learn(reservation: "Reservation", note: Note, links: Links) -> None:
    """Corrects the coefficients of who computed the prompt, and of the handoff. Only first news of each is believed."""
    forecast = reservation.forecast
    if forecast is None:
        return
    if note.kind is PREFILLED and forecast.prefilled_after_s is None:
        forecast.prefilled_after_s = note.elapsed_s
        _learn_prefill(reservation, forecast, note)
    elif note.kind is FIRST_TOKEN:
        if reservation.prefill is None:
            _learn_prefill(reservation, forecast, note)
        elif forecast.prefilled_after_s is not None and not forecast.wait_s and forecast.distance is not None:
            decode = reservation.decode
            step_s = decode.coefficients.step_s(decode.requests_active, decode.kv_tokens_active)
            # The handoff is over at the latest one step before the first token; what is left can be nothing but measured.
            observed_s = note.elapsed_s - forecast.prefilled_after_s - step_s
            links.learn(forecast.distance, forecast.transfer_bytes, observed_s)
        reservation.forecast = None


def _learn_prefill(reservation: "Reservation", forecast: Forecast, note: Note) -> None:
    if forecast.queue_s > QUEUE_PART_MAX * reservation.prefill_s:
        return
    uncached = reservation.uncached_tokens
    if note.cached_tokens is not None:
        uncached = max(1, forecast.prompt_tokens - note.cached_tokens)
    computing = reservation.prefill or reservation.decode
    pairs = uncached * (forecast.prompt_tokens - uncached / 2)
    computing.coefficients.prefill.learn(note.elapsed_s - forecast.queue_s, 1, uncached, pairs)
    computing.refresh_prefill()
