"""Carries out the signals of the scheduler's queues on channels to the other engines, and reports what comes back.

Every leg ends in bounded time: a counterpart that does not appear within `handshake_timeout_s` and a transfer that takes longer than
`pull_timeout_s` fail it. A channel that closes fails it immediately. Waiting for blocks and for the prompt is not limited here: the
request's own deadline ends it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvmesh.core import LegTask
from kvmesh.engines.simulated.leg_state import SimulatedLeg
from kvmesh.engines.simulated.pulls import OVERDUE_S, Pulls
from kvmesh.engines.simulated.rendezvous.queues import Signal, SignalKind
from kvmesh.engines.simulated.rendezvous.wire import (
    DONE,
    FAILED,
    OFFER,
    READY,
    Channel,
    ChannelClosed,
    Hello,
    Wire,
)
from kvmesh.engines.simulated.scheduler import Scheduler
from kvmesh.errors import KvLostError

_MESSAGES = {SignalKind.READY: READY, SignalKind.OFFER: OFFER, SignalKind.DONE: DONE}


class Rooms:
    """A room belongs to one leg and lets one counterpart in, once."""

    def __init__(self) -> None:
        self._legs: dict[int, SimulatedLeg] = {}
        self._awaited: dict[int, asyncio.Future[SimulatedLeg]] = {}

    def enter(self, room: int, leg: SimulatedLeg) -> None:
        """Gives the leg to the counterpart that waits for it, or keeps it until one comes."""
        waiting = self._awaited.get(room)
        if waiting is not None and not waiting.done():
            waiting.set_result(leg)
        else:
            self._legs[room] = leg

    def leave(self, room: int, leg: SimulatedLeg) -> None:
        if self._legs.get(room) is leg:
            del self._legs[room]

    async def wait(self, room: int) -> SimulatedLeg:
        """Returns the leg of the room. Waits until it comes."""
        if (leg := self._legs.pop(room, None)) is not None:
            return leg
        future: asyncio.Future[SimulatedLeg] = asyncio.get_running_loop().create_future()
        self._awaited[room] = future
        try:
            return await future
        finally:
            # A later counterpart may wait for the same room.
            if self._awaited.get(room) is future:
                del self._awaited[room]


class RendezvousExchange:
    """One engine's side of all its rendezvous. `on_change` wakes the engine; `pulls` copies the blocks of decode legs."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        wire: Wire,
        pulls: Pulls,
        on_change: Callable[[], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._wire = wire
        self._pulls = pulls
        self._on_change = on_change
        self._on_defect = on_defect
        self._timeout_s = scheduler.settings.handshake_timeout_s
        # Longer than the decode engine takes to give its pull up (`Pulls.start_nowait`).
        self._sent_timeout_s = scheduler.settings.pull_timeout_s + 2 * OVERDUE_S
        self._rooms = Rooms()
        self._channels: dict[SimulatedLeg, Channel] = {}
        self._unsent: dict[SimulatedLeg, list[bytes]] = {}
        """Messages of legs whose channel is not open yet."""
        self._timers: dict[SimulatedLeg, asyncio.TimerHandle] = {}
        self._connecting: dict[SimulatedLeg, asyncio.Task[None]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.address = ""
        """Of the bootstrap server; empty: this engine has none."""

    async def serve(self) -> None:
        """Starts the bootstrap server, for prefill engines."""
        scheduler = self._scheduler
        rank = {"kv_compatibility_hash": scheduler.compatibility_hash, "engine": "simulated"}
        self.address = await self._wire.serve({scheduler.settings.data_parallel_rank: rank}, self._serve_channel)

    def flush_nowait(self) -> None:
        """Carries out all signals."""
        while self._scheduler.signals:
            # Emptied in place, because the queues append to the same list. Carrying signals out may add more.
            signals = list(self._scheduler.signals)
            self._scheduler.signals.clear()
            for signal in signals:
                self._carry_out(signal)

    def _carry_out(self, signal: Signal) -> None:
        leg = signal.leg
        if signal.kind is SignalKind.LEFT:
            self._leave(leg)
        elif signal.kind is not SignalKind.ENTERED:
            self._send(leg, _MESSAGES[signal.kind] + signal.body)
            if signal.kind is SignalKind.DONE:
                self._close(leg)
            elif signal.kind is SignalKind.OFFER:
                self._set_timer(leg, self._sent_timeout_s, "the decode worker did not take the KV in time")
        elif leg.request.task is LegTask.PREFILL:
            self._set_timer(leg, self._timeout_s, "no decode worker came to the rendezvous in time")
            assert leg.request.rendezvous is not None
            self._rooms.enter(leg.request.rendezvous.room, leg)
        else:
            self._connecting[leg] = self._start(self._receive(leg))

    def _send(self, leg: SimulatedLeg, message: bytes) -> None:
        if (channel := self._channels.get(leg)) is not None:
            channel.send_nowait(message)
        else:
            self._unsent.setdefault(leg, []).append(message)

    def _leave(self, leg: SimulatedLeg) -> None:
        assert leg.request.rendezvous is not None
        self._rooms.leave(leg.request.rendezvous.room, leg)
        self._unsent.pop(leg, None)
        if (timer := self._timers.pop(leg, None)) is not None:
            timer.cancel()
        if (task := self._connecting.pop(leg, None)) is not None:
            task.cancel()
        self._close(leg)

    def _close(self, leg: SimulatedLeg) -> None:
        if (channel := self._channels.pop(leg, None)) is not None:
            channel.close_nowait()

    def _set_timer(self, leg: SimulatedLeg, delay_s: float, message: str) -> None:
        if (timer := self._timers.pop(leg, None)) is not None:
            timer.cancel()
        error = KvLostError(message, reason="rendezvous_timeout")
        self._timers[leg] = asyncio.get_running_loop().call_later(delay_s, self._fail, leg, error)

    def _fail(self, leg: SimulatedLeg, error: KvLostError) -> None:
        self._scheduler.fail(leg, error)
        self.flush_nowait()
        self._pulls.settle_nowait()
        self._on_change()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="rendezvous")
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_defect(error)

    # Decode

    async def _receive(self, leg: SimulatedLeg) -> None:
        """Goes to the rendezvous of a decode leg and follows it until its KV can be pulled."""
        try:
            channel = await self._connect(leg)
            message = await channel.receive()
        except ChannelClosed:
            self._fail(leg, KvLostError("the prefill worker left the rendezvous", reason="rendezvous_lost"))
            return
        except TimeoutError:
            self._fail(leg, KvLostError("the prefill worker did not answer in time", reason="rendezvous_timeout"))
            return
        self._connecting.pop(leg, None)
        if not message.startswith(OFFER):
            reason = message[1:].decode(errors="replace") if message.startswith(FAILED) else "unexpected message"
            self._fail(leg, KvLostError(f"the prefill worker refused: {reason}", reason="rendezvous_refused"))
            return
        try:
            order = self._scheduler.decodes.on_offer(leg, message[1:])
        except KvLostError as error:
            self._fail(leg, error)
            return
        if order is not None:
            self._pulls.start_nowait(order)
            self.flush_nowait()

    async def _connect(self, leg: SimulatedLeg) -> Channel:
        """Opens the leg's channel, and sends the messages that waited for it."""
        rendezvous = leg.request.rendezvous
        assert rendezvous is not None
        async with asyncio.timeout(self._timeout_s):
            channel = await self._wire.connect(rendezvous.host, rendezvous.port)
        self._channels[leg] = channel
        # No await until all messages are sent: a message of `_send` would otherwise overtake those that waited.
        hello = Hello(
            room=rendezvous.room,
            rank=rendezvous.prefill_data_parallel_rank or 0,
            compatibility_hash=self._scheduler.compatibility_hash,
        )
        for message in (hello.pack(), *self._unsent.pop(leg, ())):
            channel.send_nowait(message)
        return channel

    # Prefill

    async def _serve_channel(self, channel: Channel) -> None:
        """Follows one decode engine's channel to its end."""
        leg: SimulatedLeg | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                hello = Hello.unpack(await channel.receive())
                refusal = self._refusal(hello)
                if hello is not None and not refusal:
                    leg = await self._rooms.wait(hello.room)
            if leg is None:
                channel.send_nowait(FAILED + refusal.encode())
                return
            await self._follow(channel, leg)
        except TimeoutError:
            channel.send_nowait(FAILED + b"no prefill leg came to the room in time")
        except ChannelClosed:
            if leg is not None and self._channels.get(leg) is channel:
                self._fail(leg, KvLostError("the decode worker left the rendezvous", reason="rendezvous_lost"))
        finally:
            channel.close_nowait()

    def _refusal(self, hello: Hello | None) -> str:
        """Returns why a decode engine gets no KV; empty: it may get it."""
        if hello is None:
            return "the first message is not a hello"
        if hello.compatibility_hash != self._scheduler.compatibility_hash:
            return "the engines' KV is not compatible"
        own = self._scheduler.settings.data_parallel_rank
        return "" if hello.rank == own else f"this is rank {own}, not {hello.rank}"

    async def _follow(self, channel: Channel, leg: SimulatedLeg) -> None:
        if leg.is_over:
            # The leg may have ended between its entry and this counterpart's arrival.
            channel.send_nowait(FAILED + b"the prefill leg ended")
            return
        self._channels[leg] = channel
        if (timer := self._timers.pop(leg, None)) is not None:
            timer.cancel()
        while not leg.is_over:
            message = await channel.receive()
            if message.startswith(READY):
                self._scheduler.prefills.on_ready(leg)
            elif message.startswith(DONE):
                self._scheduler.on_sent(leg)
                self.flush_nowait()
            self._on_change()

    def close_nowait(self) -> None:
        """Closes all channels, so that the other engines notice immediately."""
        for channel in list(self._channels.values()):
            channel.close_nowait()
        for timer in self._timers.values():
            timer.cancel()

    async def aclose(self) -> None:
        """Ends all tasks and the wire. Idempotent."""
        self.close_nowait()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._wire.aclose()
