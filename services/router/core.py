"""The router's whole state and what happens to it, without I/O: asks, reports, streams that end. Times are arguments."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from kvmesh.core import Ask, Handoff, Placement, ReportKind
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError
from services.router.explain import History, Record, ReportNote
from services.router.feed import KvIndex
from services.router.fleet import Fleet
from services.router.place import Choice, Limits, Placer
from services.router.policies import POLICIES, Weights
from services.router.reservations import Book, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Bounds of the whole router. A reservation ends with its request's time at the latest, or after `reservation_s_max`."""

    reservations_max: int = 65_536
    reservation_s_max: float = 3600.0
    reservation_grace_s: float = 10.0
    history_max: int = 1000


class RouterCore:
    """Places requests and keeps count of them."""

    def __init__(
        self,
        *,
        router_id: str,
        policy: str = "kv",
        weights: Weights | None = None,
        limits: Limits | None = None,
        core_limits: CoreLimits | None = None,
        generator: Random,
    ) -> None:
        self.index = KvIndex()
        self.fleet = Fleet(self.index)
        self.book = Book()
        self._core_limits = core_limits or CoreLimits()
        self._limits = limits or Limits()
        self.history = History(self._core_limits.history_max)
        weighing = POLICIES[policy](weights or Weights(), generator)
        self._placer = Placer(self.fleet, self.index, weighing, self._limits, generator)
        self._router_id = router_id
        self._placed = 0

    @property
    def policy_name(self) -> str:
        """The word by which the policy was found."""
        return self._placer.policy.name

    def ask(self, frontend_id: str, ask_id: int, ask: Ask, *, now: float, wall: float) -> Placement:
        """Places a request and reserves for it, or raises the refusal. Both are remembered for Explain."""
        record = Record(request_id=ask.request_id, ask_id=ask_id, policy=self.policy_name, decided_at_s=wall)
        self.history.add(record)
        try:
            if len(self.book) >= self._core_limits.reservations_max:
                raise self._full()
            self._free_number(frontend_id, ask_id, ask.request_id)
            choice = self._placer.choose(ask)
        except MeshError as error:
            error.request_id = ask.request_id
            record.error = error
            raise
        record.choice = choice
        record.placement = self._reserve(frontend_id, ask_id, ask, choice, now)
        return record.placement

    def report(self, frontend_id: str, ask_id: int, note: ReportNote) -> Reservation | None:
        """Takes news of a placed request. None: nothing is known under that number; it is then ignored."""
        reservation = self.book.get(frontend_id, ask_id)
        if reservation is None:
            return None
        self.history.note(reservation.request_id, note)
        self.book.frontend_spoke(reservation)
        if note.kind.settles:
            self.book.settle(reservation)
        elif note.kind in (ReportKind.PREFILLED, ReportKind.FIRST_TOKEN, ReportKind.PROGRESS):
            self.book.prefilled(reservation)
        return reservation

    def stream_ended(self, frontend_id: str, *, now: float) -> None:
        """A frontend's stream ended; it may come back within the grace."""
        self.book.frontend_left(frontend_id, ends_at=now + self._core_limits.reservation_grace_s)

    def expire(self, *, now: float) -> Iterable[Reservation]:
        """Settles reservations whose end has come."""
        return self.book.expire(now)

    def _full(self) -> OverloadedError:
        message = f"the router holds {len(self.book)} reservations, which is its limit"
        return OverloadedError(message, reason="router_full", retry_after_s=self._limits.retry_after_s)

    def _free_number(self, frontend_id: str, ask_id: int, request_id: str) -> None:
        """A number in use is taken over only from a stream that has ended: a frontend that began anew counts from one."""
        known = self.book.get(frontend_id, ask_id)
        if known is None:
            return
        if not known.is_orphaned and known.request_id != request_id:
            raise InvalidRequestError(f"ask_id {ask_id} is in use on this stream", field="ask_id")
        self.book.settle(known)

    def _reserve(self, frontend_id: str, ask_id: int, ask: Ask, choice: Choice, now: float) -> Placement:
        self._placed += 1
        ends_at = now + min(ask.timeout_s or self._core_limits.reservation_s_max, self._core_limits.reservation_s_max)
        reservation = Reservation(
            reservation_id=f"{self._router_id}-{self._placed}",
            request_id=ask.request_id,
            frontend_id=frontend_id,
            ask_id=ask_id,
            prefill=choice.prefill,
            decode=choice.decode,
            uncached_tokens=choice.uncached_tokens,
            kv_blocks=-(-(ask.prompt_tokens + ask.expected_output_tokens) // choice.decode.worker.block_size_tokens),
            choices=max(1, ask.choices),
            ends_at=ends_at,
            ends_at_latest=ends_at,
        )
        self.book.add(reservation)
        for target in (choice.prefill, choice.decode):
            if target is not None:
                target.placed_last = self._placed
                if target.worker.feed is not None and ask.block_size_tokens == target.worker.block_size_tokens:
                    target.worker.feed.placed(target.rank, ask.block_hashes, now=now)
        return _placement(reservation, choice)


def _placement(reservation: Reservation, choice: Choice) -> Placement:
    prefill, address = choice.prefill, ""
    if prefill is not None and choice.handoff is Handoff.RENDEZVOUS and prefill.worker.description is not None:
        address = prefill.worker.description.rendezvous_address
    return Placement(
        reservation_id=reservation.reservation_id,
        decode=choice.decode.ref,
        prefill=prefill.ref if prefill is not None else None,
        handoff=choice.handoff,
        rendezvous_address=address,
        cached_tokens=choice.cached_tokens,
        reasons=choice.reasons,
    )
