"""A frontend's link to the router in its own process: placements, refusals and reports, without leaked reservations."""

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
from tests.worker_rig import wait_until


@dataclass
class Rig:
    """A router with one decode worker that takes one request at a time, and the frontend's link to it."""

    core: RouterCore
    servicer: RouterServicer
    link: HostedRouterLink

    @property
    def in_flight(self) -> int:
        """Returns the number of unsettled reservations."""
        return sum(
            target.requests_in_flight for worker in self.core.fleet.workers.values() for target in worker.targets
        )


@asynccontextmanager
async def running_rig(*, is_open: bool = True, queue: int = 8, **settings: float) -> AsyncIterator[Rig]:
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
            yield Rig(core, servicer, link)
    finally:
        await link.aclose()
        running.cancel()
        await asyncio.wait([running])


async def settled(rig: Rig, count: int = 0) -> None:
    """Waits until `count` reservations remain."""
    async with asyncio.timeout(PATIENCE_S):
        while rig.in_flight != count:
            await asyncio.sleep(0.002)


async def test_an_ask_is_answered_synchronously():
    """An ask that can be placed needs no iteration of the event loop."""
    async with running_rig() as rig:
        placing = rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        with pytest.raises(StopIteration) as placed:
            placing.send(None)
        assert placed.value.value.placement.decode.worker_id == "d1"
        assert rig.in_flight == 1
        rig.link.report_nowait(
            placed.value.value.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1, output_tokens=3)
        )
        await settled(rig)


async def test_refusals_are_raised():
    """The link raises the router's refusals with their details, and refuses an invalid ask itself."""
    async with running_rig() as rig:
        with pytest.raises(NotFoundError) as refused:
            await rig.link.place(ask("r1", model="another"), timeout_s=PATIENCE_S)
        assert refused.value.request_id == "r1"
        with pytest.raises(InvalidRequestError) as wrong:
            await rig.link.place(ask("r2", priority=10_000), timeout_s=PATIENCE_S)
        assert wrong.value.field == "ask.priority"
        assert rig.in_flight == 0


async def test_queued_asks_are_placed_when_there_is_capacity():
    """Queued asks are placed in order, with their queueing time."""
    async with running_rig() as rig:
        first = await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = [asyncio.create_task(rig.link.place(ask(f"r{n}"), timeout_s=PATIENCE_S)) for n in (2, 3)]
        await wait_until(lambda: rig.core.queue.requests == 2, "both are queued")
        queued_at_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        waited_s = asyncio.get_running_loop().time() - queued_at_s
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        second = await waiting[0]
        assert second.placement.queued_s is not None
        assert second.placement.queued_s >= waited_s
        assert not waiting[1].done()
        rig.link.report_nowait(
            second.ask_id, Report(kind=ReportKind.FAILED, elapsed_s=0.1, error=LostError("gone"), failed_worker_id="d1")
        )
        third = await waiting[1]
        rig.link.report_nowait(third.ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1))
        await settled(rig)


async def test_an_ask_that_stops_waiting_leaves_the_queue():
    """A cancelled ask and an expired one leave the queue, and the next ask gets the capacity."""
    async with running_rig() as rig:
        first = await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        left = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        late = asyncio.create_task(rig.link.place(ask("r3", timeout_s=0.05), timeout_s=0.05))
        last = asyncio.create_task(rig.link.place(ask("r4"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(DeadlineError):
            await late
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        placed = await last
        assert rig.core.queue.requests == 0
        rig.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await settled(rig)


async def test_a_placement_that_crosses_a_cancellation_is_released():
    """A placement is released if its ask is cancelled in the same iteration of the event loop."""
    async with running_rig(report_delay_s=0) as rig:
        first = await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        crossed = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        rig.servicer.handler.reports.apply_all()
        assert rig.servicer.dispatcher.drain() == 1
        crossed.cancel()
        await asyncio.wait([crossed])
        assert crossed.cancelled()
        await settled(rig)


async def test_a_full_queue_refuses():
    """An ask that finds the queue full is refused with a time after which the client may retry."""
    async with running_rig(queue=1, messages_max=1) as rig:
        await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError) as full:
            await rig.link.place(ask("r3"), timeout_s=PATIENCE_S)
        assert full.value.retry_after_s
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_asks_wait_for_a_router_that_joins():
    """Asks wait for a router until their timeout."""
    async with running_rig(is_open=False) as rig:
        with pytest.raises(UnavailableError) as early:
            await rig.link.place(ask("r1"), timeout_s=0.02)
        assert early.value.reason == "no_router"
        placing = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        await rig.link.open()
        assert (await placing).placement.decode.worker_id == "d1"


async def test_closing_fails_all_waiting_asks():
    """After the link is closed, queued and later asks fail. Reports that were already sent still count."""
    async with running_rig() as rig:
        first = await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        waiting = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        await asyncio.sleep(0.01)
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.1))
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await rig.link.aclose()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await rig.link.place(ask("r3"), timeout_s=PATIENCE_S)
        assert rig.in_flight == 0
        assert rig.core.queue.requests == 0


async def test_reports_of_settled_asks_are_ignored():
    """Only the first final report of an ask counts."""
    async with running_rig() as rig:
        first = await rig.link.place(ask("r1"), timeout_s=PATIENCE_S)
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        second = asyncio.create_task(rig.link.place(ask("r2"), timeout_s=PATIENCE_S))
        placed = await second
        rig.link.report_nowait(first.ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.1))
        rig.link.report_nowait(99, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await asyncio.sleep(0.02)
        assert rig.in_flight == 1
        rig.link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        await settled(rig)
