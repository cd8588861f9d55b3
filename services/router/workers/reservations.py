"""Reservations: placed requests that are not known to be finished. Pure; times are arguments.

Invariants:
1. A target's in-flight sums equal the sums over its reservations; none is negative.
2. A reservation counts on its prefill worker until `prefilled`, and on its decode worker until it is settled.
3. Every reservation ends: by a report, `reservation_grace_s` after the stream of its frontend, or at its own end.
4. A peer's reservation counts like one of this router. If both used the same ask number, the number names this router's reservation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from services.router.queue.charges import OutputCharge
from services.router.workers.handoff_times import Distance
from services.router.workers.worker import Target

RESERVATIONS_MAX = 65_536
"""Of all workers: bounds the memory, far above what the workers of one mesh run at a time."""
RESERVATION_S_MAX = 3600.0
"""Longest life of a reservation whose request states no shorter time. Only a bound: its frontend's stream ends it long before."""


@dataclass(slots=True, eq=False, kw_only=True)
class PlacementForecast:
    """What was expected of a placed request. Reports are compared with it."""

    prompt_tokens: int
    queue_s: float
    wait_s: float
    distance: Distance | None
    transfer_bytes: float
    prefilled_after_s: float | None = None
    """When the prompt was reported as computed, from the placement on."""
    handoff_s: float | None = None
    """Observed time of the handoff. Whether it counts is known at the end of the request: the prompt may have been computed again."""


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
    """KV blocks on the decode worker."""
    choices: int
    """Sequences on the decode worker. This and `kv_blocks` are 0 if the prefill worker answers alone."""
    ends_at: float
    ends_at_latest: float
    due_at: float = inf
    """When the worker that computes it now was given the work. Infinite: not known, a peer placed it."""
    placed_at: float | None = None
    """Time of the placement. For a peer's reservation: the time at which this router received it. None: not known."""
    prefill_s: float = 0.0
    """Expected time to compute the prompt. 0: to be estimated from the worker's coefficients."""
    forecast: PlacementForecast | None = None
    """None: reports are compared with nothing, for example because a peer placed it."""
    expected_ttft_s: float | None = None
    """From the placement on. None: the policy does not estimate it, or a peer placed it."""
    last_block_hash: int | None = None
    """Identifies the prompt in the predicted index. None: no full block, or a peer did not send its blocks."""
    session_id: str = ""
    block_hashes: Sequence[int] = ()
    """Blocks that its workers are assumed to hold from now on; only of workers without cache events."""
    predicted_hashes: Sequence[int] = ()
    """Blocks that peers learn from the worker's events once the prompt is computed. Then this is emptied."""
    tenant: str = ""
    model: str = ""
    priority: int = 0
    charged_tokens: float = 0.0
    """What the tenant is charged where others wait: here, or at peers."""
    charge: OutputCharge | None = None
    """The part for output, which reports correct. None: no request waited when it was placed, or a peer placed it."""
    is_orphaned: bool = False
    is_prefilled: bool = False
    is_from_peer: bool = False
    keeper: str = ""
    """The peer that the frontend reports to and that announces the end. Empty: this router."""
    is_announced: bool = False
    """Peers may take this router for the keeper, so it has to announce the end."""

    @property
    def expected_prefill_s(self) -> float | None:
        """Time from the placement until the prompt is computed, with the queue before it. None as for `expected_ttft_s`."""
        if self.expected_ttft_s is None or self.forecast is None:
            return None
        return self.forecast.queue_s + self.prefill_s

    @property
    def computing_prompt(self) -> Target:
        return self.prefill or self.decode

    @property
    def working(self) -> Target:
        return self.decode if self.is_prefilled else self.computing_prompt


class ReservationListener(Protocol):
    """Called on changes of reservations."""

    def on_added(self, reservation: Reservation) -> None:
        """Called for reservations of this router only."""
        ...

    def on_adopted(self, reservation: Reservation) -> None:
        """Called when the frontend starts to report to this router."""
        ...

    def on_prefilled(self, reservation: Reservation) -> None: ...

    def on_settled(self, reservation: Reservation) -> None: ...


