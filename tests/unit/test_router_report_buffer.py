"""Reports are buffered until asks are answered, and are applied before each decision that they could change."""

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
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask, core, join


@dataclass
class Stage:
    """A router with one decode worker for `requests_max` requests. Asks are numbered from 1."""

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


async def test_reports_are_applied_in_batches_per_iteration():
    """Callbacks that are already due run first. Then each iteration of the loop applies a bounded number of reports, in order."""
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


async def test_buffered_reports_free_capacity_for_an_ask():
    """Buffered reports are applied before an ask would be queued."""
    on = stage(1)
    on.ask()
    on.report(1)
    assert isinstance(on.ask(), Placement)
    assert isinstance(on.ask(), Queued)


@pytest.mark.parametrize(("queue_requests_max", "reservations_max"), [(0, 1000), (4096, 1)])
async def test_buffered_reports_free_capacity_before_a_refusal(monkeypatch, queue_requests_max, reservations_max):
    """The same holds without a queue, and at the limit of reservations."""
    monkeypatch.setattr(reservations, "RESERVATIONS_MAX", reservations_max)
    on = stage(1, queue=QueueSettings(requests_max=queue_requests_max))
    on.ask()
    on.report(1)
    assert isinstance(on.ask(), Placement)


async def test_a_buffered_report_closes_a_breaker_before_a_refusal(monkeypatch):
    """An ask is not refused because of a breaker that a buffered report would close."""
    monkeypatch.setattr(breaker, "PROBES_MAX", 1)
    monkeypatch.setattr(breaker, "PROBE_SUCCESSES", 1)
    on = stage(100, breaker=BreakerSettings(failures_max=1, pause_min_s=PATIENCE_S, pause_max_s=PATIENCE_S))
    on.ask()
    lost = LostError("gone", where="d1")
    on.report(1, kind=ReportKind.FAILED, error=lost, failed_worker_id="d1")
    assert not on.buffer, "a failure is not buffered"
    with pytest.raises(UnavailableError):
        on.ask()
    on.later_s = 2 * PATIENCE_S
    assert isinstance(on.ask(), Placement)
    with pytest.raises(UnavailableError):
        on.ask()
    on.report(on.asks - 1, kind=ReportKind.FIRST_TOKEN)
    assert isinstance(on.ask(), Placement)


async def test_a_number_is_free_once_its_end_is_reported():
    """The number can be reused even if the report is still buffered, but not earlier."""
    on = stage(100)
    on.ask()
    with pytest.raises(InvalidRequestError):
        on.ask_as(1, "other")
    on.report(1)
    assert isinstance(on.ask_as(1, "other"), Placement)


async def test_reports_are_not_buffered_while_asks_are_queued():
    """They are applied at once, because they free the capacity that queued asks wait for."""
    on = stage(1)
    on.ask()
    assert isinstance(on.ask(), Queued)
    on.dispatcher.on_queued("f", 2, ResponseQueue(responses_max=10))
    on.report(1)
    assert not on.buffer
    assert len(on.core.book) == 0


async def test_the_buffer_is_bounded():
    """When the buffer is full, all reports are applied."""
    on = stage(100)
    on.ask()
    on.report(*([1] * REPORTS_MAX), kind=ReportKind.PROGRESS)
    assert len(on.buffer) == REPORTS_MAX
    on.report(1)
    assert not on.buffer
