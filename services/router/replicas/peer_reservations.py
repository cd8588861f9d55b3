"""The reservations of other routers, counted as if this router had made them. Pure; times are arguments.

Invariants:
1. A reservation is counted once, whichever peer sends it. It has one keeper: the router that made it, then the router that its frontend
   reported to last. When a keeper is lost, the next router that sends the reservation becomes the keeper.
2. Only a keeper's message ends a reservation. A router that was a keeper announces the end to all peers.
3. Reservations of a lost keeper end within the grace, unless a router adopts them.
4. A sender does not have what its snapshot does not contain: what it kept of that ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvmesh.core import PeerReservation, PeerUpdate
from kvmesh.errors import InvalidRequestError, LostError
from services.router.core import RouterCore
from services.router.core_settings import SyncSettings
from services.router.replicas.peer_updates import PeerUpdates
from services.router.workers.reservations import RESERVATION_S_MAX, Reservation
from services.router.workers.worker import Target


@dataclass(slots=True, eq=False, kw_only=True)
class PeerSession:
    """One stream with a peer. `origin` names the peer's process, once it has introduced itself."""

    updates: PeerUpdates
    origin: str = ""
    router_id: str = ""
    received: int = 0
    """Sequence number of the newest message."""
    has_snapshot: bool = False
    missing_ids: set[str] | None = None
    """While a snapshot arrives: the peer's earlier reservations that it has not contained yet."""


@dataclass(slots=True, eq=False)
class _PendingReservation:
    """A reservation on a worker that this router does not know, or not yet."""

    news: PeerReservation
    origin: str
    ends_at: float


@dataclass(slots=True, eq=False)
class PeerCounts:
    """Counters since the start."""

    received: int = 0
    """Reservations received."""
    ignored: int = 0
    """Reservations beyond the limits."""
    lost: int = 0
    """Peers that were lost."""


