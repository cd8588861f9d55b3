"""Sends a prompt whose prefill worker takes too long to a second one. The first answer wins, and the other leg is cancelled.

The second placement is one of the router's own: another prefill worker, the same decode worker. So the handle of either is sealed for
that decode worker, and both reservations are settled: the loser's as cancelled.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from kvmesh.clock import Clock
from kvmesh.core import Ask, Handoff, LegTask, Report, ReportKind, Role
from kvmesh.errors import LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.rpc.clients import LegLink, LegLinks, Placed, RouterLink
from kvmesh.rpc.whole_leg import WholeLeg, run_leg
from services.frontend.metrics import ModelMetrics
from services.frontend.pipeline.attempt_state import AttemptState
from services.frontend.pipeline.hedging import PrefillTimes
from services.frontend.pipeline.leg_factory import LegFactory
from services.frontend.pipeline.placements import LINK_TIMEOUT_S
from services.frontend.settings import PipelineSettings

HEDGE_ID = ".hedge"
"""Ends the request id of the second placement, so that `kvmesh explain` shows both."""
PLACE_TIMEOUT_S = 0.5
"""Longest wait for the router; a hedge that has to queue is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedge:
    """What the second prefill worker computed."""

    placed: Placed
    placed_s: float
    link: LegLink
    whole: WholeLeg


