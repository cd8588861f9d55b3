"""What one peer has not been sent yet. Pure; bounded by `changes_max`, beyond which the stream ends and the next one starts with a snapshot.

A reservation that begins and ends between two messages is never sent.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvmesh.core import PeerReservation, PeerUpdate
from services.router.core_settings import SyncSettings
from services.router.workers.reservations import Reservation


class PeerUpdates:
    """The outgoing half of a stream between two routers: first a snapshot, then changes.

    `is_ours` says, when a reservation of the snapshot is about to be sent, whether this router still has to send it.
    """

    def __init__(
        self,
        snapshot: Iterable[Reservation],
        is_ours: Callable[[Reservation], bool],
        settings: SyncSettings,
    ) -> None:
        self._is_ours = is_ours
        self._snapshot: list[Reservation] | None = list(snapshot)
        self._settings = settings
        self._added: dict[str, Reservation] = {}
        self._new: set[str] = set()
        """Those of `_added` that the peer does not know at all."""
        self._prefilled: dict[str, None] = {}
        self._settled: dict[str, None] = {}
        self._sequence = 0
        self.is_overrun = False
        """True when the peer does not take its messages: the stream must end."""
        self.on_change: Callable[[], None] = _ignore
        """Called when there is something to send after there was nothing, and when a message is full."""

    def __len__(self) -> int:
        return len(self._added) + len(self._prefilled) + len(self._settled)

    @property
    def is_due(self) -> bool:
        """True when a message must be sent immediately: a part of the snapshot, or a full message."""
        return self._snapshot is not None or len(self) >= self._settings.changes_per_message_max

    def add(self, reservation: Reservation) -> None:
        """This router made it."""
        self._new.add(reservation.reservation_id)
        self.adopt(reservation)

    def adopt(self, reservation: Reservation) -> None:
        """This router is its keeper now."""
        self._added[reservation.reservation_id] = reservation
        self._on_change()

    def hand_over(self, reservation: Reservation) -> None:
        """Another router is its keeper now: an adoption that was not sent is obsolete."""
        if reservation.reservation_id not in self._new:
            self._added.pop(reservation.reservation_id, None)

    def mark_prefilled(self, reservation: Reservation) -> None:
        """Records that the prompt is computed. A reservation that was not sent yet carries that itself."""
        if reservation.reservation_id not in self._added:
            self._prefilled[reservation.reservation_id] = None
            self._on_change()

    def settle(self, reservation: Reservation) -> None:
        """Records an end.

        A new reservation that ended is not sent at all; an adoption is sent before its end, since only a keeper may end
        it.
        """
        reservation_id = reservation.reservation_id
        self._prefilled.pop(reservation_id, None)
        if reservation_id in self._new:
            self._new.discard(reservation_id)
            del self._added[reservation_id]
            return
        self._settled[reservation_id] = None
        self._on_change()

    def forget(self, reservation: Reservation) -> None:
        """Records an end that another router announces."""
        self._added.pop(reservation.reservation_id, None)
        self._new.discard(reservation.reservation_id)
        self._prefilled.pop(reservation.reservation_id, None)

    def next_message(self, router_id: str, run_id: str, *, now: float) -> PeerUpdate:
        """Returns the next message: a part of the snapshot, changes, or nothing, which is a heartbeat."""
        self._sequence += 1
        if self._sequence > 1:
            router_id = run_id = ""
        if self._snapshot is not None:
            count = self._settings.changes_per_message_max
            part, self._snapshot = self._snapshot[:count], self._snapshot[count:] or None
            return PeerUpdate(
                sequence=self._sequence,
                router_id=router_id,
                run_id=run_id,
                reservations=[
                    to_peer_reservation(each, now, self._settings.blocks_max) for each in part if self._is_ours(each)
                ],
                is_snapshot=True,
                is_complete=self._snapshot is None,
            )
        return PeerUpdate(
            sequence=self._sequence,
            # Evaluated first: `_take_ids` depends on what this leaves in `_added`.
            reservations=[to_peer_reservation(each, now, self._settings.blocks_max) for each in self._take_added()],
            prefilled_ids=self._take_ids(self._prefilled),
            settled_ids=self._take_ids(self._settled),
        )

    def _on_change(self) -> None:
        changes = len(self)
        if changes > self._settings.changes_max or self.is_overrun:
            # The next stream starts with a snapshot, so what is left here is never sent.
            self.is_overrun = True
            for each in (self._added, self._new, self._prefilled, self._settled):
                each.clear()
        if changes in (1, self._settings.changes_per_message_max):
            self.on_change()

    def _take_added(self) -> Sequence[Reservation]:
        ids = list(islice(self._added, self._settings.changes_per_message_max))
        self._new.difference_update(ids)
        return [self._added.pop(each) for each in ids]

    def _take_ids(self, ids: dict[str, None]) -> Sequence[str]:
        # A peer must know a reservation before its end.
        if self._added:
            return ()
        taken = list(islice(ids, self._settings.changes_per_message_max))
        for each in taken:
            del ids[each]
        return taken


def _ignore() -> None:
    """Until a stream sets `on_change`."""


def to_peer_reservation(reservation: Reservation, now: float, blocks_max: int) -> PeerReservation:
    """Returns a reservation as peers receive it, with up to `blocks_max` blocks of its prompt.

    Without blocks if the prompt is computed, or lacks less than a block: then the workers' events have named all its blocks.
    """
    prefill, decode, block_hashes = reservation.prefill, reservation.decode, reservation.block_hashes
    if not block_hashes and reservation.uncached_tokens >= reservation.working.block_size_tokens:
        block_hashes = reservation.predicted_hashes
    return PeerReservation(
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
        tenant=reservation.tenant,
        model=reservation.model,
        priority=reservation.priority,
        charged_tokens=round(reservation.charged_tokens),
        block_hashes=block_hashes[:blocks_max],
    )
