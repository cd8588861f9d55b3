"""Legs whose caller waits for the end: prefill, embeddings, and answers of a single token."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.clock import AwakeTimer
from kvmesh.core import FinishReason, Leg, LegFinish, TokenLogprob
from kvmesh.errors import DeadlineError, LostError
from kvmesh.rpc.clients import LegLink


@dataclass(slots=True, kw_only=True)
class WholeLeg:
    """The output of a leg. `finish` is set at the end and is not an error."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish: LegFinish | None = None
    came_s: float = 0.0
    """Arrival time of the last tokens by the link's clock."""
    ended_s: float = 0.0
    """Arrival time of the finish by the event loop's clock."""


async def run_leg(link: LegLink, leg: Leg, *, timeout_s: float) -> WholeLeg:
    """Runs a leg to its end and raises its failure. Cancelling it stops the leg; a handle that is not received is released.

    DeadlineError when the worker does not end the leg in time. LostError when the worker cancelled it.
    """
    sink = _Collector(link)
    cancel = link.submit_nowait(leg, sink, timeout_s=timeout_s)
    timer = AwakeTimer(timeout_s, sink.on_timeout)
    # A leg may finish and a cancel arrive before this task resumes. Then nobody but `give_back` releases the handle.
    try:
        return await sink.ended
    except BaseException:
        sink.give_back()
        raise
    finally:
        timer.cancel()
        cancel()


class _Collector:
    """Sink that collects a leg."""

    def __init__(self, link: LegLink) -> None:
        self._link = link
        self._leg = WholeLeg()
        self.ended: asyncio.Future[WholeLeg] = asyncio.get_running_loop().create_future()

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self._leg.token_ids += token_ids
        self._leg.logprobs += logprobs or ()
        self._leg.came_s = came_s

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._leg.prompt_logprobs = logprobs

    def on_finish(self, finish: LegFinish) -> None:
        self._leg.finish = finish
        self._leg.ended_s = asyncio.get_running_loop().time()
        # The caller has timed out or was cancelled, so it does not receive the handle.
        if self.ended.done():
            self.give_back()
        elif finish.reason is FinishReason.ERROR:
            self.ended.set_exception(finish.error or LostError("the worker failed the request", reason="engine_error"))
        elif finish.reason is FinishReason.CANCELLED:
            # The caller does not wait for a leg that it has cancelled, so something else stopped the engine.
            self.ended.set_exception(LostError("the worker cancelled the request", reason="leg_cancelled"))
        else:
            self.ended.set_result(self._leg)

    def on_timeout(self) -> None:
        if not self.ended.done():
            error = DeadlineError("the request's deadline has passed", where=self._link.worker.worker_id)
            self.ended.set_exception(error)

    def give_back(self) -> None:
        """Releases the handle of a finish that the caller does not receive."""
        finish, self._leg.finish = self._leg.finish, None
        if finish is not None and finish.handle is not None:
            self._link.release_nowait(finish.handle.handle_id)
