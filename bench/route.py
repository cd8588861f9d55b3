"""Measures Route alone: real routers, one frontend link, paced placement requests and reports, no workers.

python -m bench.route --routers 2 --rate 400 --seconds 4 --report-delay-s 0.01
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from bench.processes import process_use
from bench.services import DEMO_MODEL, ROOT
from kvmesh.clock import SystemClock
from kvmesh.core import Ask, Report, ReportKind
from kvmesh.discovery.base import ROUTER
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.errors import MeshError
from kvmesh.lifecycle import run
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.settings import RpcSettings

PROMPT_BLOCKS = 32
BLOCK_SIZE_TOKENS = 16
REPORTS_S = ((ReportKind.PREFILLED, 0.02), (ReportKind.FIRST_TOKEN, 0.005), (ReportKind.FINISHED, 0.1))
"""The reports of a request, each with the seconds since the previous one."""


class _Load:
    """Starts `rate` requests per second and sends all reports of each."""

    def __init__(self, link: GrpcRouterLink) -> None:
        self._link = link
        self._generator = Random(1)
        self.done = self.failed = 0
        self.place_s: list[float] = []

    async def run(self, rate: float, seconds: float) -> None:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
                tasks.create_task(self._request(number))

    async def _request(self, number: int) -> None:
        hashes = [self._generator.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
        tokens = PROMPT_BLOCKS * BLOCK_SIZE_TOKENS + 1
        ask = Ask(
            request_id=f"bench-{number}",
            model="demo",
            prompt_tokens=tokens,
            block_hashes=hashes,
            block_size_tokens=BLOCK_SIZE_TOKENS,
        )
        began_s = time.perf_counter()
        try:
            placed = await self._link.place(ask, timeout_s=10.0)
        except MeshError:
            self.failed += 1
            return
        self.place_s.append(time.perf_counter() - began_s)
        for kind, after_s in REPORTS_S:
            await asyncio.sleep(after_s)
            report = Report(kind=kind, elapsed_s=time.perf_counter() - began_s)
            self._link.report_nowait(placed.ask_id, report)
        self.done += 1


@asynccontextmanager
async def _process(service: str, registry: str, *argv: str) -> AsyncIterator[int]:
    flags = ("--discovery-address", registry, "--telemetry-log-level", "error", *argv)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", f"services.{service}", *flags, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


async def measure_route(routers: int, *, rate: float, seconds: float, report_delay_s: float) -> dict[str, Any]:
    """Measures the cost of a request on both sides of Route."""
    async with AsyncExitStack() as stack:
        agent = EmbeddedAgent(AgentSettings())
        await agent.start()
        stack.push_async_callback(agent.aclose)
        registry = ConsulRegistry(DiscoverySettings(address=agent.address))
        stack.push_async_callback(registry.aclose)
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        worker = ("--engine", "simulated", "--model", str(DEMO_MODEL), "--simulated-kv-transport", "none")
        await stack.enter_async_context(_process("decode", agent.address, *worker))
        pids = [await stack.enter_async_context(_process("router", agent.address)) for _ in range(routers)]
        await _wait_routers(registry, channels, routers)
        settings = RouterLinkSettings(report_delay_s=report_delay_s)
        link = GrpcRouterLink(
            registry, channels, frontend_id="bench", clock=SystemClock(), generator=Random(1), settings=settings
        )
        running = asyncio.create_task(link.run())
        load = _Load(link)
        await load.run(rate, 1.0)  # Meanwhile all streams open.
        load.done = 0
        load.place_s.clear()
        messages, own_s, router_s = link.messages_sent, time.process_time(), [process_use(pid).cpu_s for pid in pids]
        await load.run(rate, seconds)
        messages, own_s = link.messages_sent - messages, time.process_time() - own_s
        router_s = [process_use(pid).cpu_s - before for pid, before in zip(pids, router_s, strict=True)]
        await link.aclose()
        await asyncio.wait([running])
    places = sorted(load.place_s)
    return {
        "routers": routers,
        "requests": load.done,
        "failed": load.failed,
        "messages_per_request": messages / load.done,
        "link_cpu_us_per_request": 1e6 * own_s / load.done,
        "routers_cpu_us_per_request": 1e6 * sum(router_s) / load.done,
        "place_p50_ms": 1e3 * places[len(places) // 2],
        "place_p99_ms": 1e3 * places[len(places) * 99 // 100],
    }


async def _wait_routers(registry: ConsulRegistry, channels: ChannelPool, count: int) -> None:
    """Waits until all routers see the worker."""
    async with asyncio.timeout(60):
        while True:
            found = [each for each in (await registry.instances(ROUTER)).instances if each.takes_requests]
            views = [await GrpcRouterClient(channels, each.address).list_workers(timeout_s=5.0) for each in found]
            if len(found) == count and all(view and not view[0].excluded_by for view in views):
                return
            await asyncio.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--report-delay-s", type=float, default=RouterLinkSettings().report_delay_s)
    given = parser.parse_args(argv)
    print(
        json.dumps(
            run(
                measure_route(
                    given.routers, rate=given.rate, seconds=given.seconds, report_delay_s=given.report_delay_s
                )
            ),
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
