"""Cancels requests in every phase, through a whole mesh: `python -m tests.chaos.cancels --engine simulated`.

Requests are cancelled at random moments, in three ways: the client closes its connection, the request's deadline passes, or a gRPC client
cancels its call. The load records of both workers show the request's phase, and when its blocks and queue entries are free again. Some requests
run alone, others behind requests that fill the prefill worker, the decode worker or the router. The figures include the time until a load record
arrives, about 10 ms.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp

from bench.cancel import PROMISE_S, Side
from bench.figures import percentiles
from kvmesh.client import AsyncClient
from kvmesh.core import LoadRecord, SamplingParams, WorkerRef
from kvmesh.discovery.base import DECODE, PREFILL, ROUTER
from kvmesh.errors import MeshError
from tests.chaos.phases import NO_QUEUE, is_freed, phase_of
from tests.integration.mesh import RunningMesh, grpc_address, metrics_text, running_mesh, worker_metric
from tests.patience import PATIENCE_S

WAYS = ("client gone", "deadline", "call")
BEHIND = ("nothing", "prefill", "decode", "router")
PROMPT_TOKENS, ANSWER_TOKENS = 1200, 60
FILLED_S = 3.0
CATCHES = 20
"""Attempts to cancel a request on a given side. Load records arrive every 10 ms and may miss a shorter phase."""
RUNNING = 2
"""Requests that run at once on a worker."""
BOUNDS_MS = (10, 25, 50, 100, 250, 500, 1000)
COMMON = ("--greeting", "", "--no-planner", "--prefill", "1", "--decode", "1")
# A worker runs two requests at once and holds four; further ones wait in the router.
LIMITS = "--router-args=--requests-per-decode-max 4 --policy round_robin"
SIMULATED = (
    "--simulated-running-requests-max 2 --simulated-profile-base-s 0.01 --simulated-profile-per-prefill-token-s 0.0004"
    " --simulated-kv-transfer-pause-s 0.2 --no-worker-warm-up --simulated-eos-after-tokens 0"
)
ENGINES: Mapping[str, Sequence[str]] = {
    "simulated": ("--engine", "simulated", f"--engine-args={SIMULATED}"),
    "rendezvous": ("--engine", "simulated", f"--engine-args={SIMULATED} --simulated-handoff rendezvous"),
    "vllm": ("--engine", "vllm", "--engine-args=--vllm-running-requests-max 2"),
    "sglang": ("--engine", "sglang", "--engine-args=--sglang-dtype float32 --sglang-running-requests-max 2"),
}
READY_S = {"simulated": 90.0, "rendezvous": 90.0, "vllm": 240.0, "sglang": 300.0}


@dataclass(slots=True)
class Times:
    """Seconds from a cancel to freed blocks, by phase and side, and how often each way was used."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, phase: str, side: str, seconds: float) -> None:
        self.seconds.setdefault((phase, side), []).append(seconds)

    @property
    def sides(self) -> set[str]:
        """The sides on which cancelled requests were."""
        return {side for _, side in self.seconds}

    def late(self) -> int:
        """Returns the number of cancels that took longer than promised."""
        return sum(each > PROMISE_S for found in self.seconds.values() for each in found)


