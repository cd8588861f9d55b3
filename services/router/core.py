"""The router's whole state and what happens to it, without I/O: asks, reports, streams that end. Times are arguments."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from random import Random

from kvmesh.core import Ask, Handoff, Placement, Role
from kvmesh.core.routing import PROGRESS, SETTLING
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError, UnavailableError
from services.router.admission import Admission, Answer, Queued
from services.router.choice import Choice
from services.router.cost import CostSettings
from services.router.explain import History, Record, ReportNote
from services.router.feed import KvIndex
from services.router.fleet import Fleet
from services.router.health import HealthEvent, HealthSettings
from services.router.lanes import QueueLimits, Waiting
from services.router.learning import learn
from services.router.place import Limits, Placer
from services.router.policies import Policy, PolicyContext, make_policy
from services.router.reservations import Book, Reservation
from services.router.target import Target, TargetLimits

_RENDEZVOUS, _SEQUENTIAL = Handoff.RENDEZVOUS, Handoff.SEQUENTIAL


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
        run_id: str = "",
        policy: str | type[Policy] = "kv",
        cost: CostSettings | None = None,
        limits: Limits | None = None,
        target_limits: TargetLimits | None = None,
        core_limits: CoreLimits | None = None,
        index: KvIndex | None = None,
        health: HealthSettings | None = None,
        queue_limits: QueueLimits | None = None,
        generator: Random,
    ) -> None:
        self.index = index or KvIndex()
        self._cost = cost or CostSettings()
        self.fleet = Fleet(self.index, self._cost, target_limits, health)
        self.health = self.fleet.health
        self.book = Book()
        self._core_limits = core_limits or CoreLimits()
        self._limits = limits or Limits()
        self.history = History(self._core_limits.history_max)
        weighing = make_policy(policy, PolicyContext(cost=self._cost, generator=generator))
        self._placer = Placer(self.fleet, self.index, weighing, self._limits, generator, self._cost)
        self._admission = Admission(queue_limits or QueueLimits())
        self.queue = self._admission.queue
        self.router_id = router_id
        self.run_id = run_id
        self._id_prefix = f"{router_id}-{run_id}-" if run_id else f"{router_id}-"
        self._placed = 0
        self._now = 0.0
        self.hear_reports: Callable[[], bool] = bool
        """Counts reports that somebody keeps back, before anybody is refused. False: there are none."""

    @property
    def policy_name(self) -> str:
        """The word by which the policy was found."""
        return self._placer.policy.name

    @property
    def is_drain_unfinished(self) -> bool:
        """True when `drain_queue` stopped for the length of its turn while there was room."""
        return self._admission.has_more

    def ask(self, frontend_id: str, ask_id: int, ask: Ask, *, now: float, wall: float) -> Placement | Queued:
        """Places a request and reserves for it, lets it wait, or raises the refusal. Remembered for Explain."""
        record = Record(ask, ask_id, self._placer.policy, wall)
        self.history.add(record)
        self._now = now
        self.health.turn(now)
        try:
            if len(self.book) >= self._core_limits.reservations_max:
                self.hear_reports()
                if len(self.book) >= self._core_limits.reservations_max:
                    raise self._full()
            self._free_number(frontend_id, ask_id, ask.request_id)
            if self.queue.requests:
                self._take_back(frontend_id, ask_id, ask.request_id, now)
                if self.queue.is_behind(ask):
                    return self._wait(frontend_id, ask_id, ask, record, now)
            try:
                choice = self._choose(ask, now)
            except OverloadedError:
                if not self.queue.limits.requests_max:
                    raise
                record.considered = self._placer.considered
                return self._wait(frontend_id, ask_id, ask, record, now)
        except MeshError as problem:
            error = self.health.refusal(problem, ask.model, now)
            error.request_id = ask.request_id
            record.refused(error, self._placer)
            raise error from None
        record.choice, record.considered = choice, self._placer.considered
        record.placement = self._reserve(frontend_id, ask_id, ask, choice, now)
        return record.placement

    def _choose(self, ask: Ask, now: float) -> Choice:
        try:
            return self._placer.choose(ask, now=now)
        except UnavailableError:
            self.hear_reports()
            return self._choose_or_try(ask, now)
        except OverloadedError:
            if not self.hear_reports():
                raise
            return self._choose_or_try(ask, now)

    def _choose_or_try(self, ask: Ask, now: float) -> Choice:
        """Where breakers leave no decode worker, the request is a trial of one of those that are paused."""
        try:
            return self._placer.choose(ask, now=now)
        except UnavailableError:
            if self._placer.considered is not None:
                raise  # There are workers; the request's own pins or exclusions leave none.
            paused = [
                worker
                for worker, _ in self._placer.removed(ask)
                if worker.role is Role.DECODE
                and worker.worker_id not in ask.excluded_worker_ids
                and ask.pinned_decode_worker_id in ("", worker.worker_id)
            ]
            if not self.health.half_open_early(paused, now):
                raise
            return self._placer.choose(ask, now=now)

    def drain_queue(self, *, now: float, wall: float) -> list[Answer]:
        """Offers the room there is to those who wait; gives the answers of all who do not wait any more.

        To be called when room may have appeared, and now and then, since asks that wait expire.
        """

        self.health.turn(now)

        def place(waiting: Waiting) -> tuple[Placement, int]:
            return self._place_waiting(waiting, now, wall)

        if self.queue.requests:
            self._now = now
            self.health.turn(now)
        return self._admission.drain(place, now)

    def take_answers(self) -> list[Answer]:
        """Answers that others got through an ask or a withdrawal; `drain_queue` gives them too."""
        return self._admission.take_answers()

    def withdraw(self, frontend_id: str, ask_id: int, *, now: float, is_answerable: bool = True) -> bool:
        """An ask need not wait any more; False when it does not. Without an answerable frontend there is no answer."""
        waiting = self.queue.get(frontend_id, ask_id)
        if waiting is None:
            return False
        if is_answerable:
            self._admission.withdraw(waiting, now)
        else:
            self._admission.forget(waiting, now)
        return True

    def report(
        self, frontend_id: str, ask_id: int, note: ReportNote, *, now: float | None = None
    ) -> Reservation | None:
        """Takes news of a placed request. None: nothing is known under that number; it is then ignored.

        `now` None: the time of the latest ask.
        """
        reservation = self.book.find(frontend_id, ask_id, note.reservation_id)
        if reservation is None:
            return None
        self.history.note(reservation.request_id, note)
        if reservation.keeper or reservation.is_orphaned:
            self.book.adopt(reservation)
        self._now = self._now if now is None else now
        reservation.due_at = self._now
        if note.is_answered_by_prefill:
            self.health.spared(reservation, self._now)
        else:
            self.health.reported(reservation, note.kind, note.error, note.failed_worker_id, self._now)
        if reservation.forecast is not None and note.elapsed_s > 0 and self._cost.learning:
            learn(reservation, note, self._placer.links)
        if note.kind in SETTLING:
            self.book.settle(reservation)
            self._end_predictions(reservation)
        elif note.kind is not PROGRESS or note.output_tokens:
            self.book.prefilled(reservation, now=_time_of(reservation, note) if now is None else now)
        return reservation

    def stream_ended(self, frontend_id: str, *, now: float) -> None:
        """A frontend's stream ended; it may come back within the grace."""
        self.book.frontend_left(frontend_id, ends_at=now + self._core_limits.reservation_grace_s)

    def told(self, reservation: Reservation, *, now: float) -> None:
        """Counts what a peer placed, and takes from it what affinity and beliefs learn from own placements."""
        self.book.add(reservation)
        if reservation.session_id:
            self._placer.sessions.bind(reservation.session_id, reservation.prefill, reservation.decode, now)
        if reservation.block_hashes:
            self._believe_told(reservation, now)

    def told_settled(self, reservation: Reservation) -> None:
        """A peer says that what it placed is over."""
        self.book.settle(reservation)
        self._end_predictions(reservation)

    @property
    def limits(self) -> CoreLimits:
        """Bounds of the whole router."""
        return self._core_limits

    def expire(self, *, now: float) -> Iterable[Reservation]:
        """Settles reservations whose end has come."""
        return self.book.expire(now)

    def check_health(self, *, now: float) -> list[HealthEvent]:
        """Lets breakers turn and looks for wedged workers; gives what happened to workers since the last call."""
        self.health.check(self.book, now)
        events = list(self.health.events)
        self.health.events.clear()
        return events

    def _full(self) -> OverloadedError:
        message = f"the router holds {len(self.book)} reservations, which is its limit"
        return OverloadedError(message, reason="router_full", retry_after_s=self._limits.retry_after_s)

    def _free_number(self, frontend_id: str, ask_id: int, request_id: str) -> None:
        """A number in use is taken over only from a stream that has ended: a frontend that began anew counts from one.

        What a peer placed for the same ask is over: the frontend gave that router up.
        """
        told = self.book.told(frontend_id, ask_id)
        if told is not None and told.request_id == request_id:
            self.book.adopt(told)
            self.book.settle(told)
        known = self.book.get(frontend_id, ask_id)
        if known is not None and self.hear_reports():
            known = self.book.get(frontend_id, ask_id)
        if known is None:
            return
        if not known.is_orphaned and known.request_id != request_id:
            raise InvalidRequestError(f"ask_id {ask_id} is in use on this stream", field="ask_id")
        self.book.settle(known)

    def _take_back(self, frontend_id: str, ask_id: int, request_id: str, now: float) -> None:
        """The same ask again, on a new stream, takes the place of the one that waits."""
        waiting = self.queue.get(frontend_id, ask_id)
        if waiting is None:
            return
        if waiting.ask.request_id != request_id:
            raise InvalidRequestError(f"ask_id {ask_id} is in use on this stream", field="ask_id")
        self._admission.forget(waiting, now)

    def _wait(self, frontend_id: str, ask_id: int, ask: Ask, record: Record, now: float) -> Queued:
        waiting = Waiting(
            frontend_id=frontend_id,
            ask_id=ask_id,
            ask=ask,
            record=record,
            arrived_s=now,
            tokens=self._uncached_tokens(ask),
        )
        return self._admission.wait(waiting, now)

    def _uncached_tokens(self, ask: Ask) -> int:
        """Prompt tokens that no worker holds, as far as the index knows; at least 1."""
        depth = max((match.depth for match in self.index.device.match(ask.block_hashes)), default=0)
        return max(1, ask.prompt_tokens - depth * ask.block_size_tokens)

    def _place_waiting(self, waiting: Waiting, now: float, wall: float) -> tuple[Placement, int]:
        """Everything is looked up anew: while it waited, blocks came and went."""
        if len(self.book) >= self._core_limits.reservations_max:
            raise self._full()
        ask, record, waited_s = waiting.ask, waiting.record, now - waiting.arrived_s
        if ask.timeout_s is not None:
            ask = replace(ask, timeout_s=ask.timeout_s - waited_s)
        try:
            choice = self._choose_or_try(ask, now)
        except UnavailableError as problem:
            record.refused(problem, self._placer)
            raise self.health.refusal(problem, ask.model, now) from None
        record.considered = self._placer.considered
        placement = self._reserve(waiting.frontend_id, waiting.ask_id, ask, choice, now)
        record.choice, record.placement = choice, replace(placement, queued_s=waited_s)
        record.decided_at_s = wall
        self.history.add(record)
        return record.placement, max(1, choice.uncached_tokens)

    def _reserve(self, frontend_id: str, ask_id: int, ask: Ask, choice: Choice, now: float) -> Placement:
        self._placed = number = self._placed + 1
        longest_s, timeout_s = self._core_limits.reservation_s_max, ask.timeout_s
        ends_at = now + (longest_s if timeout_s is None or timeout_s > longest_s else timeout_s)
        prefill, decode, block_hashes = choice.prefill, choice.decode, ask.block_hashes
        spares_decode = _spares_decode(ask, choice)
        reservation = Reservation(
            f"{self._id_prefix}{number}",
            ask.request_id,
            frontend_id,
            ask_id,
            prefill,
            decode,
            choice.uncached_tokens,
            0 if spares_decode else -(-(ask.prompt_tokens + ask.expected_output_tokens) // decode.block_size_tokens),
            0 if spares_decode else ask.choices or 1,
            ends_at,
            ends_at,
            now,
            now,
            choice.prefill_s,
            choice.forecast,
            choice.expected_ttft_s,
            block_hashes[-1] if block_hashes else None,
            ask.session_id,
            block_hashes if _tells_nothing(decode, ask) or _tells_nothing(prefill, ask) else (),
            block_hashes if ask.block_size_tokens == (prefill or decode).block_size_tokens else (),
        )
        self.book.add(reservation)
        self.health.placed(reservation, ask, now, self._holders_of)
        if prefill is not None:
            self._placed_on(prefill, ask, number, now, is_computing=True)
        self._placed_on(decode, ask, number, now, is_computing=prefill is None)
        if ask.session_id:
            self._placer.sessions.bind(ask.session_id, prefill, decode, now)
        return _placement(reservation, choice)

    def _placed_on(self, target: Target, ask: Ask, number: int, now: float, *, is_computing: bool) -> None:
        target.placed_last = number
        if ask.adapter:
            target.ran(ask.adapter)
        feed = target.worker.feed
        if feed is None or ask.block_size_tokens != target.block_size_tokens:
            return
        if is_computing or not feed.tells_events:
            feed.placed(target.rank, ask.block_hashes, now=now, is_computing=is_computing)

    def _believe_told(self, reservation: Reservation, now: float) -> None:
        computing = None if reservation.is_prefilled else reservation.computing
        is_silent = False
        # As with an ask of one's own: what is known of a prompt is at hand, and what workers tell next goes on from it.
        self.index.device.prefixes(reservation.block_hashes)
        for target in (reservation.prefill, reservation.decode):
            if target is not None and (feed := target.worker.feed) is not None:
                is_computing = target is computing
                feed.placed(target.rank, reservation.block_hashes, now=now, is_computing=is_computing)
                is_silent = is_silent or not feed.tells_events
        if not is_silent:
            reservation.block_hashes = ()

    def _end_predictions(self, reservation: Reservation) -> None:
        last = reservation.last_block_hash
        if last is None:
            return
        computing = reservation.prefill or reservation.decode  # Of the other nothing was predicted.
        if (feed := computing.worker.feed) is not None:
            feed.settled(computing.rank, last)

    def _holders_of(self, block_hash: int) -> int:
        """Who told of the block, in whatever tier; a bit means the same holder in all of them. Predictions do not count."""
        found = [match.holders for index in self.index.tiers.values() for match in index.match((block_hash,))]
        return reduce(or_, found, 0)


def _spares_decode(ask: Ask, choice: Choice) -> bool:
    """Whether the prefill worker gives the answer itself. One that does not leaves a leg of one step that nobody counts."""
    return ask.expected_output_tokens == 1 and choice.prefill is not None and choice.handoff is _SEQUENTIAL


def _time_of(reservation: Reservation, note: ReportNote) -> float | None:
    """When it happened by this router's clock, as the frontend measured it from the placement on."""
    return None if reservation.placed_at is None else reservation.placed_at + note.elapsed_s


def _tells_nothing(target: Target | None, ask: Ask) -> bool:
    """Whether peers cannot hear from the worker itself that it holds the prompt from now on."""
    if target is None or (feed := target.worker.feed) is None:
        return False
    return not feed.tells_events and target.block_size_tokens == ask.block_size_tokens


def _placement(reservation: Reservation, choice: Choice) -> Placement:
    prefill, address = choice.prefill, ""
    if prefill is not None and choice.handoff is _RENDEZVOUS and prefill.worker.description is not None:
        address = prefill.worker.description.rendezvous_address
    return Placement(
        reservation_id=reservation.reservation_id,
        decode=choice.decode.ref,
        prefill=prefill.ref if prefill is not None else None,
        handoff=choice.handoff,
        rendezvous_address=address,
        cached_tokens=choice.cached_tokens,
        expected_ttft_s=choice.expected_ttft_s,
        reasons=choice.reasons,
        decode_cached_tokens=choice.decode_cached_tokens,
    )
