"""Work promised to workers and not yet known to be done. Pure; times are arguments.

Invariants:
1. A target's three in-flight sums are those of the reservations on it; none goes below zero.
2. A reservation counts on its prefill worker until `prefilled`, on its decode worker until it is settled.
3. Every reservation ends: by a report, `grace_s` after its frontend's stream, or at its own end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from services.router.learning import Forecast
from services.router.target import Target


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """One placed request."""

    reservation_id: str
    request_id: str
    frontend_id: str
    ask_id: int
    prefill: Target | None
    decode: Target
    uncached_tokens: int
    kv_blocks: int
    choices: int
    ends_at: float
    ends_at_latest: float
    is_orphaned: bool = False
    is_prefilled: bool = False
    due_at: float = inf
    """Since when the worker that computes now has had it to do. Infinite: nobody here knows, a peer placed it."""
    expected_ttft_s: float | None = None
    """What the policy expected, from the placement on. None: it does not estimate it, or a peer placed it."""
    placed_at: float | None = None
    """By this router's clock. None: not known, a peer placed it."""
    prefill_s: float = 0.0
    """Expected time to compute its prompt; 0: as the worker's coefficients say."""
    forecast: Forecast | None = None
    """What reports are compared with. None: nothing, a peer placed it."""
    last_block_hash: int | None = None
    """Names the prompt in the index of predictions. None: it has no full block, or a peer placed it."""

    @property
    def expected_prefill_s(self) -> float | None:
        """Until the prompt is computed, the queue before it included. None: as for `expected_ttft_s`."""
        if self.expected_ttft_s is None or self.forecast is None:
            return None
        return self.forecast.queue_s + self.prefill_s

    @property
    def computing(self) -> Target:
        """Whose turn it is."""
        return self.decode if self.prefill is None or self.is_prefilled else self.prefill


class Book:
    """All reservations."""

    def __init__(self) -> None:
        self._by_frontend: dict[str, dict[int, Reservation]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Reservation]:
        return (reservation for of_frontend in self._by_frontend.values() for reservation in of_frontend.values())

    def get(self, frontend_id: str, ask_id: int) -> Reservation | None:
        """The reservation made for an ask."""
        return self._by_frontend.get(frontend_id, {}).get(ask_id)

    def add(self, reservation: Reservation) -> None:
        """Counts it on its workers. The frontend's number must be free."""
        self._by_frontend.setdefault(reservation.frontend_id, {})[reservation.ask_id] = reservation
        self._count += 1
        prefill, decode = reservation.prefill, reservation.decode
        decode.requests_in_flight += reservation.choices
        decode.kv_blocks_in_flight += reservation.kv_blocks
        if not reservation.is_prefilled:
            computing = prefill or decode
            if not reservation.prefill_s:
                tokens = reservation.uncached_tokens
                reservation.prefill_s = computing.coefficients.prefill_s(tokens, tokens)
            computing.promise(reservation.uncached_tokens, reservation.prefill_s, reservation.placed_at)
            if prefill is not None:
                prefill.requests_in_flight += 1
        decode.refresh_batch()

    def prefilled(self, reservation: Reservation, *, now: float | None = None) -> None:
        """Its prompt is computed, at `now` when that is known. Idempotent."""
        if reservation.is_prefilled:
            return
        reservation.is_prefilled = True
        computing = reservation.prefill or reservation.decode
        computing.computed(reservation.uncached_tokens, reservation.prefill_s, now)
        if reservation.prefill is not None:
            reservation.prefill.requests_in_flight -= 1

    def settle(self, reservation: Reservation) -> None:
        """It is over."""
        self.prefilled(reservation)
        reservation.decode.requests_in_flight -= reservation.choices
        reservation.decode.kv_blocks_in_flight -= reservation.kv_blocks
        reservation.decode.refresh_batch()
        of_frontend = self._by_frontend[reservation.frontend_id]
        del of_frontend[reservation.ask_id]
        self._count -= 1
        if not of_frontend:
            del self._by_frontend[reservation.frontend_id]

    def frontend_left(self, frontend_id: str, *, ends_at: float) -> None:
        """Its stream ended: what it placed ends at `ends_at` unless it comes back and reports."""
        for reservation in self._by_frontend.get(frontend_id, {}).values():
            reservation.ends_at = min(reservation.ends_at, ends_at)
            reservation.is_orphaned = True

    def frontend_spoke(self, reservation: Reservation) -> None:
        """Its frontend is there (again): only its own end counts."""
        reservation.ends_at = reservation.ends_at_latest
        reservation.is_orphaned = False

    def expire(self, now: float) -> Iterable[Reservation]:
        """Settles and gives those whose end has come."""
        over = [r for of_frontend in self._by_frontend.values() for r in of_frontend.values() if r.ends_at <= now]
        for reservation in over:
            self.settle(reservation)
        return over
