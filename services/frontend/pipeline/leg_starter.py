"""Starts the legs of the choices of one placement: on one worker, by sequential handoff, or by rendezvous."""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

from kvmesh.clock import Clock
from kvmesh.core import Handoff, KvHandle, LegTask, Rendezvous
from kvmesh.errors import (
    IDLE_TIMEOUT,
    CancelledByCallerError,
    DeadlineError,
    InternalError,
    KvLostError,
    LostError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.rpc.clients import LegLink, LegSink
from kvmesh.rpc.codec.legs import spend_lease
from kvmesh.rpc.whole_leg import WholeLeg, run_leg
from services.frontend.pipeline.attempt_reports import AttemptReports
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.hedged_prefill import HedgedPrefill
from services.frontend.pipeline.held_sink import HeldSink
from services.frontend.pipeline.leg_factory import LegFactory, rendezvous_at
from services.frontend.pipeline.placements import RETRIABLE
from services.frontend.pipeline.token_timeouts import TokenTimeouts
from services.frontend.settings import PipelineSettings


class LegStarter:
    """Invariant: every handle that it received was submitted or is being released, also when it is cancelled."""

    def __init__(
        self,
        state: AttemptState,
        legs: LegFactory,
        timeouts: TokenTimeouts,
        *,
        clock: Clock,
        settings: PipelineSettings,
        generator: Random,
        reports: AttemptReports,
        hedge: HedgedPrefill | None = None,
    ) -> None:
        self._state = state
        self._legs = legs
        self._timeouts = timeouts
        self._clock = clock
        self._settings = settings
        self._random = generator
        self._reports = reports
        self._hedge = hedge

    async def start(self, prefill: LegLink | None, decode: LegLink | None) -> None:
        """Starts one choice after the other: from the second one on the prompt is in the prefill worker's cache.

        Without `prefill` the decode worker computes the prompt; without `decode` the prefill worker answers.
        """
        handoff = self._state.placement.handoff
        for i in self._state.choices:
            if prefill is None:
                assert decode is not None
                self._submit(i, decode)
            elif decode is None:
                await self._answer_at_prefill(i, prefill)
            elif handoff is Handoff.RENDEZVOUS:
                await self._start_rendezvous(i, prefill, decode)
            elif handoff is Handoff.SEQUENTIAL:
                await self._hand_over(i, prefill, decode)
            else:
                raise InternalError(f"the router chose a handoff that is not supported: {handoff}")
            if decode is not None:
                # The link writes in this iteration of the event loop. Reporting afterwards keeps it off the path to the first token.
                await asyncio.sleep(0)
                if prefill is not None:
                    self._report_prefilled(i)

    def _report_prefilled(self, i: int) -> None:
        if i == self._state.last:
            self._reports.on_prefilled()

    async def _answer_at_prefill(self, i: int, prefill: LegLink) -> None:
        """Runs the whole leg on the prefill worker and passes its single token to the sink like a step frame."""
        whole = await self._run_prefill(i, prefill, LegTask.GENERATE)
        choice = self._state.choices[i]
        self._report_prefilled(i)
        if whole.prompt_logprobs is not None:
            choice.on_prompt(whole.prompt_logprobs)
        if whole.token_ids:
            choice.on_tokens(whole.token_ids, whole.logprobs or None, whole.came_s)
        assert whole.finish is not None
        choice.on_finish(whole.finish)

    async def _hand_over(self, i: int, prefill: LegLink, decode: LegLink) -> None:
        """Sequential handoff: prefill computes the prompt, then decode pulls its KV and answers."""
        running = self._run_prefill(i, prefill, LegTask.PREFILL)
        if self._hedge is None:
            whole = await running
        else:
            prefill, whole = await self._hedge.run(i, prefill, running)
        assert whole.finish is not None
        handle = whole.finish.handle
        if handle is None:
            raise KvLostError("the prefill worker returned no handle", where=prefill.worker.worker_id)
        try:
            self._submit(
                i,
                decode,
                handle=spend_lease(handle, self._clock.now() - whole.ended_s),
                release=partial(prefill.release_nowait, handle.handle_id),
            )
        except BaseException:
            prefill.release_nowait(handle.handle_id)
            raise

    async def _start_rendezvous(self, i: int, prefill: LegLink, decode: LegLink) -> None:
        """Rendezvous handoff: both legs start at the same time, and the first failure of either ends both.

        After the first token the decode worker has the prompt's KV, so a failure of the prefill leg no longer matters.
        """
        # All ranks of the worker share the link.
        placed = self._state.placement.prefill or prefill.worker
        # 63 bits, as SGLang's router draws rooms: a room is a signed 64-bit number.
        rendezvous = rendezvous_at(self._state.placement.rendezvous_address, placed, room=self._random.getrandbits(63))
        choice = self._state.choices[i]
        held = HeldSink(choice) if self._legs.scores_prompt(i) else None
        self._submit(i, decode, rendezvous=rendezvous, sink=held)
        try:
            whole = await self._run_prefill(i, prefill, LegTask.PREFILL, rendezvous=rendezvous)
        except KvLostError:
            if choice.has_leg_tokens:
                return
            # The prefill worker found no counterpart, or the wrong one.
            self._state.exclude_counterpart(decode.worker)
            raise
        except (UnavailableError, LostError):
            if choice.has_leg_tokens:
                self._state.failed_worker_id = ""
                return
            raise
        self._timeouts.on_sent(i)
        if held is not None:
            held.release(whole.prompt_logprobs)

    async def _run_prefill(
        self, i: int, link: LegLink, task: LegTask, *, rendezvous: Rendezvous | None = None
    ) -> WholeLeg:
        """Runs a leg on the prefill worker to its end."""
        state = self._state
        leg = self._legs.make(i, task, state.placement.prefill, rendezvous=rendezvous)
        left_s = state.left_s()
        timeout_s = min(left_s, self._settings.first_token_timeout_s)
        try:
            whole = await run_leg(link, leg, timeout_s=timeout_s)
        except (UnavailableError, LostError, OverloadedError):
            state.failed_worker_id = link.worker.worker_id
            raise
        except DeadlineError as error:
            # The request's own deadline. No worker caused it.
            if timeout_s == left_s:
                raise
            state.failed_worker_id = link.worker.worker_id
            message = "the prefill worker did not compute the prompt in time (first_token_timeout_s)"
            raise DeadlineError(message, reason=IDLE_TIMEOUT, where=link.worker.worker_id) from error
        if state.prefill_usage is None and whole.finish is not None:
            state.prefill_usage = whole.finish.usage
        return whole

    def _submit(
        self,
        i: int,
        link: LegLink,
        *,
        handle: KvHandle | None = None,
        rendezvous: Rendezvous | None = None,
        sink: LegSink | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Submits the decode leg of a choice. `sink` None: the choice itself. `release` gives the handle back."""
        state, choice = self._state, self._state.choices[i]
        # Another choice may have failed while the prompt was computed.
        if state.ended.done():
            state.ended.result()
            raise CancelledByCallerError("the request has ended")
        leg = self._legs.make(i, LegTask.GENERATE, state.placement.decode, handle=handle, rendezvous=rendezvous)
        try:
            choice.begin(link.submit_nowait(leg, sink or choice, timeout_s=state.left_s()), release=release)
        except RETRIABLE:
            state.failed_worker_id = link.worker.worker_id
            raise
        # The silence of the worker counts from here.
        choice.last_token_at_s = self._clock.now()
        state.uses_decode = True
