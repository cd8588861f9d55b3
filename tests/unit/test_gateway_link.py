"""A frontend's way to the router in its own process: what it is told, when, and that nothing stays reserved."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.clock import SystemClock
from kvmesh.core import Report, ReportKind
from kvmesh.errors import (
    DeadlineError,
    InvalidRequestError,
    LostError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.telemetry.metrics import Instruments
from services.gateway.link import HostedRouterLink
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings, QueueSettings
from services.router.metrics import RouterMetrics
from services.router.servicer import RouterServicer
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask, join


@dataclass
class Stage:
    """A router with one decode worker that takes one request at a time, and the frontend's link to it."""

    core: RouterCore
    servicer: RouterServicer
    link: HostedRouterLink

    @property
    def in_flight(self) -> int:
        """Reservations that are not settled."""
        return sum(
            target.requests_in_flight for worker in self.core.fleet.workers.values() for target in worker.targets
        )


@asynccontextmanager
async def stage(*, is_open: bool = True, queue: int = 8, **settings: float) -> AsyncIterator[Stage]:
    router_settings = CoreSettings(queue=QueueSettings(requests_max=queue), requests_per_decode_max=1)
    core = RouterCore(router_settings, router_id="router", generator=Random(1))
    join(core, "d1", "decode")
    clock = SystemClock()
    servicer = RouterServicer(core, RouterMetrics(Instruments(CollectorRegistry(), "router"), core), clock)
    settings.setdefault("report_delay_s", 0.001)
    link = HostedRouterLink(servicer.handler, frontend_id="f", clock=clock, settings=RouterLinkSettings(**settings))  # type: ignore[arg-type]
    running = asyncio.create_task(servicer.dispatcher.run())
    if is_open:
        await link.open()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Stage(core, servicer, link)
    finally:
        await link.aclose()
        running.cancel()
        await asyncio.wait([running])


async def settled(on: Stage, count: int = 0) -> None:
    """Until so many reservations are left."""
    async with asyncio.timeout(PATIENCE_S):
        while on.in_flight != count:
            await asyncio.sleep(0.002)


async def test_an_ask_is_answered_as_it_is_asked():
    """Without a turn of the event loop: there is nobody to wait for."""
    async with stage() as on:
        placing = on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        with pytest.raises(StopIteration) as placed:
            placing.send(None)
        assert placed.value.value.placement.decode.worker_id == "d1"
        assert on.in_flight == 1
        on.link.report_nowait(
            placed.value.value.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1, output_tokens=3)
        )
        await settled(on)


async def test_refusals_are_raised():
    """The router's own, with what they say, and what no router takes."""
    async with stage() as on:
        with pytest.raises(NotFoundError) as refused:
            await on.link.place(ask("r1", model="another"), timeout_s=PATIENCE_S)
        assert refused.value.request_id == "r1"
        with pytest.raises(InvalidRequestError) as wrong:
            await on.link.place(ask("r2", priority=10_000), timeout_s=PATIENCE_S)
        assert wrong.value.field == "ask.priority"
        assert on.in_flight == 0


async def test_who_waits_is_placed_when_there_is_room():
    """In order, with the time that they waited."""
    async with stage() as on:
        first = await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = [asyncio.create_task(on.link.place(ask(f"r{n}"), timeout_s=PATIENCE_S)) for n in (2, 3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        second = await waiting[0]
        assert second.placement.queued_s is not None
        assert second.placement.queued_s >= 0.04
        assert not waiting[1].done()
        on.link.report_nowait(
            second.ask_id, Report(kind=ReportKind.FAILED, elapsed_s=0.1, error=LostError("gone"), failed_worker_id="d1")
        )
        third = await waiting[1]
        on.link.report_nowait(third.ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1))
        await settled(on)


async def test_who_stops_waiting_keeps_nothing():
    """Cancelled, or out of time: the queue forgets them, and the room goes to the next."""
    async with stage() as on:
        first = await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        left = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        late = asyncio.create_task(on.link.place(ask("r3", timeout_s=0.05), timeout_s=0.05))
        last = asyncio.create_task(on.link.place(ask("r4"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(DeadlineError):
            await late
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        placed = await last
        assert on.core.queue.requests == 0
        on.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await settled(on)


async def test_a_placement_that_crosses_a_cancel_is_given_back():
    """Room and the cancel come in the same turn of the loop."""
    async with stage(report_delay_s=0) as on:
        first = await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        crossed = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        on.servicer.handler.reports.apply_all()
        assert on.servicer.dispatcher.drain() == 1
        crossed.cancel()
        await asyncio.wait([crossed])
        assert crossed.cancelled()
        await settled(on)


async def test_a_full_queue_refuses():
    """With a time to come back, and as many as may wait here."""
    async with stage(queue=1, messages_max=1) as on:
        await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError) as full:
            await on.link.place(ask("r3"), timeout_s=PATIENCE_S)
        assert full.value.retry_after_s
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_asks_wait_for_a_router_that_joins():
    """As long as they have time."""
    async with stage(is_open=False) as on:
        with pytest.raises(UnavailableError) as early:
            await on.link.place(ask("r1"), timeout_s=0.02)
        assert early.value.reason == "no_router"
        placing = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        await on.link.open()
        assert (await placing).placement.decode.worker_id == "d1"


async def test_closing_answers_everybody():
    """Who waits for room, and who comes too late; what was reported counts, the rest ends with its grace."""
    async with stage() as on:
        first = await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.1))
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await on.link.aclose()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await on.link.place(ask("r3"), timeout_s=PATIENCE_S)
        assert on.in_flight == 0
        assert on.core.queue.requests == 0


async def test_reports_of_what_is_over_are_not_told():
    """One end counts."""
    async with stage() as on:
        first = await on.link.place(ask("r1"), timeout_s=PATIENCE_S)
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        second = asyncio.create_task(on.link.place(ask("r2"), timeout_s=PATIENCE_S))
        placed = await second
        on.link.report_nowait(first.ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1))
        on.link.report_nowait(99, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await asyncio.sleep(0.02)
        assert on.in_flight == 1
        on.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await settled(on)
