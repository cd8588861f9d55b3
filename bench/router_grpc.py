"""Asks a router through gRPC: `python -m bench.router --grpc`. The router is a process of its own, this is a frontend's end.

One Route stream, written as the frontend's link writes it (`kvmesh.rpc.router_stream`): asks at once, reports in bundles. Open loop:
asks come at random (Poisson) times whatever was answered; each placed request reports what a frontend reports, prefilled,
first token and finished. Latency counts from the ask's call into the link to the decoded placement, so it contains this
process's share; `late` is how long after its time this process came to make the call. A thread keeps the time: event loops wake
to the millisecond only.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.noise import busy_core_s, calibration_ms
from bench.processes import process_use
from bench.router import BLOCK, PROMPTS, SEED, make_prompts
from bench.services import ROOT
from bench.table import render
from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.core import Ask, ReportKind
from kvmesh.lifecycle import run
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.codec.router import Report, from_placement
from kvmesh.rpc.router_link import RouterLinkSettings
from kvmesh.rpc.router_stream import RouterStream
from kvmesh.rpc.settings import RpcSettings

WARM_UP_S = 0.5
CONNECT_TIMEOUT_S = 10.0
REPORTS = ((0.010, ReportKind.PREFILLED), (0.015, ReportKind.FIRST_TOKEN), (0.1, ReportKind.FINISHED))
"""What is told of each request, and when, from its placement on."""
COLUMNS = (
    *("workers", "blocks", "asks/s", "p50 ms", "p90 ms", "p99 ms", "late p99 ms", "refused"),
    *("router us CPU/ask", "frontend us CPU/ask", "loop ms", "others"),
)


@dataclass(slots=True)
class Load:
    """Asks on one stream, and what came of them."""

    stream: RouterStream
    prompts: Sequence[Sequence[int]]
    asked_at: dict[int, float] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)
    asks: int = 0
    refused: int = 0
    is_measuring: bool = False

    def ask(self, due_at: float) -> None:
        """The next ask."""
        self.asks += 1
        hashes = self.prompts[self.asks % PROMPTS]
        ask = Ask(
            request_id=f"chatcmpl-{self.asks:024d}",
            model="demo",
            prompt_tokens=len(hashes) * BLOCK + 5,
            block_hashes=hashes,
            block_size_tokens=BLOCK,
            expected_output_tokens=128,
            timeout_s=600.0,
        )
        now = time.perf_counter()
        self.lateness_s.append(now - due_at)
        self.asked_at[self.asks] = now
        self.stream.ask(self.asks, ask)

    def on_message(self, stream: RouterStream, message: pb.RouteResponse) -> None:
        """An answer."""
        if message.WhichOneof("kind") != "placement":
            self.refused += message.WhichOneof("kind") == "refusal"
            return
        from_placement(message.placement)
        ask_id = message.placement.ask_id
        self.latencies_s.append(time.perf_counter() - self.asked_at.pop(ask_id))
        loop = asyncio.get_running_loop()
        for after_s, kind in REPORTS:
            loop.call_later(after_s, stream.report, ask_id, Report(kind=kind, elapsed_s=after_s))

    def begin(self) -> None:
        """What was so far does not count."""
        self.latencies_s.clear()
        self.lateness_s.clear()
        self.refused = 0


def keep_time(loop: asyncio.AbstractEventLoop, load: Load, rate: float, stop: threading.Event) -> None:
    """Calls `load.ask` in the loop at random times."""
    generator = random.Random(SEED)
    due_at = time.perf_counter()
    while not stop.is_set():
        due_at += generator.expovariate(rate)
        if (wait_s := due_at - time.perf_counter()) > 0:
            time.sleep(wait_s)
        loop.call_soon_threadsafe(load.ask, due_at)


@asynccontextmanager
async def router_process(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """Its address and process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.router_process", *arguments), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):
            yield f"127.0.0.1:{int(await process.stdout.readline())}", process.pid
    finally:
        process.kill()
        await process.wait()


async def measure(workers: int, blocks: int, depths: int, rate: float, for_s: float, *, is_bare: bool) -> list[str]:
    """One row."""
    arguments = ["--workers", str(workers), "--blocks", str(blocks), "--depths", str(depths)]
    async with router_process(*arguments, *(["--bare"] if is_bare else [])) as (address, pid):
        channels = ChannelPool(RpcSettings())
        call = RouterServiceStub(channels.channel(address)).Route()
        stream = RouterStream(call, "router", "bench", report_delay_s=RouterLinkSettings().report_delay_s)
        load = Load(stream, make_prompts(blocks))
        standing = asyncio.Event()
        reading = asyncio.create_task(
            stream.run(lambda _: standing.set(), load.on_message, connect_timeout_s=CONNECT_TIMEOUT_S)
        )
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await standing.wait()
        stop = threading.Event()
        loop_ms = calibration_ms()
        pacing = threading.Thread(target=keep_time, args=(asyncio.get_running_loop(), load, rate, stop))
        pacing.start()
        try:
            await asyncio.sleep(WARM_UP_S)
            load.begin()
            busy_s, router_s, own_s, began = (
                busy_core_s(),
                process_use(pid).cpu_s,
                time.process_time(),
                time.perf_counter(),
            )
            await asyncio.sleep(for_s)
            wall_s = time.perf_counter() - began
            router_s, own_s = process_use(pid).cpu_s - router_s, time.process_time() - own_s
            others = max(0.0, (busy_core_s() - busy_s - router_s - own_s) / wall_s)
            latencies, lateness = sorted(load.latencies_s), sorted(load.lateness_s)
        finally:
            stop.set()
            pacing.join()
            stream.give_up()
            await reading
            await channels.aclose()
    answered = max(1, len(latencies))
    return [
        "bare gRPC" if is_bare else str(workers),
        str(blocks),
        f"{len(latencies) / wall_s:.0f}",
        *(f"{1e3 * at(latencies, part):.2f}" for part in (0.5, 0.9, 0.99)),
        f"{1e3 * at(lateness, 0.99):.2f}",
        str(load.refused),
        f"{1e6 * router_s / answered:.0f}",
        f"{1e6 * own_s / answered:.0f}",
        f"{max(loop_ms, calibration_ms()):.1f}",
        f"{others:.2f}",
    ]


def at(values: Sequence[float], part: float) -> float:
    """The value below which so large a part is."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main(workers: Sequence[int], blocks: Sequence[int], depths: int, rate: float, for_s: float) -> None:
    """The table, one row for gRPC alone per prompt length before it."""
    lines = []
    for length in blocks:
        for number in (0, *workers):
            lines.append(run(measure(number, length, depths, rate, for_s, is_bare=not number)))
            print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(f"asks through gRPC, open loop at {rate:,.0f}/s; `loop ms` and `others` as for the load scenarios\n")
    print(render(COLUMNS, lines))
