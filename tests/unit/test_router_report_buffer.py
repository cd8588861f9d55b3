"""Reports wait until who asked is answered, and are applied before anything is said that they would change."""

import asyncio
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.clock import SystemClock
from kvmesh.core import Placement, Report, ReportKind
from kvmesh.errors import InvalidRequestError, LostError, UnavailableError
from kvmesh.telemetry import Telemetry
from services.router.core import RouterCore
from services.router.core_settings import QueueSettings
from services.router.health import breaker
from services.router.health.breaker import BreakerSettings
from services.router.metrics import RouterMetrics
from services.router.queue.admission import Queued
from services.router.serving.queue_dispatcher import QueueDispatcher
from services.router.serving.report_buffer import REPORTS_MAX, REPORTS_PER_ITERATION, ReportBuffer
from services.router.serving.response_queue import ResponseQueue
from services.router.workers import reservations
from tests.unit.router_fleets import ask, core, join


@dataclass
class Stage:
    """A router whose one decode worker takes `requests_max` requests; asks are numbered from 1."""

    core: RouterCore
    dispatcher: QueueDispatcher
    buffer: ReportBuffer
    asks: int = 0
    later_s: float = 0.0

    def ask(self) -> Placement | Queued:
        self.asks += 1
        return self.ask_as(self.asks)

    def ask_as(self, number: int, name: str = "") -> Placement | Queued:
        now = SystemClock().now() + self.later_s
        return self.core.ask("f", number, ask(name or f"r{number}", [number]), now=now, wall=now)

    def report(self, *numbers: int, kind: ReportKind = ReportKind.FINISHED, **options) -> None:
        self.buffer.add("f", [(number, Report(kind=kind, elapsed_s=0.1, **options)) for number in numbers])
        self.buffer.schedule()


def stage(requests_max: int, **limits) -> Stage:
    limits.setdefault("queue", QueueSettings())
    router = core(requests_per_decode_max=requests_max, **limits)
    join(router, "d1", "decode")
    clock = SystemClock()
    metrics = RouterMetrics(Telemetry.create("router", registry=CollectorRegistry()).instruments, router)
    dispatcher = QueueDispatcher(router, metrics, clock)
    return Stage(router, dispatcher, ReportBuffer(core=router, metrics=metrics, clock=clock, dispatcher=dispatcher))


async def test_reports_wait_a_turn_and_come_some_at_a_time():
    """What is due in the loop already goes first; then as many as a turn takes, in order, until none is left."""
    on = stage(100)
    count = 2 * REPORTS_PER_ITERATION + 5
    for _ in range(count):
        on.ask()
    left = []
    on.report(*range(1, count + 1))
    asyncio.get_running_loop().call_soon(lambda: left.append(len(on.core.book)))
    assert len(on.core.book) == count
    while on.buffer:
        left.append(len(on.core.book))
        await asyncio.sleep(0)
    assert left == [
        count,
        count - REPORTS_PER_ITERATION,
        count - REPORTS_PER_ITERATION,
        count - 2 * REPORTS_PER_ITERATION,
    ]
    assert len(on.core.book) == 0


async def test_reports_make_room_for_an_ask_that_would_wait():
    """It is placed, not queued, though nobody gave the loop a turn; without reports it waits."""
    on = stage(1)
    on.ask()
    on.report(1)
    assert isinstance(on.ask(), Placement)
    assert isinstance(on.ask(), Queued)


@pytest.mark.parametrize(("queue_requests_max", "reservations_max"), [(0, 1000), (4096, 1)])
async def test_reports_make_room_where_nobody_may_wait(monkeypatch, queue_requests_max, reservations_max):
    """The same with a router that keeps no queue, and with one that holds as many reservations as it may."""
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", reservations_max)
    on = stage(1, queue=QueueSettings(requests_max=queue_requests_max))
    on.ask()
    on.report(1)
    assert isinstance(on.ask(), Placement)


async def test_a_probe_that_went_well_opens_the_worker_for_the_next_ask(monkeypatch):
    """An ask is not refused for a breaker that a buffered report would close."""
    monkeypatch.setattr(breaker, "PROBES_MAX", 1)
    monkeypatch.setattr(breaker, "PROBE_SUCCESSES", 1)
    on = stage(100, breaker=BreakerSettings(failures_max=1, pause_min_s=1.0))
    on.ask()
    lost = LostError("gone", where="d1")
    on.report(1, kind=ReportKind.FAILED, error=lost, failed_worker_id="d1")
    assert not on.buffer, "a failure is not kept back"
    with pytest.raises(UnavailableError):
        on.ask()
    on.later_s = 1.5
    assert isinstance(on.ask(), Placement)
    with pytest.raises(UnavailableError):
        on.ask()
    on.report(on.asks - 1, kind=ReportKind.FIRST_TOKEN)
    assert isinstance(on.ask(), Placement)


async def test_a_number_is_free_once_its_end_is_reported():
    """Though the report is not applied yet; and not before."""
    on = stage(100)
    on.ask()
    with pytest.raises(InvalidRequestError):
        on.ask_as(1, "other")
    on.report(1)
    assert isinstance(on.ask_as(1, "other"), Placement)


async def test_nothing_waits_while_asks_wait():
    """Reports are applied at once when somebody is in the queue: they make the room that he waits for."""
    on = stage(1)
    on.ask()
    assert isinstance(on.ask(), Queued)
    on.dispatcher.on_queued("f", 2, ResponseQueue(responses_max=10))
    on.report(1)
    assert not on.buffer
    assert len(on.core.book) == 0


async def test_the_buffer_is_bounded():
    """More than it holds are applied before anything else is read."""
    on = stage(100)
    on.ask()
    on.report(*([1] * REPORTS_MAX), kind=ReportKind.PROGRESS)
    assert len(on.buffer) == REPORTS_MAX
    on.report(1)
    assert not on.buffer
