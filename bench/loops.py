"""Closed and open load loops, and the measurement around them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping

from bench.figures import LoadReport
from bench.noise import Noise, busy_core_s, calibration_ms
from bench.processes import process_use
from bench.target import LoadRequest, LoadResult, Target

IN_FLIGHT_MAX = 4096


async def closed_loop(target: Target, requests: Iterator[LoadRequest], concurrency: int) -> list[LoadResult]:
    """Runs `concurrency` senders with one request in flight each, until the requests end."""
    results: list[LoadResult] = []

    async def sender() -> None:
        for request in requests:
            results.append(await target.send(request, time.perf_counter()))  # noqa: PERF401 (results are appended as requests end)

    await asyncio.gather(*(sender() for _ in range(concurrency)))
    return results


async def open_loop(
    target: Target, arrivals: AsyncIterator[tuple[LoadRequest, float]], *, in_flight_max: int = IN_FLIGHT_MAX
) -> list[LoadResult]:
    """Starts one task per arrival, up to `in_flight_max` at a time. Times count from the intended arrival."""
    results: list[LoadResult] = []
    room = asyncio.Semaphore(in_flight_max)

    async def send(request: LoadRequest, at_s: float) -> None:
        try:
            results.append(await target.send(request, at_s))
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        async for request, at_s in arrivals:
            await room.acquire()
            group.create_task(send(request, at_s))
    return results


async def arrive(requests: Iterator[tuple[LoadRequest, float]]) -> AsyncIterator[tuple[LoadRequest, float]]:
    """Yields each request at its offset in seconds from now."""
    start_s = time.perf_counter()
    for request, offset_s in requests:
        await asyncio.sleep(max(0.0, start_s + offset_s - time.perf_counter()))
        yield request, start_s + offset_s


def poisson(requests: Iterator[LoadRequest], rate_per_s: float, seed: int) -> Iterator[tuple[LoadRequest, float]]:
    """Yields requests at random times with exponential gaps. Times are in seconds from the start."""
    rng = random.Random(seed)
    offset_s = 0.0
    for request in requests:
        offset_s += rng.expovariate(rate_per_s)
        yield request, offset_s


def for_seconds(requests: Iterator[LoadRequest], seconds: float) -> Iterator[LoadRequest]:
    """Yields requests until `seconds` after the first one."""
    end_s = time.perf_counter() + seconds
    for request in requests:
        if time.perf_counter() >= end_s:
            return
        yield request


async def measure(run: Awaitable[list[LoadResult]], watch: Mapping[str, int]) -> LoadReport:
    """Runs a loop and measures CPU and memory of the watched process trees, and the machine's noise."""
    calibration_before_ms = calibration_ms()
    before = {name: process_use(pid) for name, pid in watch.items()}
    busy_before_s, client_before_s, start_s = busy_core_s(), time.process_time(), time.perf_counter()
    results = await run
    wall_s = time.perf_counter() - start_s
    client_cpu_s, busy_s = time.process_time() - client_before_s, busy_core_s() - busy_before_s
    after = {name: process_use(pid) for name, pid in watch.items()}
    cpu_s = {name: after[name].cpu_s - before[name].cpu_s for name in watch}
    others_s = busy_s - client_cpu_s - sum(cpu_s.values())
    return LoadReport(
        results=results,
        wall_s=wall_s,
        client_cpu_s=client_cpu_s,
        cpu_s=cpu_s,
        rss_mib={name: after[name].rss_mib for name in watch},
        noise=Noise(
            calibration_ms=max(calibration_before_ms, calibration_ms()), others_cores=max(0.0, others_s / wall_s)
        ),
    )
