"""Work promised to workers and not yet known to be done. Pure; times are arguments.

Invariants:
1. A target's three in-flight sums are those of the reservations on it; none goes below zero.
2. A reservation counts on its prefill worker until `prefilled`, on its decode worker until it is settled.
3. Every reservation ends: by a report, `grace_s` after its frontend's stream, or at its own end.
4. What peers made counts like what this router made. A frontend's number leads to the own one first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from services.router.placement.learning import Forecast
from services.router.workers.target import Target


@dataclass(slots=True, eq=False)
class Reservation:
    """One placed request. To give so many values by name takes twice as long as by position."""

    reservation_id: str
    request_id: str
    frontend_id: str
    ask_id: int
    prefill: Target | None
    decode: Target
    uncached_tokens: int
    kv_blocks: int
    """On the decode worker."""
    choices: int
    """There too; both are 0 where the prefill worker gives the answer itself."""
    ends_at: float
    ends_at_latest: float
    due_at: float = inf
    """Since when the worker that computes now has had it to do. Infinite: nobody here knows, a peer placed it."""
    placed_at: float | None = None
    """By this router's clock; of a peer's, when it was heard of. None: not known."""
    prefill_s: float = 0.0
    """Expected time to compute its prompt; 0: as the worker's coefficients say."""
    forecast: Forecast | None = None
    """What reports are compared with. None: nothing, a peer placed it."""
    expected_ttft_s: float | None = None
    """What the policy expected, from the placement on. None: it does not estimate it, or a peer placed it."""
    last_block_hash: int | None = None
    """Names the prompt in the index of predictions. None: it has no full block, or a peer placed it and did not tell its blocks."""
    session_id: str = ""
    block_hashes: Sequence[int] = ()
    """What its workers are believed to hold after it; only where they do not tell it themselves."""
    predicted_hashes: Sequence[int] = ()
    """What peers hear of from the worker itself once the prompt is computed, and not before. Then it is forgotten."""
    is_orphaned: bool = False
    is_prefilled: bool = False
    is_told: bool = False
    """A peer made it."""
    keeper: str = ""
    """The peer that its frontend speaks to, and that sees to its end. Empty: this router."""
    is_known_from_here: bool = False
    """Peers may believe that this router is its keeper, and have to hear from it of the end."""

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


class Journal(Protocol):
    """Who wants to know of changes."""

    def added(self, reservation: Reservation) -> None:
        """A reservation made here."""
        ...

    def adopted(self, reservation: Reservation) -> None:
        """Its frontend reports of it here from now on."""
        ...

    def prefilled(self, reservation: Reservation) -> None:
        """Its prompt is computed."""
        ...

    def settled(self, reservation: Reservation) -> None:
        """It is over."""
        ...


