"""Router and planner as the processes they are: `python -m services.router`, `python -m services.planner`."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest

from kvmesh.clock import SystemClock
from kvmesh.discovery.base import PLANNER, ROUTER, Instance
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.planner_client import GrpcPlannerClient
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.settings import RpcSettings
from tests.integration.workers import ToldWorker
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask

START_S_MAX = PATIENCE_S


@asynccontextmanager
async def process(service: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A service's process; killed at the end if it still runs."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{service}", *flags, env={**os.environ}
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def passing(registry: ConsulRegistry, service: str) -> Instance:
    """The service's only instance, once it passes its checks."""
    async with asyncio.timeout(START_S_MAX):
        async for view in registry.watch(service):
            for instance in view.instances:
                if instance.takes_requests:
                    return instance
    raise AssertionError("a watch does not end")


@pytest.mark.timeout(150)
async def test_processes_serve_and_stop():
    """They register, answer, and end with status 0 on SIGTERM in spite of open streams; the registry forgets them."""
    async with AsyncExitStack() as stack:
        agent = EmbeddedAgent(AgentSettings())
        await agent.start()
        stack.push_async_callback(agent.aclose)
        registry = ConsulRegistry(DiscoverySettings(address=agent.address))
        stack.push_async_callback(registry.aclose)
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        flags = ("--discovery-address", agent.address, "--telemetry-log-level", "warning", "--rpc-grace-s", "300")
        router = await stack.enter_async_context(process("router", *flags, "--policy", "round_robin"))
        planner = await stack.enter_async_context(process("planner", *flags, "--interval-s", "0.2"))
        worker = ToldWorker("d1", "decode")
        await worker.start(registry)
        stack.push_async_callback(worker.die)

        router_instance = await passing(registry, ROUTER)
        link = GrpcRouterLink(registry, channels, frontend_id="frontend-1", clock=SystemClock(), generator=Random(1))
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(START_S_MAX):
            while not await GrpcRouterClient(channels, router_instance.address).list_workers(timeout_s=PATIENCE_S):
                await asyncio.sleep(0.05)
        placed = await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        assert placed.placement.decode.worker_id == "d1"
        assert placed.placement.reasons == ("no_prefill_pool", "round_robin")

        planner_instance = await passing(registry, PLANNER)
        client = GrpcPlannerClient(channels, planner_instance.address)
        async with asyncio.timeout(START_S_MAX):
            while (plan := await client.get_plan(timeout_s=PATIENCE_S)).observed_at_s is None or not plan.problems:
                await asyncio.sleep(0.05)
        assert (plan.mode, plan.source) == ("observe", "scrape")
        # The worker of this test has no metrics port; router and planner have, and are scraped.
        assert plan.problems == ("kvmesh-decode d1 has no metrics port",)

        for stopping in (router, planner):
            stopping.send_signal(signal.SIGTERM)
        # Well below the time that the servers would give an open stream.
        async with asyncio.timeout(PATIENCE_S):
            assert await router.wait() == 0
            assert await planner.wait() == 0
        assert (await registry.instances(ROUTER)).instances == ()
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("service", ["router", "planner"])
async def test_help_and_wrong_settings(service):
    """`--help` explains every setting; unknown names are all reported, with status 2."""
    async with process(service, "--help") as helping:
        assert await helping.wait() == 0
    async with process(service, "--no-such-flag", "1", "--telemetry-log-level", "loud") as wrong:
        assert await wrong.wait() == 2
