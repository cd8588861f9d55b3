"""Runs one placement of a request: links to its workers, starts the legs, waits for the end, reports to the router."""

import asyncio
from collections.abc import Mapping
from random import Random

from kvmesh.clock import Clock
from kvmesh.core import Handoff, LegTask, Role, WorkerRef
from kvmesh.errors import InternalError, MeshError
from kvmesh.rpc.clients import LegLink, LegLinks, Placed, RouterLink
from services.frontend.metrics import ModelMetrics
from services.frontend.pipeline.attempt_reports import AttemptReports
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.choice_sink import ChoiceSink
from services.frontend.pipeline.hedged_prefill import HedgedPrefill
from services.frontend.pipeline.hedging import PrefillTimes
from services.frontend.pipeline.leg_factory import LegFactory
from services.frontend.pipeline.leg_starter import LegStarter
from services.frontend.pipeline.placements import LINK_TIMEOUT_S, RETRIABLE
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.token_timeouts import TokenTimeouts
from services.frontend.settings import PipelineSettings


class Attempt:
    """Runs the choices of a placed request to their end. Choices that an earlier attempt ended get no leg. Invariants:

    1. The router receives exactly one of finished, failed, cancelled.
    2. However `run` ends, no leg of this attempt runs or will start, and every handle was submitted or is being released.
    """

    def __init__(
        self,
        prepared: Prepared,
        placed: Placed,
        *,
        number: int,
        deadline_s: float,
        links: LegLinks,
        router: RouterLink,
        clock: Clock,
        settings: PipelineSettings,
        generator: Random,
        metrics: ModelMetrics,
        prefill_times: PrefillTimes | None = None,
    ) -> None:
        self.state = state = AttemptState(placed, number=number, deadline_s=deadline_s, clock=clock)
        self.reports = AttemptReports(state, router, clock)
        self._legs = LegFactory(prepared, state)
        self._timeouts = TokenTimeouts(state, deadline_s=deadline_s, clock=clock, settings=settings)
        self._links = links
        hedge, ask = None, prepared.ask
        # A request is not hedged if it has several prompts to compute, has failed once, or pins its worker.
        if prefill_times is not None and ask.choices == 1 and not number and not ask.pinned_prefill_worker_id:
            hedge = HedgedPrefill(
                ask=ask,
                state=state,
                legs=self._legs,
                times=prefill_times,
                links=links,
                router=router,
                clock=clock,
                settings=settings,
                metrics=metrics,
            )
        self._starter = LegStarter(
            state,
            self._legs,
            self._timeouts,
            clock=clock,
            settings=settings,
            generator=generator,
            reports=self.reports,
            hedge=hedge,
        )

    async def run(self, choices: Mapping[int, ChoiceSink]) -> None:
        """Runs the choices, by number, to their end; at least one. Raises the first failure. Cancelling it cancels every leg."""
        state = self.state
        state.begin(choices)
        try:
            await self._run()
        except MeshError as error:
            self.reports.on_failed(error)
            raise
        except asyncio.CancelledError:
            self.reports.on_cancelled()
            raise
        except BaseException:
            self.reports.on_failed(InternalError("internal error of the frontend"))
            raise
        else:
            self.reports.on_finished()
        finally:
            for choice in choices.values():
                choice.close()
            if state.ended.done() and not state.ended.cancelled():
                state.ended.exception()  # Prevents asyncio's warning about an exception that was never retrieved.

    async def _run(self) -> None:
        state = self.state
        prefill = await self._link_prefill()
        is_answered_by_prefill = prefill is not None and self._may_answer(prefill)
        decode = None if is_answered_by_prefill else await self._link(state.placement.decode, Role.DECODE)
        # A single choice: `start` raises the failure of the prefill leg, and returns once the decode leg is submitted.
        if len(state.choices) == 1 and state.placement.handoff is not Handoff.RENDEZVOUS:
            await self._starter.start(prefill, decode)
            await self._timeouts.wait_end()
            return
        starting = asyncio.ensure_future(self._starter.start(prefill, decode))
        try:
            # A failing leg ends the request immediately, even while prompts of other choices are still computed.
            await asyncio.wait({starting, state.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not state.ended.done():
                starting.result()
            await self._timeouts.wait_end()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _link_prefill(self) -> LegLink | None:
        """Returns None if the decode worker computes the prompt.

        It must if the client wants the prompt's log-probabilities: they are computed with the prompt and not transferred with
        its KV (sequential handoff). A prefill worker that gives the whole answer gives them too, and so does one of a rendezvous.
        """
        state, worker = self.state, self.state.placement.prefill
        if worker is None:
            return None
        link = await self._link(worker, Role.PREFILL)
        if state.placement.handoff is Handoff.RENDEZVOUS or not any(map(self._legs.scores_prompt, state.choices)):
            return link
        return link if self._may_answer(link) else None

    def _may_answer(self, prefill: LegLink) -> bool:
        """Returns whether the prefill worker can answer alone. It computes the first token, so it can if only one is left."""
        is_single = self._legs.is_single_token()
        return is_single and self.state.placement.handoff is Handoff.SEQUENTIAL and LegTask.GENERATE in prefill.tasks

    async def _link(self, worker: WorkerRef, role: Role) -> LegLink:
        try:
            timeout_s = min(self.state.left_s(), LINK_TIMEOUT_S)
            # At first another worker is faster than a link that was lost. A request that gets the worker again waits for its link.
            is_again = bool(self.state.suffix)
            return await self._links.link(worker, role, timeout_s=timeout_s, waits_for_lost=is_again)
        except RETRIABLE:
            self.state.failed_worker_id = worker.worker_id
            raise