class Book:
    """All reservations."""

    def __init__(self) -> None:
        self._own: dict[str, dict[int, Reservation]] = {}
        self._told: dict[str, dict[int, Reservation]] = {}
        self._by_id: dict[str, Reservation] = {}
        self.journal: Journal | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_id.values())

    def get(self, frontend_id: str, ask_id: int) -> Reservation | None:
        """The reservation that this router made for an ask."""
        numbers = self._own.get(frontend_id)
        return None if numbers is None else numbers.get(ask_id)

    def of_id(self, reservation_id: str) -> Reservation | None:
        """The reservation of that id, whoever made it."""
        return self._by_id.get(reservation_id)

    def find(self, frontend_id: str, ask_id: int, reservation_id: str = "") -> Reservation | None:
        """What a frontend reports of: by id where it names one, else its number; own ones first."""
        if reservation_id:
            known = self._by_id.get(reservation_id)
            return known if known is not None and known.frontend_id == frontend_id else None
        return self.get(frontend_id, ask_id) or self.told(frontend_id, ask_id)

    def told(self, frontend_id: str, ask_id: int) -> Reservation | None:
        """The reservation that a peer made for an ask."""
        numbers = self._told.get(frontend_id)
        return None if numbers is None else numbers.get(ask_id)

    def add(self, reservation: Reservation) -> None:
        """Counts it on its workers. Its id, and of an own one the frontend's number, must be free."""
        self._by_id[reservation.reservation_id] = reservation
        own_or_told, frontend_id = self._numbers(reservation), reservation.frontend_id
        numbers = own_or_told.get(frontend_id)
        if numbers is None:
            numbers = own_or_told[frontend_id] = {}
        numbers[reservation.ask_id] = reservation
        prefill, decode = reservation.prefill, reservation.decode
        decode.requests_in_flight += reservation.choices
        decode.kv_blocks_in_flight += reservation.kv_blocks
        if not reservation.is_prefilled:
            computing, tokens = prefill or decode, reservation.uncached_tokens
            if not reservation.prefill_s:
                reservation.prefill_s = computing.coefficients.prefill_s(tokens, tokens)
            computing.promise(tokens, reservation.prefill_s, reservation.placed_at)
            if prefill is not None:
                prefill.requests_in_flight += 1
        decode.refresh_batch()
        if not reservation.is_told:
            reservation.is_known_from_here = True
            if self.journal is not None:
                self.journal.added(reservation)

    def adopt(self, reservation: Reservation) -> None:
        """Its frontend reports of it here. Peers hear so when they may believe something else."""
        is_news = bool(reservation.keeper) or reservation.is_orphaned
        reservation.keeper = ""
        self.frontend_spoke(reservation)
        if is_news and self.journal is not None:
            reservation.is_known_from_here = True
            self.journal.adopted(reservation)

    def prefilled(self, reservation: Reservation, *, now: float | None = None) -> None:
        """Its prompt is computed, at `now` when that is known. Idempotent."""
        if reservation.is_prefilled:
            return
        self._computed(reservation, now)
        if self.journal is not None:
            self.journal.prefilled(reservation)

    def settle(self, reservation: Reservation) -> None:
        """It is over."""
        if not reservation.is_prefilled:
            self._computed(reservation, None)
        reservation.decode.requests_in_flight -= reservation.choices
        reservation.decode.kv_blocks_in_flight -= reservation.kv_blocks
        reservation.decode.refresh_batch()
        del self._by_id[reservation.reservation_id]
        numbers = self._numbers(reservation)
        of_frontend = numbers.get(reservation.frontend_id, {})
        if of_frontend.get(reservation.ask_id) is reservation:
            del of_frontend[reservation.ask_id]
            if not of_frontend:
                del numbers[reservation.frontend_id]
        if self.journal is not None:
            self.journal.settled(reservation)

    def frontend_left(self, frontend_id: str, *, ends_at: float) -> None:
        """Its stream ended: what it placed, or what this router adopted, ends at `ends_at` unless it comes back and reports."""
        for numbers in (self._own, self._told):
            for reservation in numbers.get(frontend_id, {}).values():
                if not reservation.keeper:
                    self.orphan(reservation, ends_at=ends_at)

    def orphan(self, reservation: Reservation, *, ends_at: float) -> None:
        """Nobody speaks of it: it ends at `ends_at` unless somebody does."""
        reservation.ends_at = min(reservation.ends_at, ends_at)
        reservation.is_orphaned = True

    def frontend_spoke(self, reservation: Reservation) -> None:
        """Its frontend is there (again): only its own end counts."""
        reservation.ends_at = reservation.ends_at_latest
        reservation.is_orphaned = False

    def expire(self, now: float) -> Iterable[Reservation]:
        """Settles and gives those whose end has come."""
        over = [reservation for reservation in self._by_id.values() if reservation.ends_at <= now]
        for reservation in over:
            self.settle(reservation)
        return over

    def _computed(self, reservation: Reservation, now: float | None) -> None:
        reservation.is_prefilled = True
        reservation.predicted_hashes = ()
        computing = reservation.prefill or reservation.decode
        computing.computed(reservation.uncached_tokens, reservation.prefill_s, now)
        if reservation.prefill is not None:
            reservation.prefill.requests_in_flight -= 1

    def _numbers(self, reservation: Reservation) -> dict[str, dict[int, Reservation]]:
        return self._told if reservation.is_told else self._own