@dataclass(slots=True)
class Cancels:
    """A running mesh, and watches of its two workers."""

    mesh: RunningMesh
    session: aiohttp.ClientSession
    client: AsyncClient
    sides: Mapping[str, Side]
    random: Random
    times: Times = field(default_factory=Times)
    longest_s: float = 1.0
    """The duration of an undisturbed request."""

    async def warm_up(self) -> None:
        """Runs two undisturbed requests. The first one connects the workers; the second one sets `longest_s`."""
        for _ in range(2):
            began_s = time.perf_counter()
            await self._post(ANSWER_TOKENS, timeout_s=None)
            self.longest_s = time.perf_counter() - began_s

    async def trial(self, way: str, behind: str) -> None:
        """Cancels one request and measures both sides."""
        await self.wait_idle()
        fillers = [asyncio.create_task(each) for each in self._fillers(behind)]
        try:
            await self._wait_filled(behind)
            before = {name: side.load for name, side in self.sides.items()}
            queued = await self._queued_in_router() if behind == "router" else 0
            left_s = self.random.uniform(0.01, self.longest_s if behind == "nothing" else 0.5)
            asking = asyncio.create_task(self._ways[way](left_s))
            await asyncio.sleep(left_s)
            cancelled_s, wall_s = time.perf_counter(), time.time()
            at = {name: side.load for name, side in self.sides.items()}
            is_in_router = behind == "router" and await self._queued_in_router() > queued
            if asking.done() and asking.exception() is None and asking.result():
                return  # The answer was complete before the cancel.
            phase = "queued, router" if is_in_router else phase_of(at, before)
            self.times.ways[way] += 1
            await asyncio.gather(
                self._measure_sides(phase, at, before, cancelled_s, wall_s),
                *([self._measure_router(queued, cancelled_s)] if is_in_router else []),
            )
            with suppress(MeshError, aiohttp.ClientError, TimeoutError, asyncio.CancelledError):
                await asking
        finally:
            for filler in fillers:
                filler.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)

    async def catch(self, name: str) -> bool:
        """Cancels a request as soon as a load record shows it on a side. Returns False if the answer was complete first."""
        await self.wait_idle()
        before = {each: side.load for each, side in self.sides.items()}
        asking = asyncio.create_task(self._post(ANSWER_TOKENS, timeout_s=None))
        seeing = asyncio.create_task(self.sides[name].until(lambda load: not is_freed(load, before[name])))
        try:
            await asyncio.wait((asking, seeing), return_when=asyncio.FIRST_COMPLETED)
            at = {each: side.load for each, side in self.sides.items()}
            if is_freed(at[name], before[name]):
                return False
            cancelled_s, wall_s = time.perf_counter(), time.time()
            asking.cancel()
            self.times.ways["client gone"] += 1
            await self._measure_sides(phase_of(at, before), at, before, cancelled_s, wall_s)
            return True
        finally:
            asking.cancel()
            seeing.cancel()
            await asyncio.gather(asking, seeing, return_exceptions=True)

    async def catch_missing(self) -> None:
        """Cancels a request on each side on which no cancelled request was."""
        for name in sorted(set(self.sides) - self.times.sides):
            for _ in range(CATCHES):
                if await self.catch(name):
                    break

    async def _measure_sides(
        self,
        phase: str,
        at: Mapping[str, LoadRecord],
        before: Mapping[str, LoadRecord],
        cancelled_s: float,
        wall_s: float,
    ) -> None:
        # A side without blocks of the request sends no record for a second.
        holding = [name for name in self.sides if not is_freed(at[name], before[name])]
        await asyncio.gather(
            *(self._measure(name, phase, before[name], cancelled_s, wall_s) for name in holding),
        )

    async def _wait_filled(self, behind: str) -> None:
        """Waits until the fillers run, so that they are not mistaken for the request."""
        if behind == "nothing":
            return
        side = self.sides["prefill" if behind == "prefill" else "decode"]
        waiting = 0 if behind == "decode" else 2
        # A busy machine may miss the moment. Then the request runs alone.
        with suppress(TimeoutError):
            async with asyncio.timeout(FILLED_S):
                await side.until(lambda load: load.running_requests >= RUNNING and _waiting(load) >= waiting)

    async def _measure(self, name: str, phase: str, before: LoadRecord, cancelled_s: float, wall_s: float) -> None:
        side = self.sides[name]
        try:
            async with asyncio.timeout(PATIENCE_S):
                freed_s = await side.until(lambda load: load.taken_at_s >= wall_s and is_freed(load, before))
        except TimeoutError:
            self.times.problems.append(f"{name}, {phase}: not freed after {PATIENCE_S:g} s: {side.load}")
        else:
            self.times.add(phase, name, freed_s - cancelled_s)

    async def _measure_router(self, queued: float, cancelled_s: float) -> None:
        while await self._queued_in_router() > queued:
            await asyncio.sleep(0.005)
        self.times.add("queued, router", "router", time.perf_counter() - cancelled_s)

    async def _queued_in_router(self) -> float:
        registry = self.mesh.target.registry()
        try:
            (router,) = (await registry.instances(ROUTER)).instances
        finally:
            await registry.aclose()
        return worker_metric(
            await metrics_text(router.host, int(router.meta["metrics_port"])), "kvmesh_router_queue_requests"
        )

    def _fillers(self, behind: str) -> Sequence[Coroutine[None, None, bool]]:
        """Returns requests that fill the prefill worker, the decode worker, or both and the router's places."""
        if behind == "prefill":
            return [self._post(2, timeout_s=None, prompt_tokens=1900) for _ in range(4)]
        count = {"nothing": 0, "decode": 2, "router": 4}[behind]
        return [self._post(1500, timeout_s=None, prompt_tokens=40) for _ in range(count)]

    @property
    def _ways(self) -> Mapping[str, Callable[[float], Coroutine[None, None, bool]]]:
        """Returns the ways to cancel. Each returns whether the answer was complete."""
        return {"client gone": self._leave, "deadline": self._pass_deadline, "call": self._cancel_call}

    async def _leave(self, left_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                return await self._post(ANSWER_TOKENS, timeout_s=None)
        return False

    async def _pass_deadline(self, left_s: float) -> bool:
        return await self._post(ANSWER_TOKENS, timeout_s=left_s)

    async def _cancel_call(self, left_s: float) -> bool:
        stream = self.client.generate_stream(
            "demo",
            self._prompt(PROMPT_TOKENS),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
        )
        asyncio.get_running_loop().call_later(left_s, stream.cancel)
        async with stream:
            async for _ in stream:
                pass
        return True

    async def _post(self, max_tokens: int, *, timeout_s: float | None, prompt_tokens: int = PROMPT_TOKENS) -> bool:
        body = {"model": "demo", "prompt": self._prompt(prompt_tokens), "max_tokens": max_tokens, "ignore_eos": True}
        headers = {} if timeout_s is None else {"x-request-timeout": f"{timeout_s:.3f}"}
        async with self.session.post(f"{self.mesh.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status == 200

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(300, 2000) for _ in range(tokens)]

    async def wait_idle(self) -> None:
        """Waits until no block is in use. Records blocks that are neither free nor owned."""
        for name, side in self.sides.items():
            await side.until(lambda load: is_freed(load, NO_QUEUE))
            if side.load.kv_blocks_unaccounted:
                self.times.problems.append(f"{name}: {side.load.kv_blocks_unaccounted} blocks without an owner")


def _waiting(load: LoadRecord) -> int:
    return load.waiting_requests + load.preallocating_requests


@asynccontextmanager
async def cancels(engine: str, directory: Path, seed: int = 1) -> AsyncIterator[Cancels]:
    """Starts the mesh and the watches."""
    async with AsyncExitStack() as stack:
        argv = (*COMMON, *ENGINES[engine], LIMITS)
        mesh = await stack.enter_async_context(running_mesh(directory, *argv, ready_timeout_s=READY_S[engine]))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        registry, channels = mesh.target.registry(), mesh.target.channels()
        stack.push_async_callback(channels.aclose)
        stack.push_async_callback(registry.aclose)
        sides: dict[str, Side] = {}
        for name, service in (("prefill", PREFILL), ("decode", DECODE)):
            while not (found := (await registry.instances(service)).instances):
                await asyncio.sleep(0.1)
            ref = WorkerRef(worker_id=found[0].instance_id, address=found[0].address)
            side = sides[name] = Side(ref, channels)
            watch = asyncio.create_task(side.watch())
            stack.callback(watch.cancel)
        client = await stack.enter_async_context(AsyncClient((await grpc_address(mesh))[0]))
        running = Cancels(mesh=mesh, session=session, client=client, sides=sides, random=Random(seed))
        await running.warm_up()
        yield running


async def run_short(engine: str, directory: Path, seed: int = 1) -> Times:
    """Runs each way and each kind of load once. Then cancels a request on each side that held none of them, as soon as it arrives there."""
    async with cancels(engine, directory, seed) as running:
        for number, behind in enumerate(BEHIND):
            await running.trial(WAYS[number % len(WAYS)], behind)
        await running.catch_missing()
        await running.wait_idle()
        return running.times


async def run(engine: str, rounds: int, directory: Path, seed: int = 1, seconds: float = float("inf")) -> Times:
    """Runs each way behind each kind of load, `rounds` times or as often as `seconds` allow."""
    async with cancels(engine, directory, seed) as running:
        ends_s = time.monotonic() + seconds
        for _ in range(rounds):
            if time.monotonic() >= ends_s:
                break
            for behind in BEHIND:
                for way in WAYS:
                    await running.trial(way, behind)
        # On a busy machine all requests may be cancelled before they reach a side.
        await running.catch_missing()
        await running.wait_idle()
        return running.times


def table(times: Times) -> str:
    """Returns a histogram per phase and side."""
    heads = "".join(f"{f'<={bound}':>7}" for bound in BOUNDS_MS)
    lines = [f"{'phase':24} {'side':8} {'count':>5} {'p50 ms':>7} {'p99 ms':>7} {heads} {'more':>6}"]
    for (phase, side), seconds in sorted(times.seconds.items()):
        counts = Counter(next((bound for bound in BOUNDS_MS if each * 1000 <= bound), 0) for each in seconds)
        shown = "".join(f"{counts[bound]:7}" for bound in BOUNDS_MS)
        found = percentiles(seconds)
        numbers = f"{len(seconds):5} {found['p50']:7.0f} {found['p99']:7.0f}"
        lines.append(f"{phase:24} {side:8} {numbers} {shown} {counts[0]:6}")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if all blocks were freed and each has an owner or is free. Only counts late cancels, because a busy machine causes them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cancels", description=__doc__)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="simulated")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of twelve cancels each")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no round after this time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = 60 * options.minutes
        times = asyncio.run(run(options.engine, options.rounds, Path(folder), options.seed, seconds))
    print(table(times))
    print(f"cancelled {dict(times.ways)}; {times.late()} of {sum(map(len, times.seconds.values()))} later than 250 ms")
    for problem in times.problems:
        print(f"PROBLEM {problem}")
    return 1 if times.problems else 0


if __name__ == "__main__":
    sys.exit(main())
