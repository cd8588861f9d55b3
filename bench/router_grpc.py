"""Measures placements over gRPC: `python -m bench.router --grpc`. The router is a separate process; this process acts as the frontends.

Placement requests go to one router over the frontends' links (`kvmesh.rpc.router.link`) in rotation, with one task per request, as in a
frontend. The load is an open loop: requests are sent at even or random (Poisson) times. Each placed request sends a frontend's reports:
prefilled, first token, finished. Latency counts from before the task is created until `place` returns, so it includes this process's share.
`late` is the delay between a request's due time and the call.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from bench.noise import busy_core_s, calibration_ms
from bench.pacing import Arrivals, Pacer, gaps_s
from bench.processes import process_use
from bench.router import BLOCK, PROMPTS, SEED, make_prompts
from bench.services import ROOT
from bench.table import render
from kvmesh.clock import SystemClock
from kvmesh.core import Ask, Report, ReportKind
from kvmesh.discovery.base import Health, Instance, View
from kvmesh.errors import MeshError
from kvmesh.lifecycle import run
from kvmesh.lifecycle.process import collect_rarely
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.settings import RpcSettings

WARM_UP_S = 0.5
CONNECT_TIMEOUT_S = 10.0
REPORTS = ((0.010, ReportKind.PREFILLED), (0.015, ReportKind.FIRST_TOKEN), (0.1, ReportKind.FINISHED))
"""The reports of each request, with their time after placement."""
COLUMNS = (
    *("workers", "blocks", "arrivals", "asks/s", "p50 ms", "p90 ms", "p99 ms", "late p99 ms", "refused"),
    *("messages/ask", "router us CPU/ask", "frontend us CPU/ask", "loop ms", "others"),
)


@dataclass(frozen=True, slots=True)
class OneRouter:
    """A registry with one router."""

    address: str

    async def watch(self, service: str) -> AsyncIterator[View]:
        host, _, port = self.address.partition(":")
        instance = Instance(
            service=service,
            instance_id="router",
            host=host,
            port=int(port),
            meta={},
            tags=(),
            health=Health.PASSING,
            is_draining=False,
        )
        yield View(service=service, index=1, instances=[instance])
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. `is_bare`: the server sends fixed answers."""

    workers: int
    blocks: int
    depths: int
    arrivals: Arrivals
    frontends: int = 1
    is_bare: bool = False


@dataclass(slots=True, kw_only=True)
class Load:
    """Sends placement requests on links and records the results."""

    links: Sequence[GrpcRouterLink]
    prompts: Sequence[Sequence[int]]
    latencies_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)
    asking: set[asyncio.Task[None]] = field(default_factory=set)
    asks: int = 0
    refused: int = 0

    @property
    def messages_sent(self) -> int:
        """Returns the messages sent on all links."""
        return sum(link.messages_sent for link in self.links)

    def ask(self, due_at: float) -> None:
        """Starts the next placement request in a task."""
        now = time.perf_counter()
        self.lateness_s.append(now - due_at)
        task = asyncio.create_task(self._ask(self.links[self.asks % len(self.links)], self.next_ask(), now))
        self.asking.add(task)
        task.add_done_callback(self.asking.discard)

    def next_ask(self) -> Ask:
        self.asks += 1
        hashes = self.prompts[self.asks % PROMPTS]
        return Ask(
            request_id=f"chatcmpl-{self.asks:024d}",
            model="demo",
            prompt_tokens=len(hashes) * BLOCK + 5,
            block_hashes=hashes,
            block_size_tokens=BLOCK,
            expected_output_tokens=128,
            timeout_s=600.0,
        )

    async def _ask(self, link: GrpcRouterLink, ask: Ask, asked_at: float) -> None:
        try:
            placed = await link.place(ask, timeout_s=CONNECT_TIMEOUT_S)
        except MeshError:
            self.refused += 1
            return
        self.latencies_s.append(time.perf_counter() - asked_at)
        loop = asyncio.get_running_loop()
        for after_s, kind in REPORTS:
            loop.call_later(after_s, partial(link.report_nowait, placed.ask_id, Report(kind=kind, elapsed_s=after_s)))

    def begin(self) -> None:
        """Discards the results so far."""
        self.latencies_s.clear()
        self.lateness_s.clear()
        self.refused = 0


