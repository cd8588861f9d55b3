"""The router's state and what happens to it: asks, reports, streams that end. Pure; times are arguments."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import or_
from random import Random

from kvmesh.core import Ask, Handoff, Placement, Report, Role
from kvmesh.core.routing import FINISHED, PROGRESS, SETTLING
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError, UnavailableError
from services.router.core_settings import RETRY_AFTER_S, CoreSettings
from services.router.explain import DecisionHistory, DecisionRecord
from services.router.health.monitor import HealthEvent
from services.router.index.kv_index import KvIndex
from services.router.placement.decision import PlacementDecision
from services.router.placement.placer import NO_PREFILL_WORKER, NO_WORKERS, Placer
from services.router.placement.policies import Policy, PolicyContext, make_policy
from services.router.queue.accounts import Account
from services.router.queue.admission import Admission, Queued, QueueOutcome
from services.router.queue.charges import Charges
from services.router.queue.lateness import LATE, is_late, may_go
from services.router.queue.subqueues import QueuedAsk
from services.router.workers.fleet import Fleet
from services.router.workers.learning import learn
from services.router.workers.reservations import RESERVATION_S_MAX, Reservation, ReservationBook
from services.router.workers.worker import Target


class RouterCore:
    """Places requests and keeps track of them."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        router_id: str,
        run_id: str = "",
        policy: type[Policy] | None = None,
        generator: Random,
    ) -> None:
        """`policy` replaces the one of the settings."""
        self.settings = settings
        self.router_id = router_id
        self.run_id = run_id
        self.index = KvIndex(settings.index)
        self.fleet = Fleet(self.index, settings)
        self.health = self.fleet.health
        self.book = ReservationBook(lambda reservation: self.health.on_ended(reservation, self._now))
        self.history = DecisionHistory(settings.history_max)
        self.placer = Placer(
            self.fleet,
            self.index,
            make_policy(policy or settings.policy, PolicyContext(cost=settings.cost, generator=generator)),
            settings=settings,
            generator=generator,
        )
        self.admission = Admission(settings)
        self.queue = self.admission.queue
        self.charges = Charges()
        self._id_prefix = f"{router_id}-{run_id}-" if run_id else f"{router_id}-"
        self._placements = 0
        self._now = 0.0
        self.apply_buffered_reports: Callable[[], bool] = bool
        """Applies reports that the caller buffers. Called before the router refuses an ask. Returns False when there are none."""

    @property
    def policy_name(self) -> str:
        return self.placer.policy.name

    def ask(self, frontend_id: str, ask_id: int, ask: Ask, *, now: float, wall: float) -> Placement | Queued:
        """Places a request and reserves its workers, or queues it, or raises the refusal. `wall` is for explanations."""
        record = DecisionRecord(ask=ask, ask_id=ask_id, policy=self.placer.policy, decided_at_s=wall)
        self.history.add(record)
        self._now = now
        # First: a breaker whose pause is over puts its worker back into the pools that this decision uses.
        self.health.advance(now)
        try:
            self._check_reservations()
            self._release_ask_number(frontend_id, ask_id, ask.request_id)
            if self.queue.requests:
                self._replace_queued(frontend_id, ask_id, ask.request_id, now=now)
                if self.queue.is_behind(ask, self._paused(frontend_id, now)):
                    return self._enqueue(frontend_id, record, now)
                if self.queue.must_take_turn(ask):
                    return self._enqueue(frontend_id, record, now, may_have_room=True)
            try:
                decision = self._choose(frontend_id, ask, now)
            except OverloadedError:
                if not self.settings.queue.requests_max:
                    raise
                record.considered = self.placer.considered
                return self._enqueue(frontend_id, record, now)
        except MeshError as problem:
            error = self.health.refusal(problem, frontend_id=frontend_id, model=ask.model, now=now)
            error.request_id = ask.request_id
            record.refuse(error, self.placer)
            raise error from None
        if self._is_late(ask, decision):
            record.considered = self.placer.considered
            # With a full queue it is placed immediately.
            with suppress(OverloadedError):
                return self._enqueue(frontend_id, record, now, is_late=True)
        record.decision, record.considered = decision, self.placer.considered
        record.placement = self._reserve(frontend_id, ask_id, ask, decision=decision, now=now)
        # Asks of this model and priority wait, so service that did not go through the queue counts for the shares too.
        if (accounts := self.queue.accounts_of(ask)) is not None:
            account = accounts.of(ask.tenant)
            accounts.serve(account, self._charge(frontend_id, ask_id, ask, account=account))
        return record.placement

    def drain_queue(self, *, now: float, wall: float) -> list[QueueOutcome]:
        """Places queued asks for which there is room. Returns the outcomes of all asks that left the queue.

        To be called when room may have appeared, and regularly, since queued asks expire.
        """

        self.health.advance(now)
        if self.queue.requests:
            self._now = now
        return self.admission.drain(lambda queued: self._place_queued(queued, now, wall=wall), now)

    def withdraw(self, frontend_id: str, ask_id: int, *, now: float, has_caller: bool = True) -> bool:
        """Removes an ask from the queue; False when it is not queued. Without a caller there is no outcome."""
        queued = self.queue.get(frontend_id, ask_id)
        if queued is None:
            return False
        if has_caller:
            self.admission.withdraw(queued, now)
        else:
            self.admission.forget(queued, now)
        return True

    def report(self, frontend_id: str, ask_id: int, report: Report, *, now: float | None = None) -> Reservation | None:
        """Applies a report. Returns None, and ignores the report, when no such reservation is known.

        `now` None: the time of the newest ask.
        """
        reservation = self.book.find(frontend_id, ask_id, report.reservation_id)
        if reservation is None:
            return None
        self.history.add_report(reservation.request_id, report)
        if reservation.keeper or reservation.is_orphaned:
            self.book.adopt(reservation)
        self._now = self._now if now is None else now
        reservation.due_at = self._now
        self.health.on_report(reservation, report, self._now)
        if reservation.forecast is not None and report.elapsed_s > 0 and self.settings.cost.learning:
            learn(reservation, report, self.placer.handoffs, slow_pairs=self.placer.slow_pairs, now=self._now)
        if reservation.charge is not None:
            ended, complete = report.kind in SETTLING, report.kind is FINISHED
            self.charges.correct(reservation.charge, report.output_tokens, has_ended=ended, is_complete=complete)
        if report.kind in SETTLING:
            self.settle(reservation)
        # Output means that the prompt is computed, and so does each kind of report that neither settles nor is PROGRESS.
        elif report.kind is not PROGRESS or report.output_tokens:
            self.book.mark_prefilled(reservation, now=_reported_time(reservation, report) if now is None else now)
        return reservation

    def on_stream_started(self, frontend_id: str, host: str = "") -> None:
        """The frontend opened a stream from this host. Empty: unknown."""
        self.health.paths.add_frontend(frontend_id, host=host)

    def on_stream_ended(self, frontend_id: str, *, now: float) -> None:
        """The frontend's last stream ended. It may come back within the grace."""
        self.health.paths.remove_frontend(frontend_id)
        self.book.orphan_frontend(frontend_id, ends_at=now + self.settings.reservation_grace_s)

    def add_peer_reservation(self, reservation: Reservation, *, now: float) -> None:
        """Counts a peer's placement; sessions and predictions follow it like one of this router."""
        self.book.add(reservation)
        if self.queue.requests:
            self.queue.charge_peer(
                reservation.model, reservation.priority, reservation.tenant, tokens=reservation.charged_tokens
            )
        if reservation.session_id:
            self.placer.sessions.bind(reservation.session_id, reservation.prefill, reservation.decode, now=now)
        if reservation.block_hashes:
            self._predict_peer_blocks(reservation, now)

    def settle(self, reservation: Reservation) -> None:
        """Ends a reservation, and the prediction that its prompt will be cached."""
        self.book.settle(reservation)
        if reservation.last_block_hash is None:
            return
        computing = reservation.computing_prompt
        if (feed := computing.worker.feed) is not None:
            feed.on_settled(computing.rank, last_block_hash=reservation.last_block_hash)

    def expire(self, *, now: float) -> Iterable[Reservation]:
        return self.book.expire(now)

    def check_health(self, *, now: float) -> list[HealthEvent]:
        """Checks the workers. Returns what happened to them since the previous call."""
        self.health.check(self.book, now)
        events = list(self.health.events)
        self.health.events.clear()
        return events

    def _choose(self, frontend_id: str, ask: Ask, now: float) -> PlacementDecision:
        try:
            return self._place(frontend_id, ask, now)
        except UnavailableError:
            # Tried again even without reports: `_choose_or_probe` may half-open a breaker early, for a probe.
            self.apply_buffered_reports()
            return self._choose_or_probe(frontend_id, ask, now)
        except OverloadedError:
            if not self.apply_buffered_reports():
                raise
            return self._choose_or_probe(frontend_id, ask, now)

    def _place(self, frontend_id: str, ask: Ask, now: float) -> PlacementDecision:
        return self.placer.choose(ask, now=now, paused=self._paused(frontend_id, now))

    def _paused(self, frontend_id: str, now: float) -> frozenset[str]:
        """Returns the workers that the frontend has lost."""
        paths = self.health.paths
        return paths.paused(frontend_id, now) if paths else NO_WORKERS

    def _choose_or_probe(self, frontend_id: str, ask: Ask, now: float) -> PlacementDecision:
        """Chooses workers. If breakers leave none of a role that is needed, the request is a probe of one before its pause is over."""
        try:
            return self._place(frontend_id, ask, now)
        except UnavailableError as error:
            role, pinned = Role.DECODE, ask.pinned_decode_worker_id
            if error.reason == NO_PREFILL_WORKER:
                role, pinned = Role.PREFILL, ask.pinned_prefill_worker_id
            elif self.placer.considered is not None:
                raise  # There are workers, but the request's own pins or exclusions leave none.
            paused = [
                worker
                for worker, _ in self.placer.removed(ask)
                if worker.role is role
                and worker.worker_id not in ask.excluded_worker_ids
                and pinned in ("", worker.worker_id)
            ]
            if not self.health.half_open_early(paused, now):
                raise
            return self._place(frontend_id, ask, now)

    def _check_reservations(self) -> None:
        if self.book.is_full:
            self.apply_buffered_reports()
            if self.book.is_full:
                raise self._full()

    def _full(self) -> OverloadedError:
        message = f"the router holds {len(self.book)} reservations, which is its limit"
        return OverloadedError(message, reason="router_full", retry_after_s=RETRY_AFTER_S)

    def _release_ask_number(self, frontend_id: str, ask_id: int, request_id: str) -> None:
        """Ends an older reservation with the ask's number.

        A frontend process counts from one, so the number may be that of its predecessor, whose stream has ended, or which reported to a
        peer at last. A peer's reservation for the same request is over: the frontend gave that router up. Raises InvalidRequestError when
        the number is in use.
        """
        of_peer = self.book.get_of_peer(frontend_id, ask_id)
        if of_peer is not None and of_peer.request_id == request_id:
            # Peers accept the end of a reservation from its keeper only.
            self.book.adopt(of_peer)
            self.book.settle(of_peer)
        known = self.book.get_own(frontend_id, ask_id)
        # The report that ends the older reservation may be buffered.
        if known is not None and self.apply_buffered_reports():
            known = self.book.get_own(frontend_id, ask_id)
        if known is None:
            return
        if not (known.is_orphaned or known.keeper) and known.request_id != request_id:
            raise InvalidRequestError(f"ask_id {ask_id} is in use on this stream", field="ask_id")
        self.book.settle(known)

    def _replace_queued(self, frontend_id: str, ask_id: int, request_id: str, *, now: float) -> None:
        """The same ask on a new stream replaces the queued one."""
        queued = self.queue.get(frontend_id, ask_id)
        if queued is None:
            return
        if queued.ask.request_id != request_id:
            raise InvalidRequestError(f"ask_id {ask_id} is in use on this stream", field="ask_id")
        self.admission.forget(queued, now)

    def _is_late(self, ask: Ask, decision: PlacementDecision) -> bool:
        queue = self.settings.queue
        return bool(queue.late_share and queue.requests_max) and is_late(
            ask, decision, self.placer.bounds_of(ask.model).ttft_s
        )

    def _enqueue(
        self,
        frontend_id: str,
        record: DecisionRecord,
        now: float,
        *,
        may_have_room: bool = False,
        is_late: bool = False,
    ) -> Queued:
        queued = QueuedAsk(
            frontend_id=frontend_id,
            ask_id=record.ask_id,
            ask=record.ask,
            record=record,
            arrived_s=now,
            tokens=self._uncached_tokens(record.ask),
            paused=self._paused(frontend_id, now),
        )
        return self.admission.enqueue(queued, now, may_have_room=may_have_room, is_late=is_late)

    def _uncached_tokens(self, ask: Ask) -> int:
        """Prompt tokens that no worker has cached on the device; at least 1."""
        depth = max(self.index.device.prefixes(ask.block_hashes)[0], default=0)
        return max(1, ask.prompt_tokens - depth * ask.block_size_tokens)

    def _place_queued(self, queued: QueuedAsk, now: float, wall: float) -> tuple[Placement, float]:
        """Decides again, because workers and blocks have changed since. Returns the placement and the tokens that the tenant is charged."""
        if self.book.is_full:
            raise self._full()
        ask, record, queued_s = queued.ask, queued.record, now - queued.arrived_s
        # The timeout counts from the arrival of the ask.
        if ask.timeout_s is not None:
            ask = replace(ask, timeout_s=ask.timeout_s - queued_s)
        try:
            decision = self._choose_or_probe(queued.frontend_id, ask, now)
        except UnavailableError as problem:
            record.refuse(problem, self.placer)
            raise self.health.refusal(problem, frontend_id=queued.frontend_id, model=ask.model, now=now) from None
        if queued.late_until_s is not None:
            if not may_go(decision, self.placer.bounds_of(ask.model).ttft_s, waited_s=queued_s):
                # The drain treats this like a lack of room: the ask stays in the queue.
                raise OverloadedError("the request waits for spare time", reason=LATE, retry_after_s=RETRY_AFTER_S)
            decision.reasons = (*decision.reasons, LATE)
        record.considered = self.placer.considered
        placement = self._reserve(queued.frontend_id, queued.ask_id, ask, decision=decision, now=now)
        record.decision, record.placement = decision, replace(placement, queued_s=queued_s)
        record.decided_at_s = wall
        # Added again: newer decisions may have displaced the record while the ask waited.
        self.history.add(record)
        assert queued.tenant_queue is not None
        account = queued.tenant_queue.account
        return record.placement, self._charge(queued.frontend_id, queued.ask_id, ask, account=account)

    def _charge(self, frontend_id: str, ask_id: int, ask: Ask, *, account: Account) -> float:
        """Returns the tokens to charge for a placed request now. Its reports correct them."""
        reservation = self.book.get_own(frontend_id, ask_id)
        assert reservation is not None, "the caller has just made it"
        reservation.charge = self.charges.begin(ask, account)
        return reservation.charged_tokens

    def _reserve(
        self, frontend_id: str, ask_id: int, ask: Ask, *, decision: PlacementDecision, now: float
    ) -> Placement:
        self._placements += 1
        ends_at = now + (RESERVATION_S_MAX if ask.timeout_s is None else min(RESERVATION_S_MAX, ask.timeout_s))
        prefill, decode, block_hashes = decision.prefill, decision.decode, ask.block_hashes
        uses_decode = not _is_answered_by_prefill(ask, decision)
        kv_tokens = ask.prompt_tokens + ask.expected_output_tokens
        is_silent = _has_unseen_blocks(decode, ask) or (prefill is not None and _has_unseen_blocks(prefill, ask))
        reservation = Reservation(
            reservation_id=f"{self._id_prefix}{self._placements}",
            request_id=ask.request_id,
            frontend_id=frontend_id,
            ask_id=ask_id,
            prefill=prefill,
            decode=decode,
            uncached_tokens=decision.uncached_tokens,
            # Rounded up.
            kv_blocks=-(-kv_tokens // decode.block_size_tokens) if uses_decode else 0,
            choices=ask.choices or 1 if uses_decode else 0,
            ends_at=ends_at,
            ends_at_latest=ends_at,
            due_at=now,
            placed_at=now,
            prefill_s=decision.prefill_s,
            forecast=decision.forecast,
            expected_ttft_s=decision.expected_ttft_s,
            last_block_hash=block_hashes[-1] if block_hashes else None,
            session_id=ask.session_id,
            tenant=ask.tenant,
            model=ask.model,
            priority=ask.priority,
            charged_tokens=self.charges.tokens(ask, decision.uncached_tokens),
            block_hashes=block_hashes if is_silent else (),
            # Hashes of another block size name no block that the worker will report.
            predicted_hashes=block_hashes if ask.block_size_tokens == (prefill or decode).block_size_tokens else (),
        )
        self.book.add(reservation)
        self.health.on_placed(reservation, ask, now=now, holders_of=self._holders_of)
        if prefill is not None:
            self._note_placement(prefill, ask, now=now, is_computing=True)
        self._note_placement(decode, ask, now=now, is_computing=prefill is None)
        if ask.session_id:
            self.placer.sessions.bind(ask.session_id, prefill, decode, now=now)
        return _placement(reservation, decision)

    def _note_placement(self, target: Target, ask: Ask, *, now: float, is_computing: bool) -> None:
        target.placed_last = self._placements
        if ask.adapter:
            target.use_adapter(ask.adapter)
        feed = target.worker.feed
        if feed is None or ask.block_size_tokens != target.block_size_tokens:
            return
        if is_computing or not feed.sends_events:
            feed.on_placed(target.rank, ask.block_hashes, now=now, is_computing=is_computing)

    def _predict_peer_blocks(self, reservation: Reservation, now: float) -> None:
        computing = None if reservation.is_prefilled else reservation.computing_prompt
        is_silent = False
        # As for an ask of this router: later events of the workers continue blocks that a lookup has put into the index.
        self.index.device.prefixes(reservation.block_hashes)
        for target in (reservation.prefill, reservation.decode):
            if target is not None and (feed := target.worker.feed) is not None:
                is_computing = target is computing
                feed.on_placed(target.rank, reservation.block_hashes, now=now, is_computing=is_computing)
                is_silent = is_silent or not feed.sends_events
        if not is_silent:
            reservation.block_hashes = ()

    def _holders_of(self, block_hash: int) -> int:
        """Returns the bits of all holders whose events named the block, in any tier. Predictions do not count."""
        # `prefixes` and not `holds`, which does not search pending runs.
        found = [holders for index in self.index.tiers.values() for holders in index.prefixes((block_hash,))[1]]
        return reduce(or_, found, 0)


def _is_answered_by_prefill(ask: Ask, decision: PlacementDecision) -> bool:
    """Returns whether the prefill worker answers alone. If it does not, the decode worker makes one step that is not counted."""
    return ask.expected_output_tokens == 1 and decision.prefill is not None and decision.handoff is Handoff.SEQUENTIAL


def _reported_time(reservation: Reservation, report: Report) -> float | None:
    """Returns the time of a report by this router's clock; the frontend measures from the placement on."""
    return None if reservation.placed_at is None else reservation.placed_at + report.elapsed_s


def _has_unseen_blocks(target: Target, ask: Ask) -> bool:
    """Returns whether the worker sends no events, so that peers cannot know that it holds the prompt from now on."""
    feed = target.worker.feed
    return feed is not None and not feed.sends_events and target.block_size_tokens == ask.block_size_tokens


def _placement(reservation: Reservation, decision: PlacementDecision) -> Placement:
    prefill, address = decision.prefill, ""
    if prefill is not None and decision.handoff is Handoff.RENDEZVOUS and prefill.worker.description is not None:
        address = prefill.worker.description.rendezvous_address_of(prefill.rank)
    return Placement(
        reservation_id=reservation.reservation_id,
        decode=decision.decode.ref,
        prefill=prefill.ref if prefill is not None else None,
        handoff=decision.handoff,
        rendezvous_address=address,
        cached_tokens=decision.cached_tokens,
        expected_ttft_s=decision.expected_ttft_s,
        reasons=decision.reasons,
        decode_cached_tokens=decision.decode_cached_tokens,
    )
