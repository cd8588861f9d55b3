"""Step frames of one Attach stream on their way out, built directly from the engine's lists.

Steps that come faster than the stream takes them travel together in one frame: a message costs more than the tokens in it,
on both sides and most of all in the frontend, which then also writes a client's tokens in one chunk.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kvmesh.api.decode.v1 import decode_pb2 as pb
from kvmesh.core import TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.errors import MeshError, OverloadedError
from kvmesh.rpc.clients import LegFinish
from kvmesh.rpc.codec.legs import to_finish
from kvmesh.rpc.codec.types import to_logprobs
from kvmesh.worker.slots import LinkStep, key_of
from kvmesh.worker.worker import Link

log = logging.getLogger(__name__)

Write = Callable[[pb.AttachResponse], Coroutine[Any, Any, None]]

STEPS_PER_FRAME_MAX = 64
"""Bounds a frame: the client of a stalled stream gets its tokens in pieces of at most this many steps."""


Waiting = tuple[int, LinkStep, pb.AttachResponse | None]
"""One step that has not been sent: its number and plain arrays, or a message where there is more to say than they can."""


class FrameOutlet:
    """At most `steps_max` steps wait, in order. A step is written in the turn in which it comes, unless another one is on its way.

    A frontend that lags further behind is cut off at once: its legs are cancelled and no step is taken for it any more. It
    hears of it when it reads again; until then gRPC can tell it nothing.
    """

    def __init__(self, steps_max: int, frontend_id: str = "") -> None:
        self.frontend_id = frontend_id
        self.link: Link | None = None
        self.waiting: deque[Waiting] = deque()
        self._steps_max = steps_max
        self._writer: _Writer | None = None
        self.error: MeshError | None = None
        self.is_closed = False

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """One step's share of this stream."""
        if logprobs or share.prompt_logprobs:
            self._put(step, share, self._with_logprobs(_response(step, [share]), share, logprobs))
        else:
            self._put(step, share, None)

    def _with_logprobs(
        self, response: pb.AttachResponse, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]
    ) -> pb.AttachResponse:
        assert self.link is not None
        frame = response.frame
        for slot, prompt in share.prompt_logprobs.items():
            frame.prompt_logprobs.add(slot=slot, logprobs=to_logprobs(prompt))
        for slot in share.slots:
            entries = logprobs.get(key_of(self.link.number, slot))
            if entries is not None:
                frame.logprobs.add(slot=slot, logprobs=to_logprobs(entries))
        return response

    def on_lost(self, error: MeshError) -> None:
        """Ends the stream with the engine's failure."""
        self.fail_nowait(error)

    def put_nowait(self, frame: pb.StepFrame) -> None:
        """Queues a frame as it is."""
        self._put(frame.step, LinkStep(), pb.AttachResponse(frame=frame))

    def _put(self, step: int, share: LinkStep, response: pb.AttachResponse | None) -> None:
        if self.error is not None:
            # A step after one that was left out would be a gap in somebody's tokens.
            return
        if len(self.waiting) >= self._steps_max:
            self._cut_off()
            return
        self.waiting.append((step, share, response))
        if self._writer is not None:
            self._writer.go_on()

    def _cut_off(self) -> None:
        log.warning("link_stalled", extra={"data": {"frontend": self.frontend_id, "steps": len(self.waiting)}})
        self.fail_nowait(OverloadedError("the frontend does not read its frames", reason="link_stalled"))
        if self.link is not None:
            # The handler may be waiting for the frontend to read, and cannot do this then.
            self.link.close_nowait()

    def fail_nowait(self, error: MeshError) -> None:
        """Ends the stream after what is queued."""
        self.error = self.error or error
        self._end_writer()

    def close_nowait(self) -> None:
        """Ends the stream well after what is queued."""
        self.is_closed = True
        self._end_writer()

    def _end_writer(self) -> None:
        """Lets it see that nothing will come after what waits."""
        if self._writer is not None:
            self._writer.go_on()

    def take(self) -> pb.AttachResponse:
        """The next message: as many plain steps as wait, or one that is a message already."""
        waiting = self.waiting
        step, share, response = waiting.popleft()
        if response is not None:
            return response
        shares = [share]
        while waiting and waiting[0][2] is None and len(shares) < STEPS_PER_FRAME_MAX:
            step, share, _ = waiting.popleft()
            shares.append(share)
        return _response(step, shares)

    async def write(self, write: Write, heartbeat_s: float, interval_s: float = 0.0) -> None:
        """Writes frames as they come, but `interval_s` apart, and an empty one after each `heartbeat_s` of silence.

        A step that comes after a longer pause than the interval, as all of an engine that is slower, does not wait.
        """
        self._writer = writer = _Writer(self, write, heartbeat_s, interval_s)
        try:
            writer.go_on()
            await writer.over
        finally:
            self._writer = None
            writer.end()
        if self.error is not None:
            raise self.error


