"""Router and planner as real processes: `python -m services.router`, `python -m services.planner`."""

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
    """Starts a service's process, and kills it at the end if it still runs."""
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
    """Returns the service's only instance once it passes its checks."""
    async with asyncio.timeout(START_S_MAX):
        async for view in registry.watch(service):
            for instance in view.instances:
                if instance.takes_requests:
                    return instance
    raise AssertionError("a watch does not end")


async def test_processes_serve_and_stop():
    """Router and planner register, answer, and exit with status 0 on SIGTERM despite open streams. The router deregisters."""
    async with AsyncExitStack() as stack:
        agent = EmbeddedAgent(AgentSettings())
        await agent.start()
        stack.push_async_callback(agent.aclose)
        registry = ConsulRegistry(DiscoverySettings(address=agent.address))
        stack.push_async_callback(registry.aclose)
        channels = ChannelPool(settings=RpcSettings(connect_timeout_s=PATIENCE_S))
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
            # The worker of this test has no metrics port. Router and planner have one, but their first scrape may be late.
            while (plan := await client.get_plan(timeout_s=PATIENCE_S)).observed_at_s is None or plan.problems != (
                "kvmesh-decode d1 has no metrics port",
            ):
                await asyncio.sleep(0.05)
        assert (plan.mode, plan.source) == ("observe", "scrape")

        for stopping in (router, planner):
            stopping.send_signal(signal.SIGTERM)
        # Much less than the grace period for open streams.
        async with asyncio.timeout(PATIENCE_S):
            assert await router.wait() == 0
            assert await planner.wait() == 0
        # The agent runs in this process, and may take the request after the router has stopped waiting for it. Without a request it removes
        # a dead instance after two minutes.
        async with asyncio.timeout(PATIENCE_S):
            while (await registry.instances(ROUTER)).instances:
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("service", ["router", "planner"])
async def test_help_and_wrong_settings(service):
    """`--help` exits with status 0, and unknown settings with status 2."""
    async with process(service, "--help") as helping:
        assert await helping.wait() == 0
    async with process(service, "--no-such-flag", "1", "--telemetry-log-level", "loud") as wrong:
        assert await wrong.wait() == 2
