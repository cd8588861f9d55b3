"""What peers tell of their work in flight, counted as if this router had placed it. Pure; times are arguments.

Invariants:
1. A reservation is counted once, whoever tells of it. One router is its keeper: who made it, then whoever its frontend spoke to
   last. A keeper that is lost is followed by whoever tells of it.
2. The keeper's word of an end is believed, and no other's. Whoever was a keeper tells all peers.
3. What a lost peer kept ends within the grace, unless a router adopts it.
4. What a snapshot does not name, its sender does not have: of that, what the sender kept ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvmesh.core import PeerNews, ReservationNews
from kvmesh.errors import InvalidRequestError, LostError
from services.router.core import RouterCore
from services.router.replicas.changes import Changes
from services.router.workers.reservations import Reservation
from services.router.workers.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """Bounds of what is kept for peers and of them."""

    batch_max: int = 512
    changes_max: int = 65_536
    strangers_max: int = 16_384
    blocks_max: int = 2048


@dataclass(slots=True, eq=False)
class Session:
    """One stream with a peer. `origin` names the peer's process once it has said who it is."""

    changes: Changes
    origin: str = ""
    router_id: str = ""
    heard: int = 0
    is_snapshot_heard: bool = False
    unnamed: set[str] | None = None
    """While a snapshot is heard: what the peer told before and has not named yet."""


@dataclass(slots=True, eq=False)
class _Stranger:
    """A reservation on a worker that is not known here, or not known yet."""

    news: ReservationNews
    origin: str
    ends_at: float


@dataclass(slots=True, eq=False)
class ReplicaCounts:
    """What has happened so far."""

    told: int = 0
    """Reservations heard of."""
    ignored: int = 0
    """Reservations beyond the limits."""
    sessions: int = 0
    lost: int = 0
    """Peers that were lost."""


@dataclass(slots=True, eq=False)
class _Strangers:
    by_id: dict[str, _Stranger] = field(default_factory=dict)
    version: int = -1
    """The fleet's, when they were looked for last."""