class _Writer:
    """One write at a time. Whatever happens calls `go_on`; `over` is done when all is written, or with a write's failure.

    A write begins in the turn in which its step is made and has no task: after some milliseconds in which others had the
    processor, every function and turn on the way finds its code in no cache and costs some microseconds.
    """

    def __init__(self, outlet: FrameOutlet, write: Write, heartbeat_s: float, interval_s: float) -> None:
        self._outlet = outlet
        self._write = write
        self._heartbeat_s = heartbeat_s
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._writing: Coroutine[Any, Any, None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._wrote_at_s = self._loop.time()
        self._pulse = self._loop.call_later(heartbeat_s, self._look)

    def go_on(self) -> None:
        """Begins what is due."""
        outlet = self._outlet
        while self._writing is None and self._pause is None and not self.over.done():
            if not outlet.waiting:
                if outlet.is_closed or outlet.error is not None:
                    self.over.set_result(None)
                return
            now_s = self._loop.time()
            if (left_s := self._wrote_at_s + self._interval_s - now_s) > 0:
                self._pause = self._loop.call_later(left_s, self._after_pause)
                return
            self._wrote_at_s = now_s
            self._writing = self._write(outlet.take())
            self._advance()

    def _advance(self) -> None:
        """Lets the write go on to where it waits, as a task would."""
        assert self._writing is not None
        try:
            future = self._writing.send(None)
        except StopIteration:
            self._writing = None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # Raised again where `over` is waited for.
            self._writing = None
            if not self.over.done():
                self.over.set_exception(error)
        else:
            self._wait(future)

    def _wait(self, future: Any) -> None:
        """As a task waits; None is what `asyncio.sleep(0)` gives."""
        if future is None:
            self._loop.call_soon(self._resume, None)
            return
        future._asyncio_future_blocking = False
        future.add_done_callback(self._resume)

    def _resume(self, _: object) -> None:
        self._advance()
        self.go_on()

    def _after_pause(self) -> None:
        self._pause = None
        self.go_on()

    def _look(self) -> None:
        """Whether there has been silence for long. One timer per heartbeat, not one per frame."""
        left_s = self._wrote_at_s + self._heartbeat_s - self._loop.time()
        if left_s <= 0:
            if self._writing is None and not self.over.done():
                self._wrote_at_s = self._loop.time()
                self._writing = self._write(pb.AttachResponse(frame=pb.StepFrame()))
                self._advance()
            left_s = self._heartbeat_s
        self._pulse = self._loop.call_later(left_s, self._look)

    def end(self) -> None:
        """No more."""
        if not self.over.cancel() and not self.over.cancelled():
            self.over.exception()  # Marks it as seen when nobody waited any more.
        self._pulse.cancel()
        if self._pause is not None:
            self._pause.cancel()


def _response(step: int, shares: Sequence[LinkStep]) -> pb.AttachResponse:
    """One frame for steps that follow each other. A slot ends at most once in them: it is free for another request only
    when the frontend has heard of its end."""
    response, share = pb.AttachResponse(), shares[0]
    frame = response.frame
    frame.step = step
    slots, token_ids, counts = _merged(shares) if len(shares) > 1 else (share.slots, share.token_ids, share.counts)
    frame.slots.extend(slots)
    frame.token_ids.extend(token_ids)
    if counts is not None:
        frame.counts.extend(counts)
    for each in shares:
        for finish in each.finishes:
            frame.finishes.append(engine_finish_to_pb(finish))
    return response


def _merged(shares: Sequence[LinkStep]) -> tuple[list[int], list[int], list[int]]:
    tokens: dict[int, list[int]] = {}
    for share in shares:
        start = 0
        for slot, count in zip(share.slots, share.counts or [1] * len(share.slots), strict=True):
            tokens.setdefault(slot, []).extend(share.token_ids[start : start + count])
            start += count
    token_ids = [token_id for ids in tokens.values() for token_id in ids]
    return list(tokens), token_ids, [len(ids) for ids in tokens.values()]


def engine_finish_to_pb(finish: EngineFinish, slot: int | None = None) -> pb.Finish:
    """A finish on its own slot."""
    leg_finish = LegFinish(
        reason=finish.reason,
        usage=finish.usage,
        stop_token_id=finish.stop_token_id,
        error=finish.error,
        was_recomputed=finish.was_recomputed,
    )
    return to_finish(finish.key & 0xFFFFFFFF if slot is None else slot, leg_finish)
