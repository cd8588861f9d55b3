"""Measures the delay that a client sees when its answer continues on another worker: `python -m bench.migration`.

Streams run on three simulated decode workers at 20 ms a step, with and without prefill workers. In each round the benchmark kills one decode
worker in the middle of the answers; `kvmesh up` restarts it. A stream of that worker has a gap, from its last token before the kill to its first
token after it. In the same rounds it sends fresh requests whose prompts are as long as the prompt and tokens of such an answer. Their time to
first token is the cost of any new placement. Neither prompt is cached.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import aiohttp

from bench.figures import percentiles
from bench.mesh import MeshKind, Served, running_mesh
from bench.noise import calibration_ms
from bench.table import render
from bench.worker_restart import decode_pids
from kvmesh.discovery.base import DECODE
from kvmesh.lifecycle import run

WORKERS, STREAMS = 3, 9
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 100
KILLED_AFTER = 30
"""Tokens that each stream has at the kill."""
FRESH = 3
"""Fresh requests in a round."""
SETTLE_S = 0.7
"""Time from the registration of the new worker until routers place requests on it."""
ENGINE = (
    *("--simulated-time-factor", "1", "--simulated-profile-base-s", "0.02", "--simulated-eos-after-tokens", "0"),
    *("--simulated-profile-per-decode-request-s", "0"),
)
# Each restart counts as the first one, so that all delays before a restart are equally short.
UP = ("--decode", str(WORKERS), "--no-planner", "--restart-window-s", "0.1")
KINDS = (
    MeshKind(name="decode workers only", engine_argv=ENGINE, prefills=0, up_flags=UP),
    MeshKind(name="2 prefill workers", engine_argv=ENGINE, prefills=2, up_flags=UP),
)
COLUMNS = (
    *("mesh", "kills", "continued", "failed", "gap p50 ms", "p99", "fresh TTFT p50 ms", "p99"),
    *("p50 - p50 ms", "undisturbed gap p99 ms"),
)


@dataclass(slots=True, kw_only=True)
class Costs:
    """Measurements over all rounds of a mesh, in seconds."""

    kills: int = 0
    gaps_s: list[float] = field(default_factory=list)
    undisturbed_gaps_s: list[float] = field(default_factory=list)
    """The longest gap of each stream that was not on the killed worker."""
    fresh_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, name: str) -> Sequence[str]:
        gaps, fresh, undisturbed = (
            percentiles(each or [0.0]) for each in (self.gaps_s, self.fresh_s, self.undisturbed_gaps_s)
        )
        times = (gaps["p50"], gaps["p99"], fresh["p50"], fresh["p99"], gaps["p50"] - fresh["p50"], undisturbed["p99"])
        counts = (str(self.kills), str(len(self.gaps_s)), str(len(self.failures)))
        return (name, *counts, *(f"{each:.0f}" for each in times))


@dataclass(slots=True, kw_only=True)
class Migrations:
    """Runs rounds on one mesh."""

    served: Served
    session: aiohttp.ClientSession
    random: Random
    costs: Costs = field(default_factory=Costs)

    async def round(self) -> None:
        streams: list[list[float]] = [[] for _ in range(STREAMS)]
        running = [asyncio.create_task(self._stream(PROMPT_TOKENS, OUTPUT_TOKENS, times)) for times in streams]
        while min(map(len, streams)) < KILLED_AFTER and not any(task.done() for task in running):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        pids = decode_pids(self.served.beside["up"])
        before = await self._continued()
        killed_s = time.perf_counter()
        os.kill(self.random.choice(pids), signal.SIGKILL)
        self.costs.kills += 1
        await asyncio.gather(*running)
        continued = int(await self._continued() - before)
        gaps = sorted((_gap_at(killed_s, times) for times in streams), reverse=True)
        self.costs.gaps_s += gaps[:continued]
        self.costs.undisturbed_gaps_s += gaps[continued:]
        await self.wait_whole()

    async def send_fresh(self) -> None:
        """Sends fresh requests while as many streams run as in a round."""
        beside = [asyncio.create_task(self._stream(PROMPT_TOKENS, OUTPUT_TOKENS, [])) for _ in range(STREAMS)]
        await asyncio.sleep(0.5)
        for _ in range(FRESH):
            times: list[float] = []
            began_s = time.perf_counter()
            await self._stream(PROMPT_TOKENS + KILLED_AFTER, 2, times)
            self.costs.fresh_s += [each - began_s for each in times[:1]]
        await asyncio.gather(*beside)

    async def _stream(self, prompt_tokens: int, output_tokens: int, times: list[float]) -> None:
        """Runs one stream. Appends the arrival time of each event with a token to `times`."""
        prompt = [self.random.randrange(300, 2000) for _ in range(prompt_tokens)]
        body = {"model": "bench", "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        try:
            async with self.session.post(
                f"{self.served.url}/v1/completions", json={**body, "return_token_ids": True}
            ) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
                        if b'"error"' in line:
                            self.costs.failures.append(line.decode()[:200])
        except aiohttp.ClientError as error:
            self.costs.failures.append(type(error).__name__)

    async def _continued(self) -> float:
        async with self.session.get(f"{self.served.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        name = "kvmesh_frontend_continued_requests_total"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    async def wait_whole(self) -> None:
        """Waits until the worker has been replaced."""
        assert self.served.target is not None
        registry = self.served.target.registry()
        try:
            async for view in registry.watch(DECODE):
                if sum(each.takes_requests for each in view.instances) >= WORKERS:
                    break
        finally:
            await registry.aclose()
        await asyncio.sleep(SETTLE_S)


def _gap_at(at_s: float, times: Sequence[float]) -> float:
    """Returns the longest gap that ends after a moment. A gap that began before it counts in full."""
    return max((after - before for before, after in pairwise(times) if after >= at_s), default=0.0)


async def measure(kind: MeshKind, until_s: float) -> Costs:
    """Runs rounds until the next one would end after `until_s` of the monotonic clock; at least one round."""
    async with running_mesh(kind) as served, aiohttp.ClientSession() as session:
        migrations = Migrations(served=served, session=session, random=Random(1))
        await migrations.wait_whole()
        await migrations.send_fresh()  # Opens the connections between the workers.
        migrations.costs.fresh_s.clear()
        longest_s = began_s = 0.0
        while began_s + 2 * longest_s < until_s:
            began_s = time.monotonic()
            await migrations.send_fresh()
            await migrations.round()
            longest_s = max(longest_s, time.monotonic() - began_s)
        return migrations.costs


def main() -> int:
    """Returns 0 if no request failed and answers continued."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="total time, including the start of both meshes")
    options = parser.parse_args()
    before_ms = calibration_ms()
    ends_s = time.monotonic() + 60 * options.minutes
    costs: dict[str, Costs] = {}
    for left, kind in zip(range(len(KINDS), 0, -1), KINDS, strict=True):
        now_s = time.monotonic()
        costs[kind.name] = run(measure(kind, now_s + (ends_s - now_s) / left))
    print(render(COLUMNS, [each.row(name) for name, each in costs.items()]))
    print(f"a fixed loop took {before_ms:.1f} ms before and {calibration_ms():.1f} ms after the run")
    for each in costs.values():
        print("\n".join(each.failures))
    return 1 if any(each.failures or not each.gaps_s for each in costs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