class Replica:
    """All peers' work. It hears of own work as the book's journal."""

    def __init__(self, core: RouterCore, limits: ReplicaLimits | None = None) -> None:
        self._core = core
        self._book = core.book
        self._limits = limits or ReplicaLimits()
        self._sessions: dict[Session, None] = {}
        self._peers: dict[str, Session] = {}
        self._strangers = _Strangers()
        self.counts = ReplicaCounts()
        self._book.journal = self

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions)

    @property
    def strangers(self) -> int:
        """Reservations on workers that are not known here."""
        return len(self._strangers.by_id)

    @property
    def told(self) -> int:
        """Reservations of peers that are counted."""
        return sum(1 for reservation in self._book if reservation.is_told)

    def has_heard(self, router_id: str) -> bool:
        """True when that router's snapshot is complete."""
        return any(session.router_id == router_id and session.is_snapshot_heard for session in self._peers.values())

    # Streams

    def began(self) -> Session:
        """A stream with a peer stands; its first messages are the snapshot of what is in flight here."""
        limits = self._limits
        changes = Changes(
            self._book,
            self._is_kept,
            batch_max=limits.batch_max,
            changes_max=limits.changes_max,
            blocks_max=limits.blocks_max,
        )
        session = Session(changes)
        self._sessions[session] = None
        self.counts.sessions += 1
        return session

    def next_news(self, session: Session, *, now: float) -> PeerNews:
        """What the peer is told next."""
        return session.changes.next_news(self._core.router_id, self._core.run_id, now=now)

    def heard(self, session: Session, news: PeerNews, *, now: float) -> None:
        """The peer says something. LostError: something is missing, the stream is to be opened anew."""
        if news.sequence != session.heard + 1:
            message = f"message {news.sequence} of {session.origin or 'a peer'} follows {session.heard}"
            raise LostError(message, reason="sequence_gap")
        session.heard = news.sequence
        if not session.origin:
            self._introduce(session, news, now)
        if news.is_snapshot and session.unnamed is None and not session.is_snapshot_heard:
            session.unnamed = {each.reservation_id for each in self._book if each.keeper == session.origin}
            session.unnamed.update(
                name for name, each in self._strangers.by_id.items() if each.origin == session.origin
            )
        for reservation in news.reservations:
            self._on_reservation(session, reservation, now)
        for reservation_id in news.prefilled_ids:
            self._on_prefilled(session, reservation_id, now)
        for reservation_id in news.settled_ids:
            self._on_settled(session, reservation_id)
        if news.is_snapshot and news.is_complete:
            self._snapshot_over(session)

    def ended(self, session: Session, *, now: float) -> None:
        """The stream is over. Idempotent."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        if self._peers.get(session.origin) is session:
            del self._peers[session.origin]
            self._lost(session.origin, now)

    def tick(self, *, now: float) -> None:
        """Looks for workers of reservations that had none here. To be called now and then."""
        strangers = self._strangers
        for reservation_id, stranger in list(strangers.by_id.items()):
            if stranger.ends_at <= now:
                del strangers.by_id[reservation_id]
        if strangers.by_id and strangers.version != self._core.fleet.version:
            for reservation_id, stranger in list(strangers.by_id.items()):
                if self._count(stranger.news, stranger.origin, stranger.ends_at, now):
                    del strangers.by_id[reservation_id]
        strangers.version = self._core.fleet.version

    # The book's journal

    def added(self, reservation: Reservation) -> None:
        """Own work begins."""
        for session in self._sessions:
            session.changes.added(reservation)

    def adopted(self, reservation: Reservation) -> None:
        """A peer's work is reported of here: it is in use."""
        for session in self._sessions:
            session.changes.adopted(reservation)

    def prefilled(self, reservation: Reservation) -> None:
        """A prompt is computed."""
        if not reservation.keeper or reservation.is_known_from_here:
            for session in self._sessions:
                session.changes.prefilled(reservation)

    def settled(self, reservation: Reservation) -> None:
        """Work is over."""
        is_mine = not reservation.keeper or reservation.is_known_from_here
        for session in self._sessions:
            if is_mine:
                session.changes.settled(reservation)
            else:
                session.changes.forget(reservation)

    def _is_kept(self, reservation: Reservation) -> bool:
        """True for what a snapshot tells: nobody else can. Asked once for each that is told."""
        if self._book.of_id(reservation.reservation_id) is not reservation or reservation.keeper in self._peers:
            return False
        reservation.is_known_from_here = True
        return True

    # What a peer says

    def _introduce(self, session: Session, news: PeerNews, now: float) -> None:
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
                # The id belongs to another process now; the stream of the earlier one cannot say anything any more.
                del self._peers[origin]
                self._lost(origin, now)
        self._peers[session.origin] = session

    def _on_reservation(self, session: Session, news: ReservationNews, now: float) -> None:
        self.counts.told += 1
        if session.unnamed is not None:
            session.unnamed.discard(news.reservation_id)
        known = self._book.of_id(news.reservation_id)
        ends_at = now + news.ends_after_s
        if known is None:
            if not self._count(news, session.origin, ends_at, now):
                self._remember_stranger(news, session.origin, ends_at)
            return
        if news.is_orphaned and not known.is_orphaned and known.keeper != session.origin:
            if not known.keeper:
                self.adopted(known)  # Its frontend came here, which the peer does not know.
            return
        # Only a keeper tells of what somebody speaks of; of the rest somebody has to be taken for the keeper.
        if not news.is_orphaned or (known.keeper and known.keeper not in self._peers):
            self._hand_over(known, session.origin)
        if news.is_prefilled:
            self._book.prefilled(known, now=now)
        if not news.is_orphaned and (known.is_orphaned or ends_at > known.ends_at):
            # A maker knows how long its own may last at most.
            known.ends_at_latest = max(ends_at, known.ends_at_latest) if known.is_told else known.ends_at_latest
            known.ends_at, known.is_orphaned = min(ends_at, known.ends_at_latest), False

    def _hand_over(self, reservation: Reservation, keeper: str) -> None:
        if not reservation.keeper:
            for session in self._sessions:
                session.changes.kept_elsewhere(reservation)
        reservation.keeper = keeper

    def _on_prefilled(self, session: Session, reservation_id: str, now: float) -> None:
        known = self._book.of_id(reservation_id)
        if known is not None:
            known.due_at = now
            self._book.prefilled(known, now=now)
        elif (stranger := self._strangers.by_id.get(reservation_id)) is not None:
            stranger.news = replace(stranger.news, is_prefilled=True)

    def _on_settled(self, session: Session, reservation_id: str) -> None:
        known = self._book.of_id(reservation_id)
        if known is not None and known.keeper == session.origin:
            self._core.told_settled(known)
        elif known is None:
            self._strangers.by_id.pop(reservation_id, None)

    def _snapshot_over(self, session: Session) -> None:
        # In a settled order, which a set would not have: a simulated run must repeat exactly.
        for reservation_id in sorted(session.unnamed or ()):
            self._strangers.by_id.pop(reservation_id, None)
            known = self._book.of_id(reservation_id)
            if known is not None and known.keeper == session.origin:
                known.keeper = ""
                self._book.settle(known)
        session.unnamed = None
        session.is_snapshot_heard = True

    def _lost(self, origin: str, now: float) -> None:
        """Its frontends come here within moments and have adopted what is in use."""
        self.counts.lost += 1
        ends_at = now + self._core.limits.reservation_grace_s
        for reservation in self._book:
            if reservation.keeper == origin:
                self._book.orphan(reservation, ends_at=ends_at)
        for stranger in self._strangers.by_id.values():
            if stranger.origin == origin:
                stranger.ends_at = min(stranger.ends_at, ends_at)

    # Counting

    def _count(self, news: ReservationNews, origin: str, ends_at: float, now: float) -> bool:
        """False: a worker of it is not known here."""
        decode = self._target(news.decode_worker_id, news.decode_rank)
        prefill = self._target(news.prefill_worker_id, news.prefill_rank) if news.prefill_worker_id else None
        if decode is None or (news.prefill_worker_id and prefill is None):
            return False
        if len(self._book) >= self._core.limits.reservations_max:
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
            # How long it may last if somebody adopts it is not told of one that nobody speaks of.
            ends_at_latest=now + self._core.limits.reservation_s_max if news.is_orphaned else ends_at,
            is_prefilled=news.is_prefilled,
            due_at=now,
            placed_at=now,
            is_orphaned=news.is_orphaned,
            is_told=True,
            keeper=origin,
            session_id=news.session_id,
            last_block_hash=news.block_hashes[-1] if news.block_hashes else None,
            block_hashes=news.block_hashes,
        )
        self._core.told(reservation, now=now)
        return True

    def _target(self, worker_id: str, rank: int) -> Target | None:
        worker = self._core.fleet.workers.get(worker_id)
        return worker.targets[rank] if worker is not None and rank < len(worker.targets) else None

    def _remember_stranger(self, news: ReservationNews, origin: str, ends_at: float) -> None:
        strangers = self._strangers.by_id
        if news.reservation_id not in strangers and len(strangers) >= self._limits.strangers_max:
            self.counts.ignored += 1
            return
        strangers[news.reservation_id] = _Stranger(news, origin, ends_at)
