"""Runs one leg for one caller: the implementation of Generate."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core import FinishReason, Leg, TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.errors import LostError, MeshError
from kvmesh.worker.slots import LinkStep, key_of
from kvmesh.worker.worker import Worker

SLOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LegStep:
    """One step's results for the leg. The last one holds only `finish`."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish: EngineFinish | None = None


async def stream_leg(worker: Worker, leg: Leg, *, timeout_s: float | None) -> AsyncIterator[LegStep]:
    """Yields the steps of one leg up to its finish. Raises the error of a failed leg. Closing the iterator early cancels the leg and
    releases its handle."""
    outlet = _StepQueue()
    link = worker.open_link(outlet)
    outlet.link_number = link.number
    is_taken = False
    try:
        link.submit_nowait(SLOT, leg, timeout_s)
        while not is_taken:
            step = await outlet.steps.get()
            if isinstance(step, MeshError):
                raise step
            finish = step.finish
            if finish is not None and finish.reason is FinishReason.ERROR:
                raise finish.error or LostError("the engine failed the request", reason="engine_error")
            # Before the yield: a caller that closes the iterator there has received the handle.
            is_taken = finish is not None
            yield step
    finally:
        link.close_nowait()
        if not is_taken and outlet.handle_id:
            worker.release_nowait(outlet.handle_id)


class _StepQueue:
    """Outlet for one leg. Its length is bounded by the leg's tokens."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[LegStep | MeshError] = asyncio.Queue()
        self.link_number = 0
        self.handle_id = ""

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        if (prompt := share.prompt_logprobs.get(SLOT)) is not None:
            self.steps.put_nowait(LegStep(prompt_logprobs=prompt))
        if share.slots:
            entries = logprobs.get(key_of(self.link_number, slot=SLOT))
            self.steps.put_nowait(LegStep(token_ids=share.token_ids, logprobs=entries))
        for finish in share.finishes:
            self.handle_id = finish.handle.handle_id if finish.handle is not None else ""
            self.steps.put_nowait(LegStep(finish=finish))

    def on_lost(self, error: MeshError) -> None:
        self.steps.put_nowait(error)
