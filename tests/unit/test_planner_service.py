"""PlannerService on a planner without workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core.planning import Targets
from kvmesh.errors import InvalidRequestError, UnavailableError
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.planner_client import GrpcPlannerClient
from kvmesh.simulation.registry import MemoryAgent
from kvmesh.simulation.rpc import MemoryNetwork
from kvmesh.telemetry import Telemetry
from services.planner.metrics import PlannerMetrics
from services.planner.observe import Observation
from services.planner.planner import Planner
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings
from tests.virtual_loop import run_virtual


class EmptySource:
    """A source without observations."""

    name = "scrape"

    async def observe(self, instances: object) -> Observation:
        return Observation(window=None)

    async def history(self, *, span_s: float, step_s: float) -> dict[str, list[float]]:
        return {}


@asynccontextmanager
async def planner_and_client() -> AsyncIterator[tuple[Planner, GrpcPlannerClient]]:
    clock = SystemClock()
    telemetry = Telemetry.create("planner")
    agent = MemoryAgent(clock=clock)
    planner = Planner(
        registry=agent.registry(),
        source=EmptySource(),
        metrics=PlannerMetrics(telemetry.instruments),
        clock=clock,
        settings=PlannerSettings(interval_s=1.0),
    )
    network = MemoryNetwork()
    server: Any = network.server("planner:1", server_interceptors(telemetry))
    PlannerServicer(planner).add_to(server)
    await server.start()
    channels = network.pool()
    try:
        yield planner, GrpcPlannerClient(channels, "planner:1")
    finally:
        await planner.aclose()
        await channels.aclose()
        await server.stop(None)


def test_targets_are_set_and_returned():
    """The next plan contains the new targets. They replace only the earlier targets of the same model. Invalid targets change nothing."""

    async def story() -> None:
        async with planner_and_client() as (_, client):
            first = Targets(model="m", ttft_s=0.5, itl_s=0.05)
            other = Targets(model="n", ttft_s=1.0)
            assert await client.set_targets(first, timeout_s=5) == first
            await client.set_targets(other, timeout_s=5)
            second = Targets(model="m", ttft_s=0.25)
            await client.set_targets(second, timeout_s=5)
            assert (await client.get_plan(timeout_s=5)).targets == (second, other)
            assert (await client.get_plan(model="n", timeout_s=5)).targets == (other,)
            with pytest.raises(InvalidRequestError) as refusal:
                await client.set_targets(Targets(model="m", itl_s=0.0), timeout_s=5)
            assert refusal.value.field == "targets.itl"
            assert (await client.get_plan(timeout_s=5)).targets == (second, other)

    run_virtual(story())


def test_a_watch_sends_the_newest_plan_and_each_later_one():
    """A watch sends the newest plan at once and each later one when it is published. It ends with an error when the planner stops."""

    async def story() -> None:
        async with planner_and_client() as (planner, client), aclosing(client.watch_plans()) as plans:
            first = await anext(plans)
            assert first.problems == ("nothing has been observed yet",)
            later = asyncio.ensure_future(anext(plans))
            await asyncio.sleep(1.0)
            assert not later.done()
            observed = await planner.observe()
            assert (await later).observed_at_s == pytest.approx(observed.observed_at_s, abs=1e-6)
            planner.end_watches()
            with pytest.raises(UnavailableError) as end:
                await anext(plans)
            assert end.value.reason == "planner_stopping"

    run_virtual(story())
