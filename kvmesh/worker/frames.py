"""Builds the step frames of one Attach stream from the engine's lists and writes them.

Steps that come faster than the stream takes them share a frame. A message costs both sides more than the tokens in it. The frontend
gains most, since it then writes a client's tokens in one chunk.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.core import FinishReason, LegFinish, TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.errors import MeshError, OverloadedError
from kvmesh.event_log import event_logger
from kvmesh.rpc.codec.legs import to_finish
from kvmesh.rpc.codec.types import to_logprobs
from kvmesh.worker.slots import SLOT_MASK, LinkStep, key_of
from kvmesh.worker.worker import CallerLink, Worker

_log = event_logger(__name__)

Write = Callable[[pb.AttachResponse], Coroutine[Any, Any, None]]

FRAME_INTERVAL_S = 0.002
"""Least time between two frames of a stream. Steps that come faster share one, which costs both sides less."""
STEPS_PER_FRAME_MAX = 64
"""Bounds a frame: the client of a stalled stream gets its tokens in pieces of at most this many steps."""
RESULTS_PER_FRAME_MAX = 32
"""Handles and embeddings in one frame. A handle's payload has up to 1 MiB, and gRPC's limit is 64 MiB per message."""


class _WaitingStep(NamedTuple):
    """A step that was not sent yet. A step with log-probabilities has its message already and shares no frame, since those of a
    prompt are as long as the prompt."""

    step: int
    share: LinkStep
    message: pb.AttachResponse | None


class FrameOutlet:
    """The worker's outlet to one frontend. At most `steps_max` steps wait, in order.

    1. A frontend that lags further behind is disconnected: its legs are cancelled and later steps are dropped, since a step after
       a dropped one would leave a gap in a leg's tokens. The frontend receives the error when it reads again.
    2. A handle that is not written to the stream is released.
    """

    def __init__(self, worker: Worker, frontend_id: str, *, steps_max: int, legs_max: int) -> None:
        self._worker = worker
        self._frontend_id = frontend_id
        self._steps_max = steps_max
        self._waiting: deque[_WaitingStep] = deque()
        self._wakeup = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._error: MeshError | None = None
        self._is_closed = False
        self.link: CallerLink = worker.open_link(self, legs_max)

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """Queues one step's tokens and finishes for this stream."""
        if logprobs or share.prompt_logprobs:
            message = self._message(step, [share])
            self._add_logprobs(message.frame, share, logprobs)
            self._put(_WaitingStep(step, share, message))
        else:
            self._put(_WaitingStep(step, share, None))

    def refuse_nowait(self, slot: int, error: MeshError) -> None:
        """Ends a leg that was not accepted."""
        finish = EngineFinish(key=slot, reason=FinishReason.ERROR, error=error)
        self._put(_WaitingStep(0, LinkStep(finishes=[finish]), None))

    def on_lost(self, error: MeshError) -> None:
        """Ends the stream with the engine's failure."""
        self.fail_nowait(error)

    def fail_nowait(self, error: MeshError) -> None:
        """Ends the stream with `error` once everything that waits is written."""
        self._error = self._error or error
        self._wakeup.set()

    def end_nowait(self) -> None:
        """Ends the stream with OK once everything that waits is written."""
        self._is_closed = True
        self._wakeup.set()

    def close_nowait(self) -> None:
        """Cancels the stream's legs and releases handles that were not written. Idempotent."""
        self.link.close_nowait()
        while self._waiting:
            self._release_handles(self._waiting.popleft().share)

    async def write_frames(self, write: Write, *, heartbeat_s: float, interval_s: float = FRAME_INTERVAL_S) -> None:
        """Writes frames as steps come, at least `interval_s` apart, and an empty one after each `heartbeat_s` of silence.

        While the engine's process is silent there are no empty ones, so that the frontend places its requests elsewhere.
        Returns after `end_nowait`; raises the error of `fail_nowait`. A step after a longer pause than the interval, as every
        step of a slower engine is, is not delayed.
        """
        loop = asyncio.get_running_loop()
        wrote_at_s = loop.time()
        try:
            while True:
                now_s = loop.time()
                if self._waiting:
                    if (early_s := wrote_at_s + interval_s - now_s) > 0:
                        await asyncio.sleep(early_s)
                    else:
                        wrote_at_s = now_s
                        await write(self.take_frame())
                elif self._error is not None:
                    raise self._error
                elif self._is_closed:
                    return
                elif now_s >= wrote_at_s + heartbeat_s:
                    wrote_at_s = now_s
                    if self._worker.engine.is_responsive:
                        await write(pb.AttachResponse(frame=pb.StepFrame()))
                else:
                    # No await between the checks above and the wait, so no wake-up is lost.
                    self._wakeup.clear()
                    if self._timer is None:
                        # One timer for each heartbeat, not for each frame.
                        self._timer = loop.call_at(wrote_at_s + heartbeat_s, self._on_timer)
                    await self._wakeup.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        # Frames written meanwhile postpone the heartbeat: the loop then sets the timer again.
        self._wakeup.set()

    def take_frame(self) -> pb.AttachResponse:
        """Returns the next message: as many steps as may share a frame, or one that is a message already."""
        waiting = self._waiting
        step, share, message = waiting.popleft()
        if message is not None:
            return message
        shares, results = [share], _count_results(share)
        while waiting and len(shares) < STEPS_PER_FRAME_MAX:
            following = waiting[0]
            results += _count_results(following.share)
            if following.message is not None or results > RESULTS_PER_FRAME_MAX:
                break
            waiting.popleft()
            # A refusal has the step 0.
            step = max(step, following.step)
            shares.append(following.share)
        return self._message(step, shares)

    def _put(self, waiting: _WaitingStep) -> None:
        if self._error is None and len(self._waiting) >= self._steps_max:
            _log.warning("link_stalled", frontend_id=self._frontend_id, steps=len(self._waiting))
            self.fail_nowait(OverloadedError("the frontend does not read its frames", reason="link_stalled"))
            # The stream's handler may wait for the frontend to read, and cannot close the link then.
            self.link.close_nowait()
        if self._error is not None:
            self._release_handles(waiting.share)
            return
        for part in _split_results(waiting):
            self._waiting.append(part)
        self._wakeup.set()

    def _release_handles(self, share: LinkStep) -> None:
        for finish in share.finishes:
            if finish.handle is not None:
                self._worker.release_nowait(finish.handle.handle_id)

    def _add_logprobs(
        self, frame: pb.StepFrame, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]
    ) -> None:
        for slot, prompt in share.prompt_logprobs.items():
            frame.prompt_logprobs.add(slot=slot, logprobs=to_logprobs(prompt))
        for slot in share.slots:
            entries = logprobs.get(key_of(self.link.number, slot=slot))
            if entries is not None:
                frame.logprobs.add(slot=slot, logprobs=to_logprobs(entries))

    def _message(self, step: int, shares: Sequence[LinkStep]) -> pb.AttachResponse:
        """Returns one frame for steps that follow each other. A slot ends at most once in them: it is free for another leg only
        after the frontend has received its finish."""
        response, share = pb.AttachResponse(), shares[0]
        frame = response.frame
        frame.step = step
        slots, token_ids, counts = _merge(shares) if len(shares) > 1 else (share.slots, share.token_ids, share.counts)
        frame.slots.extend(slots)
        frame.token_ids.extend(token_ids)
        if counts is not None:
            frame.counts.extend(counts)
        for each in shares:
            for finish in each.finishes:
                lease_s = self._worker.lease_left_s(finish.handle)
                frame.finishes.append(to_finish(finish.key & SLOT_MASK, finish, lease_s=lease_s))
        return response


