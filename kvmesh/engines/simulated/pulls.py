"""Pulls in progress: one task each, between the scheduler's orders and the transport."""

import asyncio
from collections.abc import Callable

from kvmesh.engines.simulated.leg_state import LegState
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.step import PullOrder
from kvmesh.errors import KvLostError, MeshError
from kvmesh.kv.transport import KvTransport

RELEASED = b"release:"
"""Prefix of a message to a source. The ids of handles that will not be pulled follow, separated by spaces."""
OVERDUE_S = 0.25
"""How long after its time-out a pull may take to stop. A transport cannot stop one from a peer that stands still."""
CLOSE_S = 1.0
"""Longest wait for pulls to stop when the engine closes. The transport keeps the memory of those that do not."""
NOTICE_S = 1.0
NOTICE_INTERVAL_S = 0.02
"""Releases of this time travel together. A source looks for messages as seldom."""


class Pulls:
    """Runs pull orders; tells sources when their blocks are no longer needed."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        transport: KvTransport,
        timeout_s: float,
        on_change: Callable[[], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._on_defect = on_defect
        self._pulls: dict[LegState, asyncio.Future[None]] = {}
        self._overdue: dict[LegState, bytes] = {}
        """Peers of the pulls that should have ended and may still write."""
        self._notices: set[asyncio.Task[None]] = set()
        self._released: dict[bytes, list[str]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start_nowait(self, order: PullOrder) -> None:
        """Begins a pull and reports its end to the scheduler, which may be at once.

        Fails while an earlier pull from the peer is overdue: another one would only take more blocks out of use.
        """
        if order.payload.peer in self._overdue.values():
            self._end(order, KvLostError("an earlier pull from the peer has not ended", reason="kv_peer_overdue"))
            return
        size = self._scheduler.settings.kv_bytes_per_block
        pieces = [(theirs * size, mine * size, count * size) for theirs, count, mine in order.runs()]
        try:
            rest = self._transport.pull_nowait(order.payload.peer, pieces, timeout_s=self._timeout_s)
        except MeshError as failure:
            self._end(order, KvLostError(failure.message, reason=failure.reason))
            return
        if rest is None:
            self._end(order, None)
            return
        self._pulls[order.leg] = task = asyncio.ensure_future(rest)
        overdue = asyncio.get_running_loop().call_later(self._timeout_s + OVERDUE_S, self._on_overdue, order)

        def on_done(_: asyncio.Future[None]) -> None:
            overdue.cancel()
            self._on_done(order)

        task.add_done_callback(on_done)

    def settle_nowait(self) -> None:
        """Stops the pulls of cancelled legs and sends the releases that are due."""
        aborted, self._scheduler.aborted_pulls = self._scheduler.aborted_pulls, []
        for leg in aborted:
            if leg in self._pulls:
                self._pulls[leg].cancel()
        releases, self._scheduler.releases = self._scheduler.releases, []
        for peer, handle_id in releases:
            self._notify(peer, handle_id)

    def _on_overdue(self, order: PullOrder) -> None:
        self._overdue[order.leg] = order.payload.peer
        self._scheduler.pull_overdue(order)
        self.settle_nowait()
        self._on_change()

    def _on_done(self, order: PullOrder) -> None:
        task = self._pulls.pop(order.leg)
        self._overdue.pop(order.leg, None)
        error: KvLostError | None = None
        if task.cancelled():
            error = KvLostError("the pull was stopped", reason="kv_pull_cancelled")
        elif (failure := task.exception()) is not None:
            if not isinstance(failure, MeshError):
                # Nobody knows whether the transfer still writes, so its blocks cannot be freed. An exception raised here
                # would only be logged, and the request would wait to its deadline.
                self._on_defect(failure)
                return
            error = KvLostError(failure.message, reason=failure.reason)
        self._end(order, error)

    def _end(self, order: PullOrder, error: KvLostError | None) -> None:
        if self._scheduler.pull_ended(order, error):
            self._notify(order.payload.peer, order.handle_id)
        self._on_change()

    def _notify(self, peer: bytes, handle_id: str) -> None:
        self._released.setdefault(peer, []).append(handle_id)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._tell_released)

    def _tell_released(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        released, self._released, self._timer = self._released, {}, None
        for peer, handle_ids in released.items():
            message = RELEASED + " ".join(handle_ids).encode()
            task = asyncio.create_task(self._transport.notify(peer, message), name="kv-notice")
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    async def aclose(self) -> None:
        """Stops all pulls; notices have a moment to get out."""
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        self._tell_released()
        if self._notices:
            _, late = await asyncio.wait(self._notices, timeout=NOTICE_S)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._notices, return_exceptions=True)
        if pulls:
            await asyncio.wait(pulls, timeout=CLOSE_S)
