"""Step frames of one Attach stream on their way out, built directly from the engine's lists.

Steps that come faster than the stream takes them travel together in one frame: a message costs more than the tokens in it,
on both sides and most of all in the frontend, which then also writes a client's tokens in one chunk.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

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

STEPS_PER_FRAME_MAX = 64
"""Bounds a frame: the client of a stalled stream gets its tokens in pieces of at most this many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """One step that has not been sent: plain arrays, or a frame where there is more to say than they can."""

    step: int
    share: LinkStep
    frame: pb.StepFrame | None = None


class FrameOutlet:
    """At most `steps_max` steps wait, in order.

    A frontend that lags further behind is cut off at once: its legs are cancelled and no step is taken for it any more. It
    hears of it when it reads again; until then gRPC can tell it nothing.
    """

    def __init__(self, steps_max: int, frontend_id: str = "") -> None:
        self.frontend_id = frontend_id
        self.link: Link | None = None
        self._waiting: deque[_Waiting] = deque()
        self._steps_max = steps_max
        self._wakeup = asyncio.Event()
        self.error: MeshError | None = None
        self.is_closed = False

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """One step's share of this stream."""
        has_more = bool(logprobs or share.prompt_logprobs)
        frame = self._with_logprobs(_frame(step, [share]), share, logprobs) if has_more else None
        self._put(_Waiting(step=step, share=share, frame=frame))

    def _with_logprobs(
        self, frame: pb.StepFrame, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]
    ) -> pb.StepFrame:
        assert self.link is not None
        for slot, prompt in share.prompt_logprobs.items():
            frame.prompt_logprobs.add(slot=slot, logprobs=to_logprobs(prompt))
        for slot in share.slots:
            entries = logprobs.get(key_of(self.link.number, slot))
            if entries is not None:
                frame.logprobs.add(slot=slot, logprobs=to_logprobs(entries))
        return frame

    def on_lost(self, error: MeshError) -> None:
        """Ends the stream with the engine's failure."""
        self.fail_nowait(error)

    def put_nowait(self, frame: pb.StepFrame) -> None:
        """Queues a frame as it is."""
        self._put(_Waiting(step=frame.step, share=LinkStep(), frame=frame))

    def _put(self, waiting: _Waiting) -> None:
        if self.error is not None:
            # A step after one that was left out would be a gap in somebody's tokens.
            return
        if len(self._waiting) >= self._steps_max:
            self._cut_off()
            return
        self._waiting.append(waiting)
        self._wakeup.set()

    def _cut_off(self) -> None:
        log.warning("link_stalled", extra={"data": {"frontend": self.frontend_id, "steps": len(self._waiting)}})
        self.fail_nowait(OverloadedError("the frontend does not read its frames", reason="link_stalled"))
        if self.link is not None:
            # The handler may be waiting for the frontend to read, and cannot do this then.
            self.link.close_nowait()

    def fail_nowait(self, error: MeshError) -> None:
        """Ends the stream after what is queued."""
        self.error = self.error or error
        self._wakeup.set()

    def close_nowait(self) -> None:
        """Ends the stream well after what is queued."""
        self.is_closed = True
        self._wakeup.set()

    def _take(self) -> pb.StepFrame:
        """The next frame: as many plain steps as wait, or one that is a frame already."""
        waiting = self._waiting
        first = waiting.popleft()
        if first.frame is not None:
            return first.frame
        step, shares = first.step, [first.share]
        while waiting and waiting[0].frame is None and len(shares) < STEPS_PER_FRAME_MAX:
            following = waiting.popleft()
            step = following.step
            shares.append(following.share)
        return _frame(step, shares)

    async def frames(self, heartbeat_s: float, interval_s: float = 0.0) -> AsyncIterator[pb.AttachResponse]:
        """Frames as they come, but `interval_s` apart, and an empty one after each `heartbeat_s` of silence.

        A step that comes after a longer pause than the interval, as all of an engine that is slower, does not wait.
        """
        loop = asyncio.get_running_loop()
        pulse = _Pulse(heartbeat_s, self._wakeup)
        began_s = float("-inf")
        try:
            while True:
                if self._waiting:
                    if (left_s := began_s + interval_s - loop.time()) > 0:
                        await asyncio.sleep(left_s)
                    began_s = pulse.heard_at_s = loop.time()
                    yield pb.AttachResponse(frame=self._take())
                    continue
                if self.error is not None:
                    raise self.error
                if self.is_closed:
                    return
                self._wakeup.clear()
                await self._wakeup.wait()
                if pulse.is_due:
                    pulse.is_due = False
                    yield pb.AttachResponse(frame=pb.StepFrame())
        finally:
            pulse.end()


class _Pulse:
    """Wakes the writer of a stream after each `interval_s` of silence. One timer per interval, not one per frame."""

    def __init__(self, interval_s: float, wakeup: asyncio.Event) -> None:
        self._interval_s = interval_s
        self._wakeup = wakeup
        self._loop = asyncio.get_running_loop()
        self.heard_at_s = self._loop.time()
        self.is_due = False
        self._timer = self._loop.call_later(interval_s, self._look)

    def _look(self) -> None:
        left_s = self.heard_at_s + self._interval_s - self._loop.time()
        if left_s <= 0:
            self.heard_at_s = self._loop.time()
            self.is_due = True
            self._wakeup.set()
            left_s = self._interval_s
        self._timer = self._loop.call_later(left_s, self._look)

    def end(self) -> None:
        """No more."""
        self._timer.cancel()


def _frame(step: int, shares: Sequence[LinkStep]) -> pb.StepFrame:
    """One frame for steps that follow each other. A slot ends at most once in them: it is free for another request only
    when the frontend has heard of its end."""
    if len(shares) == 1:
        share = shares[0]
        frame = pb.StepFrame(step=step, slots=share.slots, token_ids=share.token_ids, counts=share.counts)
    else:
        frame = _merged(step, shares)
    for share in shares:
        for finish in share.finishes:
            frame.finishes.append(engine_finish_to_pb(finish))
    return frame


def _merged(step: int, shares: Sequence[LinkStep]) -> pb.StepFrame:
    tokens: dict[int, list[int]] = {}
    for share in shares:
        start = 0
        for slot, count in zip(share.slots, share.counts or [1] * len(share.slots), strict=True):
            tokens.setdefault(slot, []).extend(share.token_ids[start : start + count])
            start += count
    return pb.StepFrame(
        step=step,
        slots=list(tokens),
        counts=[len(ids) for ids in tokens.values()],
        token_ids=[token_id for ids in tokens.values() for token_id in ids],
    )


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