@asynccontextmanager
async def router_process(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Starts a router process; yields its address and process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.router_process", *arguments), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            port = int(await process.stdout.readline())
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def frontends(address: str, count: int) -> AsyncIterator[Sequence[GrpcRouterLink]]:
    """Opens one link per frontend, each with its own connection."""
    pools = [ChannelPool(settings=RpcSettings()) for _ in range(count)]
    links = [
        GrpcRouterLink(
            OneRouter(address),  # type: ignore[arg-type]  # the link uses no other method of a registry
            channels,
            frontend_id=f"bench-{number}",
            clock=SystemClock(),
            generator=random.Random(SEED + number),
            settings=RouterLinkSettings(routers=1),
        )
        for number, channels in enumerate(pools)
    ]
    running = [asyncio.create_task(link.run()) for link in links]
    try:
        yield links
    finally:
        for link in links:
            await link.aclose()
        await asyncio.wait(running)
        for channels in pools:
            await channels.aclose()


async def measure(case: Case, rate: float, for_s: float) -> list[str]:
    arguments = ["--workers", str(case.workers), "--blocks", str(case.blocks), "--depths", str(case.depths)]
    async with (
        router_process(*arguments, *(["--bare"] if case.is_bare else [])) as (address, pid),
        frontends(address, case.frontends) as links,
    ):
        load = Load(links=links, prompts=make_prompts(case.blocks))
        for link in links:
            await link.place(load.next_ask(), timeout_s=CONNECT_TIMEOUT_S)
        collect_rarely()  # As a frontend does.
        loop_ms = calibration_ms()
        pacer = Pacer(gaps_s(case.arrivals, rate, random.Random(SEED)), load.ask)
        try:
            await asyncio.sleep(WARM_UP_S)
            load.begin()
            messages, busy_s, router_s = load.messages_sent, busy_core_s(), process_use(pid).cpu_s
            own_s, began = time.process_time(), time.perf_counter()
            await asyncio.sleep(for_s)
            wall_s = time.perf_counter() - began
            router_s, own_s = process_use(pid).cpu_s - router_s, time.process_time() - own_s
            others = max(0.0, (busy_core_s() - busy_s - router_s - own_s) / wall_s)
            messages, refused = load.messages_sent - messages, load.refused
            latencies, lateness = sorted(load.latencies_s), sorted(load.lateness_s)
        finally:
            pacer.close()
    answered = max(1, len(latencies))
    return [
        "bare gRPC" if case.is_bare else str(case.workers),
        str(case.blocks),
        case.arrivals.value,
        f"{len(latencies) / wall_s:.0f}",
        *(f"{1e3 * at(latencies, part):.2f}" for part in (0.5, 0.9, 0.99)),
        f"{1e3 * at(lateness, 0.99):.2f}",
        str(refused),
        f"{messages / answered:.2f}",
        f"{1e6 * router_s / answered:.0f}",
        f"{1e6 * own_s / answered:.0f}",
        f"{max(loop_ms, calibration_ms()):.1f}",
        f"{others:.2f}",
    ]


def at(values: Sequence[float], part: float) -> float:
    """Returns the quantile."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main(
    workers: Sequence[int],
    blocks: Sequence[int],
    depths: int,
    *,
    rate: float,
    for_s: float,
    arrivals: Sequence[Arrivals],
    frontends: int,
) -> None:
    """Prints the table. The rows of gRPC alone come first, per prompt length and arrivals."""
    lines = []
    for length, kind, number in itertools.product(blocks, arrivals, (0, *workers)):
        case = Case(
            workers=number, blocks=length, depths=depths, arrivals=kind, frontends=frontends, is_bare=not number
        )
        lines.append(run(measure(case, rate, for_s)))
        print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(
        f"asks of {frontends} frontend(s) through gRPC, open loop at {rate:,.0f}/s; `loop ms` and `others` as for the load scenarios\n"
    )
    print(render(COLUMNS, lines))