class HedgedPrefill:
    """The prefill legs of one placement. Invariant: when `run` has ended, at most one handle exists, and `run` has returned it."""

    def __init__(
        self,
        *,
        ask: Ask,
        state: AttemptState,
        legs: LegFactory,
        times: PrefillTimes,
        links: LegLinks,
        router: RouterLink,
        clock: Clock,
        settings: PipelineSettings,
        metrics: ModelMetrics,
    ) -> None:
        self._ask = ask
        self._state = state
        self._legs = legs
        self._times = times
        self._links = links
        self._router = router
        self._clock = clock
        self._settings = settings
        self._metrics = metrics

    async def run(self, i: int, link: LegLink, prefill: Coroutine[Any, Any, WholeLeg]) -> tuple[LegLink, WholeLeg]:
        """Awaits `prefill`, the leg of choice `i` on `link`, and hedges it. Returns the winner. Raises the failure of `prefill`."""
        self._times.add_request()
        began_s = self._clock.now()
        expected_s = self._state.placement.expected_ttft_s
        after_s = self._times.hedge_after_s(expected_s)
        first = asyncio.ensure_future(prefill)
        hedge: Hedge | None = None
        try:
            if after_s is not None:
                await asyncio.wait([first], timeout=after_s)
            if after_s is None or first.done() or not self._times.take_nowait():
                whole = await first
            else:
                self._metrics.hedged.value += 1
                hedge = await self._race(i, first)
                if hedge is not None:
                    await _end(first, link)
                    return hedge.link, hedge.whole
                whole = first.result()
            if expected_s:
                self._times.add_time(expected_s=expected_s, elapsed_s=self._clock.now() - began_s)
            return link, whole
        except BaseException:
            # The caller receives no handle. A cancel may arrive after a leg has ended with one.
            if hedge is not None:
                _release(hedge.link, hedge.whole)
            await _end(first, link)
            raise

    async def _race(self, i: int, first: "asyncio.Future[WholeLeg]") -> Hedge | None:
        """Returns the hedge if it won, and None if `first` did. Raises the failure of `first` if both failed."""
        second = asyncio.ensure_future(self._run_hedge(i))
        try:
            both: list[asyncio.Future[Any]] = [first, second]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # A failure of one leaves the decision to the other.
            if first.done() and first.exception() is not None:
                await asyncio.wait([second])
            if second.done() and second.exception() is not None:
                await asyncio.wait([first])
            # `first` has no result: the hedge has won, or both have failed.
            if not first.done() or first.exception() is not None:
                if second.exception() is None:
                    return self._move_to(second.result())
                first.result()
            return None
        finally:
            await self._drop(second)

    def _move_to(self, hedge: Hedge) -> Hedge:
        """Continues the request with the second placement."""
        state = self._state
        self._report(state.placed, ReportKind.CANCELLED, state.began_s)
        state.move_to(hedge.placed, hedge.placed_s)
        state.failed_worker_id = ""
        assert hedge.whole.finish is not None
        state.prefill_usage = hedge.whole.finish.usage
        self._metrics.hedges_won.value += 1
        return hedge

    async def _drop(self, second: "asyncio.Future[Hedge]") -> None:
        """Ends the hedge, unless it won, and releases what it computed."""
        # A wait for a hedge that has ended would let a cancel lose the handle.
        if not second.done():
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        if second.cancelled() or second.exception() is not None:
            return
        hedge = second.result()
        if self._state.placed is hedge.placed:  # It won.
            return
        _release(hedge.link, hedge.whole)
        self._report(hedge.placed, ReportKind.CANCELLED, hedge.placed_s)

    async def _run_hedge(self, i: int) -> Hedge:
        """Has the prompt placed on another prefill worker, and computed there. Settles the placement if that fails."""
        state = self._state
        assert state.placement.prefill is not None
        ask = replace(
            self._ask,
            request_id=self._ask.request_id + HEDGE_ID,
            excluded_worker_ids=(state.placement.prefill.worker_id,),
            pinned_decode_worker_id=state.placement.decode.worker_id,
            # Otherwise the router would bind the session to the second worker, even if that one loses.
            session_id="",
            timeout_s=state.left_s(),
        )
        placed = await self._router.place(ask, timeout_s=min(state.left_s(), PLACE_TIMEOUT_S))
        placed_s = self._clock.now()
        worker = placed.placement.prefill
        try:
            is_another = worker is not None and placed.placement.handoff is Handoff.SEQUENTIAL
            if (
                worker is None
                or not is_another
                or placed.placement.decode.worker_id != state.placement.decode.worker_id
            ):
                raise UnavailableError("there is no second prefill worker", reason="no_prefill_worker")
            timeout_s = min(state.left_s(), LINK_TIMEOUT_S)
            link = await self._links.link(worker, Role.PREFILL, timeout_s=timeout_s, waits_for_lost=False)
            leg = self._legs.make(i, LegTask.PREFILL, worker, is_hedge=True)
            whole = await run_leg(link, leg, timeout_s=min(state.left_s(), self._settings.first_token_timeout_s))
            if whole.finish is None or whole.finish.handle is None:
                raise UnavailableError("the second prefill worker returned no handle")
        except (UnavailableError, LostError, OverloadedError) as error:
            worker_id = "" if worker is None else worker.worker_id
            self._report(placed, ReportKind.FAILED, placed_s, error=error, worker_id=worker_id)
            raise
        except BaseException:
            self._report(placed, ReportKind.CANCELLED, placed_s)
            raise
        return Hedge(placed=placed, placed_s=placed_s, link=link, whole=whole)

    def _report(
        self, placed: Placed, kind: ReportKind, placed_s: float, *, error: MeshError | None = None, worker_id: str = ""
    ) -> None:
        report = Report(
            kind=kind, elapsed_s=self._clock.now() - placed_s, error=error, failed_worker_id=worker_id if error else ""
        )
        self._router.report_nowait(placed.ask_id, report)


async def _end(first: "asyncio.Future[WholeLeg]", link: LegLink) -> None:
    """Ends the leg on `link`, and releases what it computed. Does nothing if it has failed."""
    if not first.done():
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    if not first.cancelled() and first.exception() is None:
        _release(link, first.result())


def _release(link: LegLink, whole: WholeLeg) -> None:
    if whole.finish is not None and whole.finish.handle is not None:
        link.release_nowait(whole.finish.handle.handle_id)
