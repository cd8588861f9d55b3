"""A flood of one tenant's requests delays another tenant's request by few of them, even before the router's queue."""

import asyncio
import time
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.telemetry import Instruments, LoopLag
from services.frontend.pipeline.tenant_turns import STARTS_PER_ITERATION, RequestStarts


async def test_a_request_overtakes_another_tenants_flood() -> None:
    """Of 200 requests that arrive together, few start before another tenant's request that arrives after them."""
    starts, order = RequestStarts(), []

    async def start(tenant: str) -> None:
        await starts.wait(tenant)
        order.append(tenant)

    flood = [asyncio.create_task(start("flood")) for _ in range(200)]
    await asyncio.sleep(0)
    other = asyncio.create_task(start("other"))
    await asyncio.wait([*flood, other])
    assert order.index("other") <= 4 * STARTS_PER_ITERATION
    assert Counter(order) == {"flood": 200, "other": 1}


async def test_other_tasks_run_between_few_request_starts() -> None:
    """Tasks such as other streams' tokens wait for the starts of at most two event-loop iterations."""
    starts, started, most = RequestStarts(), 0, 0

    async def start() -> None:
        nonlocal started
        await starts.wait("")
        started += 1

    tasks = [asyncio.create_task(start()) for _ in range(100)]
    while started < 100:
        before = started
        await asyncio.sleep(0)
        most = max(most, started - before)
    await asyncio.wait(tasks)
    assert most <= 2 * STARTS_PER_ITERATION


async def test_a_cancelled_request_does_not_block_the_next_one() -> None:
    """When waiting requests are cancelled, the requests behind them start."""
    starts = RequestStarts(1)
    waiting = [asyncio.create_task(starts.wait("a")) for _ in range(6)]
    await asyncio.sleep(0)
    for task in waiting[1:4]:
        task.cancel()
    await asyncio.wait(waiting)
    assert [task.cancelled() for task in waiting] == [False, True, True, True, False, False]
    await starts.wait("a")


async def test_a_lone_request_does_not_wait() -> None:
    starts = RequestStarts()
    for _ in range(STARTS_PER_ITERATION):
        with pytest.raises(StopIteration):
            starts.wait("a").send(None)


async def test_work_that_blocks_the_loop_is_measured() -> None:
    """Both metrics count a delay that the process causes itself."""
    registry = CollectorRegistry()
    lag = asyncio.create_task(LoopLag(Instruments(registry, "test")).run())
    await asyncio.sleep(0)
    ends_s = time.thread_time() + 0.3
    while time.thread_time() < ends_s:
        pass
    await asyncio.sleep(0.2)
    lag.cancel()
    for name in ("event_loop_lag_seconds", "event_loop_lag_cpu_seconds"):
        count = registry.get_sample_value(f"kvmesh_test_{name}_count")
        short = registry.get_sample_value(f"kvmesh_test_{name}_bucket", {"le": "0.05"})
        assert count is not None and short is not None and count > short