class PeerReservations:
    """The reservations of all peers. Listens to the reservation book to send changes to the peers."""

    def __init__(self, core: RouterCore, settings: SyncSettings) -> None:
        self._core = core
        self._book = core.book
        self._settings = settings
        self._sessions: dict[PeerSession, None] = {}
        self._peers: dict[str, PeerSession] = {}
        """Sessions by origin."""
        self._pending: dict[str, _PendingReservation] = {}
        self._pending_fleet_version = -1
        """The fleet's version when pending reservations were last tried."""
        self.counts = PeerCounts()
        self._book.listener = self

    def __iter__(self) -> Iterator[PeerSession]:
        return iter(self._sessions)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def counted(self) -> int:
        return sum(1 for reservation in self._book if reservation.is_from_peer)

    def has_snapshot_of(self, router_id: str) -> bool:
        return any(session.router_id == router_id and session.has_snapshot for session in self._peers.values())

    # Streams

    def open_session(self) -> PeerSession:
        """Opens the session of a stream with a peer. Its first messages are a snapshot of this router's reservations."""
        session = PeerSession(updates=PeerUpdates(self._book, self._is_ours, self._settings))
        self._sessions[session] = None
        return session

    def next_message(self, session: PeerSession, *, now: float) -> PeerUpdate:
        return session.updates.next_message(self._core.router_id, run_id=self._core.run_id, now=now)

    def on_message(self, session: PeerSession, news: PeerUpdate, *, now: float) -> None:
        """Applies a message of the peer. Raises LostError when one is missing: the stream must be opened again."""
        if news.sequence != session.received + 1:
            message = f"message {news.sequence} of {session.origin or 'a peer'} follows {session.received}"
            raise LostError(message, reason="sequence_gap")
        session.received = news.sequence
        if not session.origin:
            self._introduce(session, news, now)
        if news.is_snapshot and session.missing_ids is None and not session.has_snapshot:
            # Reservations from an earlier stream of this peer. Those that the snapshot does not contain have ended (invariant 4).
            session.missing_ids = {each.reservation_id for each in self._book if each.keeper == session.origin}
            session.missing_ids.update(name for name, each in self._pending.items() if each.origin == session.origin)
        for reservation in news.reservations:
            self._on_reservation(session, reservation, now)
        for reservation_id in news.prefilled_ids:
            self._on_prefilled(reservation_id, now)
        for reservation_id in news.settled_ids:
            self._on_settled(session, reservation_id)
        if news.is_snapshot and news.is_complete:
            self._on_snapshot_complete(session)

    def close_session(self, session: PeerSession, *, now: float) -> None:
        """The stream ended. Idempotent."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        # A newer stream of the same process may have taken its place. The peer is not lost then.
        if self._peers.get(session.origin) is session:
            del self._peers[session.origin]
            self._on_peer_lost(session.origin, now)

    def retry_pending(self, *, now: float) -> None:
        """Counts reservations whose workers have become known. To be called regularly."""
        for reservation_id, pending in list(self._pending.items()):
            if pending.ends_at <= now:
                del self._pending[reservation_id]
        # Workers become known only with a new version of the fleet.
        if self._pending and self._pending_fleet_version != self._core.fleet.version:
            for reservation_id, pending in list(self._pending.items()):
                if self._count(pending.news, pending.origin, ends_at=pending.ends_at, now=now):
                    del self._pending[reservation_id]
        self._pending_fleet_version = self._core.fleet.version

    # Changes of this router's book

    def on_added(self, reservation: Reservation) -> None:
        for session in self._sessions:
            session.updates.add(reservation)

    def on_adopted(self, reservation: Reservation) -> None:
        for session in self._sessions:
            session.updates.adopt(reservation)

    def on_prefilled(self, reservation: Reservation) -> None:
        if not reservation.keeper or reservation.is_announced:
            for session in self._sessions:
                session.updates.mark_prefilled(reservation)

    def on_settled(self, reservation: Reservation) -> None:
        # Peers ignore ends from a router that they never took for the keeper.
        is_ours = not reservation.keeper or reservation.is_announced
        for session in self._sessions:
            if is_ours:
                session.updates.settle(reservation)
            else:
                session.updates.forget(reservation)

    def _is_ours(self, reservation: Reservation) -> bool:
        """Returns True when a snapshot must contain it, since no other router sends it. Called once per reservation that is sent."""
        # It may have ended since the snapshot was started. A peer with a stream sends its own reservations.
        if self._book.get(reservation.reservation_id) is not reservation or reservation.keeper in self._peers:
            return False
        reservation.is_announced = True
        return True

    # Messages of a peer

    def _introduce(self, session: PeerSession, news: PeerUpdate, now: float) -> None:
        if not news.router_id:
            raise InvalidRequestError("the first message must name its router", field="router_id")
        if not news.run_id:
            raise InvalidRequestError("the first message must name its process", field="run_id")
        if news.router_id == self._core.router_id:
            raise InvalidRequestError("a router does not exchange state with itself", field="router_id")
        session.origin = f"{news.router_id}/{news.run_id}"
        session.router_id = news.router_id
        for origin, other in list(self._peers.items()):
            if other.router_id == news.router_id and origin != session.origin:
                # The id belongs to another process now, so nothing more comes on the stream of the earlier one.
                del self._peers[origin]
                self._on_peer_lost(origin, now)
        self._peers[session.origin] = session

    def _on_reservation(self, session: PeerSession, news: PeerReservation, now: float) -> None:
        self.counts.received += 1
        if session.missing_ids is not None:
            session.missing_ids.discard(news.reservation_id)
        known = self._book.get(news.reservation_id)
        ends_at = now + news.ends_after_s
        if known is None:
            if self._count(news, session.origin, ends_at=ends_at, now=now):
                # Another peer may have sent it before the worker was known; it must not be counted again.
                self._pending.pop(news.reservation_id, None)
            else:
                self._add_pending(news, session.origin, ends_at)
            return
        if news.is_orphaned and not known.is_orphaned and known.keeper != session.origin:
            if not known.keeper:
                self.on_adopted(known)  # Its frontend reports here, which the peer does not know.
            return
        # Only a keeper sends what a frontend reports on. Of the rest, some sender must be taken for the keeper.
        if not news.is_orphaned or (known.keeper and known.keeper not in self._peers):
            self._hand_over(known, session.origin)
        if news.is_prefilled:
            self._book.mark_prefilled(known, now=now)
        if not news.is_orphaned and (known.is_orphaned or ends_at > known.ends_at):
            # The router that made a reservation knows its latest end.
            known.ends_at_latest = max(ends_at, known.ends_at_latest) if known.is_from_peer else known.ends_at_latest
            known.ends_at, known.is_orphaned = min(ends_at, known.ends_at_latest), False

    def _hand_over(self, reservation: Reservation, keeper: str) -> None:
        if not reservation.keeper:
            for session in self._sessions:
                session.updates.hand_over(reservation)
        reservation.keeper = keeper

    def _on_prefilled(self, reservation_id: str, now: float) -> None:
        known = self._book.get(reservation_id)
        if known is not None:
            known.due_at = now
            self._book.mark_prefilled(known, now=now)
        elif (pending := self._pending.get(reservation_id)) is not None:
            pending.news = replace(pending.news, is_prefilled=True)

    def _on_settled(self, session: PeerSession, reservation_id: str) -> None:
        known = self._book.get(reservation_id)
        if known is not None and known.keeper == session.origin:
            self._core.settle(known)
        elif known is None:
            self._pending.pop(reservation_id, None)

    def _on_snapshot_complete(self, session: PeerSession) -> None:
        # Sorted, since the order of a set differs between runs and a simulated run must repeat exactly.
        for reservation_id in sorted(session.missing_ids or ()):
            self._pending.pop(reservation_id, None)
            known = self._book.get(reservation_id)
            if known is not None and known.keeper == session.origin:
                known.keeper = ""
                self._book.settle(known)
        session.missing_ids = None
        session.has_snapshot = True

    def _on_peer_lost(self, origin: str, now: float) -> None:
        """The peer's frontends report to other routers within moments, which adopt what is in use. The rest ends with the grace."""
        self.counts.lost += 1
        ends_at = now + self._core.settings.reservation_grace_s
        for reservation in self._book:
            if reservation.keeper == origin:
                self._book.orphan(reservation, ends_at=ends_at)
        for pending in self._pending.values():
            if pending.origin == origin:
                pending.ends_at = min(pending.ends_at, ends_at)

    # Counting

    def _count(self, news: PeerReservation, origin: str, *, ends_at: float, now: float) -> bool:
        """Returns False if this router does not know one of its workers."""
        decode = self._target(news.decode_worker_id, news.decode_rank)
        prefill = self._target(news.prefill_worker_id, news.prefill_rank) if news.prefill_worker_id else None
        if decode is None or (news.prefill_worker_id and prefill is None):
            return False
        if self._book.is_full:
            self.counts.ignored += 1
            return True
        reservation = Reservation(
            reservation_id=news.reservation_id,
            request_id=news.request_id,
            frontend_id=news.frontend_id,
            ask_id=news.ask_id,
            prefill=prefill,
            decode=decode,
            uncached_tokens=news.uncached_tokens,
            kv_blocks=news.kv_blocks,
            choices=news.choices,
            ends_at=ends_at,
            # An orphaned reservation was sent with the end of its grace, not with its latest end.
            ends_at_latest=now + RESERVATION_S_MAX if news.is_orphaned else ends_at,
            is_prefilled=news.is_prefilled,
            due_at=now,
            placed_at=now,
            is_orphaned=news.is_orphaned,
            is_from_peer=True,
            keeper=origin,
            session_id=news.session_id,
            tenant=news.tenant,
            model=news.model,
            priority=news.priority,
            charged_tokens=news.charged_tokens,
            last_block_hash=news.block_hashes[-1] if news.block_hashes else None,
            block_hashes=news.block_hashes,
        )
        self._core.add_peer_reservation(reservation, now=now)
        return True

    def _target(self, worker_id: str, rank: int) -> Target | None:
        worker = self._core.fleet.workers.get(worker_id)
        return worker.targets[rank] if worker is not None and rank < len(worker.targets) else None

    def _add_pending(self, news: PeerReservation, origin: str, ends_at: float) -> None:
        if news.reservation_id not in self._pending and len(self._pending) >= self._settings.pending_max:
            self.counts.ignored += 1
            return
        self._pending[news.reservation_id] = _PendingReservation(news, origin, ends_at)