def _count_results(share: LinkStep) -> int:
    return sum(1 for finish in share.finishes if _has_result(finish))


def _has_result(finish: LegFinish) -> bool:
    return finish.handle is not None or finish.embedding is not None


def _split_results(waiting: _WaitingStep) -> Sequence[_WaitingStep]:
    """Splits a step with too many handles or embeddings into parts that each fit a frame."""
    share = waiting.share
    if len(share.finishes) <= RESULTS_PER_FRAME_MAX or waiting.message is not None:
        return (waiting,)
    first, *others = (
        share.finishes[start : start + RESULTS_PER_FRAME_MAX]
        for start in range(0, len(share.finishes), RESULTS_PER_FRAME_MAX)
    )
    share.finishes = first
    return (waiting, *(_WaitingStep(waiting.step, LinkStep(finishes=finishes), None) for finishes in others))


def _merge(shares: Sequence[LinkStep]) -> tuple[list[int], list[int], list[int]]:
    tokens: dict[int, list[int]] = {}
    for share in shares:
        start = 0
        # All tokens of a slot become one entry, since counts belong to slots.
        for slot, count in zip(share.slots, share.counts or [1] * len(share.slots), strict=True):
            tokens.setdefault(slot, []).extend(share.token_ids[start : start + count])
            start += count
    token_ids = [token_id for ids in tokens.values() for token_id in ids]
    return list(tokens), token_ids, [len(ids) for ids in tokens.values()]
