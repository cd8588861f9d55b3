"""What one peer has not been told yet. Pure; bounded by `changes_max`, beyond which the peer begins anew with a snapshot.

What begins and ends between two messages is not told at all.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvmesh.core import PeerNews, ReservationNews
from services.router.workers.reservations import Reservation


class Changes:
    """The outgoing half of a stream between two routers: first a snapshot, then what changes.

    `is_told` says of a reservation of the snapshot, when its turn comes, whether it is still for this router to tell.
    """

    def __init__(
        self,
        snapshot: Iterable[Reservation],
        is_told: Callable[[Reservation], bool],
        *,
        batch_max: int,
        changes_max: int,
        blocks_max: int,
    ) -> None:
        self._is_told = is_told
        self._snapshot: list[Reservation] | None = list(snapshot)
        self._batch_max = batch_max
        self._changes_max = changes_max
        self._blocks_max = blocks_max
        self._told: dict[str, Reservation] = {}
        self._new: set[str] = set()
        self._prefilled: dict[str, None] = {}
        self._settled: dict[str, None] = {}
        self._sequence = 0
        self.is_overrun = False
        """True when the peer does not take what it is told: the stream is of no use any more."""
        self.on_change: Callable[[], None] = _nobody
        """Called when there is something to tell after there was nothing, and when a batch is full."""

    def __len__(self) -> int:
        return len(self._told) + len(self._prefilled) + len(self._settled)

    @property
    def is_due(self) -> bool:
        """True when a message is to go out at once: a snapshot is not told yet, or a batch is full."""
        return self._snapshot is not None or len(self) >= self._batch_max

    def added(self, reservation: Reservation) -> None:
        """It is made."""
        self._new.add(reservation.reservation_id)
        self.adopted(reservation)

    def adopted(self, reservation: Reservation) -> None:
        """It is kept here."""
        self._told[reservation.reservation_id] = reservation
        self._changed()

    def kept_elsewhere(self, reservation: Reservation) -> None:
        """An adoption that was not told yet is no news any more."""
        if reservation.reservation_id not in self._new:
            self._told.pop(reservation.reservation_id, None)

    def prefilled(self, reservation: Reservation) -> None:
        """Its prompt is computed; a reservation that is still to be told says so itself."""
        if reservation.reservation_id not in self._told:
            self._prefilled[reservation.reservation_id] = None
            self._changed()

    def settled(self, reservation: Reservation) -> None:
        """It is over. One that is made and not told yet never was; an adoption goes out first, for only who keeps it may end it."""
        reservation_id = reservation.reservation_id
        self._prefilled.pop(reservation_id, None)
        if reservation_id in self._new:
            self._new.discard(reservation_id)
            del self._told[reservation_id]
            return
        self._settled[reservation_id] = None
        self._changed()

    def forget(self, reservation: Reservation) -> None:
        """It is over, and that is for others to tell."""
        self._told.pop(reservation.reservation_id, None)
        self._new.discard(reservation.reservation_id)
        self._prefilled.pop(reservation.reservation_id, None)

    def next_news(self, router_id: str, run_id: str, *, now: float) -> PeerNews:
        """The next message: a part of the snapshot, changes, or neither, which is a sign of life."""
        self._sequence += 1
        if self._sequence > 1:
            router_id = run_id = ""
        if self._snapshot is not None:
            part, self._snapshot = self._snapshot[: self._batch_max], self._snapshot[self._batch_max :] or None
            return PeerNews(
                sequence=self._sequence,
                router_id=router_id,
                run_id=run_id,
                reservations=[news_of(each, now, self._blocks_max) for each in part if self._is_told(each)],
                is_snapshot=True,
                is_complete=self._snapshot is None,
            )
        return PeerNews(
            sequence=self._sequence,
            reservations=[news_of(each, now, self._blocks_max) for each in self._taken(self._told)],
            prefilled_ids=self._taken_ids(self._prefilled),
            settled_ids=self._taken_ids(self._settled),
        )

    def _changed(self) -> None:
        waiting = len(self)
        if waiting > self._changes_max or self.is_overrun:
            self.is_overrun = True
            for of in (self._told, self._new, self._prefilled, self._settled):
                of.clear()
        if waiting in (1, self._batch_max):
            self.on_change()

    def _taken(self, of: dict[str, Reservation]) -> Sequence[Reservation]:
        names = list(islice(of, self._batch_max))
        self._new.difference_update(names)
        return [of.pop(name) for name in names]

    def _taken_ids(self, of: dict[str, None]) -> Sequence[str]:
        # What is told to be over must have been told to be there: reservations go out before their ends.
        if self._told:
            return ()
        names = list(islice(of, self._batch_max))
        for name in names:
            del of[name]
        return names


def _nobody() -> None:
    """Until somebody wants to know."""


def news_of(reservation: Reservation, now: float, blocks_max: int) -> ReservationNews:
    """A reservation as peers are told of it, with so many blocks of its prompt at most: what they do not hear of from its workers.

    Where less than a block is to be computed the worker has told of all there is, and so it has once the prompt is computed.
    """
    prefill, decode, block_hashes = reservation.prefill, reservation.decode, reservation.block_hashes
    if not block_hashes and reservation.uncached_tokens >= reservation.computing.block_size_tokens:
        block_hashes = reservation.predicted_hashes
    return ReservationNews(
        reservation_id=reservation.reservation_id,
        request_id=reservation.request_id,
        frontend_id=reservation.frontend_id,
        ask_id=reservation.ask_id,
        prefill_worker_id=prefill.worker.worker_id if prefill is not None else "",
        prefill_rank=prefill.rank if prefill is not None else 0,
        decode_worker_id=decode.worker.worker_id,
        decode_rank=decode.rank,
        uncached_tokens=reservation.uncached_tokens,
        kv_blocks=reservation.kv_blocks,
        choices=reservation.choices,
        is_prefilled=reservation.is_prefilled,
        is_orphaned=reservation.is_orphaned,
        ends_after_s=max(0.0, reservation.ends_at - now),
        session_id=reservation.session_id,
        block_hashes=block_hashes[:blocks_max],
    )
