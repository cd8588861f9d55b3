"""Runs the scheduler's pull orders on the transport, one task each."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kvmesh.clock import Clock
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.engines.simulated.step import PullOrder
from kvmesh.errors import KvLostError, MeshError
from kvmesh.kv.path_causes import Failure
from kvmesh.kv.paths import Pull
from kvmesh.kv.transport import KvTransport

RELEASED = b"release:"
"""Prefix of a message to a source. The ids of released handles follow, separated by spaces."""
OVERDUE_S = 0.25
"""How long a pull may take to stop after its timeout. A transport cannot stop a pull from a suspended peer."""
CLOSE_S = 1.0
"""Longest wait for pulls to stop when the engine closes. The transport keeps the memory of pulls that do not stop."""
NOTICE_S = 1.0
"""Longest wait for release messages to be sent when the engine closes."""
NOTICE_INTERVAL_S = 0.02
"""Releases are collected for this time. Sources poll for messages at the same interval."""


class Pulls:
    """Runs pull orders, and notifies sources when their blocks are no longer needed."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        transport: KvTransport,
        clock: Clock,
        on_change: Callable[[], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._transport = transport
        self._clock = clock
        self._paths = scheduler.paths
        self._on_change = on_change
        self._on_defect = on_defect
        self._pulls: dict[SimulatedLeg, asyncio.Future[None]] = {}
        self._begun: dict[SimulatedLeg, Pull] = {}
        """Pulls whose end was not reported to the paths yet."""
        self._blocks: dict[SimulatedLeg, Sequence[int]] = {}
        """What pulls may write to, until their end was reported to the scheduler."""
        self._overdue: dict[SimulatedLeg, bytes] = {}
        """Pulls that are past their timeout and may still write, with their peers."""
        self._notices: set[asyncio.Task[None]] = set()
        self._released: dict[bytes, list[str]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Transfers that may still write, including those of cancelled legs."""
        return len(self._pulls)

    def blocks(self) -> Iterable[Sequence[int]]:
        """Returns the blocks of each transfer."""
        return self._blocks.values()

    def start_nowait(self, order: PullOrder) -> None:
        """Starts a pull. Its end is reported to the scheduler, possibly before this returns.

        Fails immediately while the path from the source fails, or while an earlier pull from the peer is overdue: another pull would only
        block more memory.
        """
        size, blocks = self._scheduler.settings.kv_bytes_per_block, len(order.payload) - order.first
        # Until this engine's own transport has started, the time of a pull says nothing about the path.
        is_started = self._scheduler.peer is not None
        limit_s = self._scheduler.settings.pull_timeout_s
        # The source of a rendezvous is known by its address only, and its router gets a report of the failed leg anyway.
        if (handle := order.leg.request.handle) is not None:
            pull = self._paths.begin(handle, self._clock.now(), size_bytes=blocks * size)
            if pull is None:
                self._end(order, KvLostError("the KV path from the source fails", reason="kv_path_failing"))
                return
            self._begun[order.leg] = pull
            limit_s = pull.limit_s if is_started else limit_s
        if order.payload.peer in self._overdue.values():
            self._end(order, KvLostError("an earlier pull from the peer has not ended", reason="kv_peer_overdue"))
            return
        pieces = [(theirs * size, mine * size, count * size) for theirs, count, mine in order.runs()]
        try:
            rest = self._transport.pull_nowait(order.payload.peer, pieces, timeout_s=limit_s)
        except MeshError as failure:
            self._end(order, KvLostError(failure.message, reason=failure.reason))
            return
        if rest is None:
            self._end(order, None)
            return
        self._pulls[order.leg] = task = asyncio.ensure_future(rest)
        self._blocks[order.leg] = order.blocks
        overdue = asyncio.get_running_loop().call_later(limit_s + OVERDUE_S, self._on_overdue, order, limit_s)

        def on_done(_: asyncio.Future[None]) -> None:
            overdue.cancel()
            self._on_done(order, is_typical=is_started)

        task.add_done_callback(on_done)

    def settle_nowait(self) -> None:
        """Stops the pulls of cancelled legs and queues releases."""
        aborted, self._scheduler.aborted_pulls = self._scheduler.aborted_pulls, []
        for leg in aborted:
            if leg in self._pulls:
                self._pulls[leg].cancel()
        releases, self._scheduler.releases = self._scheduler.releases, []
        for peer, handle_id in releases:
            self._notify(peer, handle_id)

    def _on_overdue(self, order: PullOrder, limit_s: float) -> None:
        self._overdue[order.leg] = order.payload.peer
        self._report(order, KvLostError(f"a pull did not end within {limit_s:.1f} s", reason="kv_pull_timeout"))
        self._scheduler.pull_overdue(order)
        self.settle_nowait()
        self._on_change()

    def _on_done(self, order: PullOrder, *, is_typical: bool) -> None:
        task = self._pulls.pop(order.leg)
        self._blocks.pop(order.leg)
        self._overdue.pop(order.leg, None)
        error: KvLostError | None = None
        if task.cancelled():
            error = KvLostError("the pull was stopped", reason="kv_pull_cancelled")
        elif (failure := task.exception()) is not None:
            if not isinstance(failure, MeshError):
                # The transfer may still write, so its blocks cannot be freed. An exception raised here would only be logged, and the
                # request would wait until its deadline.
                self._on_defect(failure)
                return
            error = KvLostError(failure.message, reason=failure.reason)
        self._end(order, error, is_typical=is_typical)

    def _end(self, order: PullOrder, error: KvLostError | None, *, is_typical: bool = True) -> None:
        self._report(order, error, is_typical=is_typical)
        if self._scheduler.pull_ended(order, error):
            self._notify(order.payload.peer, order.handle_id)
        self._on_change()

    def _report(self, order: PullOrder, error: KvLostError | None, *, is_typical: bool = True) -> None:
        """Reports the end of a pull to the paths, once."""
        pull = self._begun.pop(order.leg, None)
        if pull is None:
            return
        now_s = self._clock.now()
        if error is None:
            self._paths.succeeded(pull, now_s, is_typical=is_typical)
        else:
            failure = Failure(reason=error.reason, message=error.message, peer=order.payload.peer)
            self._paths.failed(pull, failure, now_s=now_s, wall_s=self._clock.wall())

    def _notify(self, peer: bytes, handle_id: str) -> None:
        self._released.setdefault(peer, []).append(handle_id)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._send_releases)

    def _send_releases(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Taken before the tasks run: releases that are queued from now on need a new timer.
        released, self._released, self._timer = self._released, {}, None
        for peer, handle_ids in released.items():
            message = RELEASED + " ".join(handle_ids).encode()
            task = asyncio.create_task(self._transport.notify(peer, message=message), name="kv-notice")
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    async def aclose(self) -> None:
        """Stops all pulls and sends queued releases."""
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        self._send_releases()
        if self._notices:
            _, late = await asyncio.wait(self._notices, timeout=NOTICE_S)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._notices, return_exceptions=True)
        if pulls:
            # `wait` returns at its timeout even if a transfer does not stop.
            await asyncio.wait(pulls, timeout=CLOSE_S)