class ReservationBook:
    """All reservations, by id and by the frontend's ask number."""

    def __init__(self, on_ended: Callable[[Reservation], None]) -> None:
        """`on_ended` is called for each reservation that ends, in whatever way."""
        self._on_ended = on_ended
        self._own: dict[str, dict[int, Reservation]] = {}
        self._of_peers: dict[str, dict[int, Reservation]] = {}
        self._by_id: dict[str, Reservation] = {}
        self.listener: ReservationListener | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_id.values())

    @property
    def is_full(self) -> bool:
        return len(self._by_id) >= RESERVATIONS_MAX

    def get_own(self, frontend_id: str, ask_id: int) -> Reservation | None:
        return self._own.get(frontend_id, {}).get(ask_id)

    def get_of_peer(self, frontend_id: str, ask_id: int) -> Reservation | None:
        return self._of_peers.get(frontend_id, {}).get(ask_id)

    def get(self, reservation_id: str) -> Reservation | None:
        return self._by_id.get(reservation_id)

    def find(self, frontend_id: str, ask_id: int, reservation_id: str = "") -> Reservation | None:
        """Returns the reservation that a frontend's report is about: by id when the report has one, else by ask number."""
        if reservation_id:
            known = self._by_id.get(reservation_id)
            return known if known is not None and known.frontend_id == frontend_id else None
        return self.get_own(frontend_id, ask_id) or self.get_of_peer(frontend_id, ask_id)

    def add(self, reservation: Reservation) -> None:
        """Counts it on its workers. Its id must be new; so must the ask number of a reservation of this router."""
        self._by_id[reservation.reservation_id] = reservation
        self._numbers(reservation).setdefault(reservation.frontend_id, {})[reservation.ask_id] = reservation
        decode = reservation.decode
        decode.requests_in_flight += reservation.choices
        decode.kv_blocks_in_flight += reservation.kv_blocks
        if not reservation.is_prefilled:
            computing, tokens = reservation.computing_prompt, reservation.uncached_tokens
            if not reservation.prefill_s:
                # A peer does not send the length of the prompt, so the uncached part is taken for all of it.
                reservation.prefill_s = computing.coefficients.prefill_s(tokens, tokens)
            computing.add_prompt(tokens, prefill_s=reservation.prefill_s, now=reservation.placed_at)
            if reservation.prefill is not None:
                reservation.prefill.requests_in_flight += 1
        decode.write_batch()
        if not reservation.is_from_peer:
            reservation.is_announced = True
            if self.listener is not None:
                self.listener.on_added(reservation)

    def adopt(self, reservation: Reservation) -> None:
        """The frontend reports to this router. Tells peers that may assume another keeper."""
        is_news = bool(reservation.keeper) or reservation.is_orphaned
        reservation.keeper = ""
        reservation.ends_at = reservation.ends_at_latest
        reservation.is_orphaned = False
        if is_news and self.listener is not None:
            reservation.is_announced = True
            self.listener.on_adopted(reservation)

    def mark_prefilled(self, reservation: Reservation, *, now: float | None = None) -> None:
        """The prompt is computed, at `now` when that is known. Idempotent."""
        if reservation.is_prefilled:
            return
        self._remove_prompt(reservation, now)
        if self.listener is not None:
            self.listener.on_prefilled(reservation)

    def settle(self, reservation: Reservation) -> None:
        """Ends a reservation and takes it off its workers."""
        if not reservation.is_prefilled:
            self._remove_prompt(reservation, None)
        reservation.decode.requests_in_flight -= reservation.choices
        reservation.decode.kv_blocks_in_flight -= reservation.kv_blocks
        reservation.decode.write_batch()
        del self._by_id[reservation.reservation_id]
        numbers = self._numbers(reservation)
        of_frontend = numbers.get(reservation.frontend_id, {})
        # A newer reservation may have the number already: frontends count from one again after a restart.
        if of_frontend.get(reservation.ask_id) is reservation:
            del of_frontend[reservation.ask_id]
            if not of_frontend:
                del numbers[reservation.frontend_id]
        self._on_ended(reservation)
        if self.listener is not None:
            self.listener.on_settled(reservation)

    def orphan_frontend(self, frontend_id: str, *, ends_at: float) -> None:
        """The frontend's stream ended: what it reported to this router ends at `ends_at` unless it reports again."""
        for numbers in (self._own, self._of_peers):
            for reservation in numbers.get(frontend_id, {}).values():
                if not reservation.keeper:
                    self.orphan(reservation, ends_at=ends_at)

    def orphan(self, reservation: Reservation, *, ends_at: float) -> None:
        """No frontend reports on it: it ends at `ends_at` unless one does."""
        reservation.ends_at = min(reservation.ends_at, ends_at)
        reservation.is_orphaned = True

    def expire(self, now: float) -> Iterable[Reservation]:
        """Settles and returns the reservations whose end has come."""
        expired = [reservation for reservation in self._by_id.values() if reservation.ends_at <= now]
        for reservation in expired:
            self.settle(reservation)
        return expired

    def _remove_prompt(self, reservation: Reservation, now: float | None) -> None:
        reservation.is_prefilled = True
        reservation.predicted_hashes = ()
        computing, tokens = reservation.computing_prompt, reservation.uncached_tokens
        computing.remove_prompt(tokens, prefill_s=reservation.prefill_s, now=now)
        if reservation.prefill is not None:
            reservation.prefill.requests_in_flight -= 1

    def _numbers(self, reservation: Reservation) -> dict[str, dict[int, Reservation]]:
        return self._of_peers if reservation.is_from_peer else self._own
