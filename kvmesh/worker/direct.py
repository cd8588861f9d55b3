"""One request at a time, for unary calls and plain streams: a link whose slots are numbered here."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvmesh.core import FinishReason, TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.errors import LostError, MeshError
from kvmesh.worker.slots import SLOT_MASK, SLOTS_MAX, LinkStep, key_of
from kvmesh.worker.worker import Submission, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectStep:
    """What one step gave one request. `finish` comes last and alone or with the last tokens."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish: EngineFinish | None = None


class DirectCalls:
    """Runs legs for callers that wait for them. Buffered per leg; a leg has at most max_tokens steps."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queues: dict[int, asyncio.Queue[DirectStep | MeshError]] = {}
        self._next_slot = 0
        self._link = worker.open_link(self)

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        """Hands each request its part."""
        for slot, entries in share.prompt_logprobs.items():
            if (queue := self._queues.get(slot)) is not None:
                queue.put_nowait(DirectStep(prompt_logprobs=entries))
        start = 0
        for position, slot in enumerate(share.slots):
            count = 1 if share.counts is None else share.counts[position]
            queue = self._queues.get(slot)
            if queue is not None:
                key = key_of(self._link.number, slot)
                tokens = share.token_ids[start : start + count]
                queue.put_nowait(DirectStep(token_ids=tokens, logprobs=logprobs.get(key)))
            start += count
        for finish in share.finishes:
            queue = self._queues.get(finish.key & SLOT_MASK)
            if queue is not None:
                queue.put_nowait(DirectStep(finish=finish))
            elif finish.handle is not None:
                self._worker.release_nowait(finish.handle.handle_id)

    def on_lost(self, error: MeshError) -> None:
        """Fails everybody."""
        for queue in self._queues.values():
            queue.put_nowait(error)

    async def stream(self, submission: Submission) -> AsyncIterator[DirectStep]:
        """Steps of one leg up to its finish. Leaving early cancels the leg and gives its handle back."""
        slot = self._take_slot()
        queue: asyncio.Queue[DirectStep | MeshError] = asyncio.Queue()
        self._link.submit_nowait(replace(submission, slot=slot))
        self._queues[slot] = queue
        finished = False
        try:
            while not finished:
                step = await queue.get()
                if isinstance(step, MeshError):
                    finished = True
                    raise step
                finished = step.finish is not None
                yield step
        finally:
            del self._queues[slot]
            if not finished:
                self._link.cancel_nowait(slot)
                self._give_back(queue)

    async def run(self, submission: Submission) -> EngineFinish:
        """One leg to its end. An error finish is raised."""
        stream = self.stream(submission)
        try:
            async for step in stream:
                if step.finish is not None:
                    return raise_failure(step.finish)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        raise LostError("the leg ended without a finish", reason="no_finish")

    def _give_back(self, queue: asyncio.Queue[DirectStep | MeshError]) -> None:
        """Releases a handle whose finish crossed with the caller's leaving."""
        while not queue.empty():
            step = queue.get_nowait()
            if isinstance(step, DirectStep) and step.finish is not None and step.finish.handle is not None:
                self._worker.release_nowait(step.finish.handle.handle_id)

    def _take_slot(self) -> int:
        self._next_slot = (self._next_slot + 1) % SLOTS_MAX
        return self._next_slot


def raise_failure(finish: EngineFinish) -> EngineFinish:
    """The finish, unless it is a failure."""
    if finish.reason is FinishReason.ERROR:
        raise finish.error or LostError("the engine failed the request", reason="engine_error")
    return finish
