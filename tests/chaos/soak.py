"""Runs mixed load with faults for a long time: `python -m tests.chaos.soak --minutes 30`.

Requests of all kinds (`questions.py`) run while workers are killed, drained and restarted, stopped for a second, and moved between the pools,
and while clients disconnect and deadlines pass. Each answer is compared with the one before the first fault. Memory, descriptors and tasks of
the processes that run throughout are sampled. At the end, no block, lease, leg or reservation may be in use.
"""

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp

from kvmesh.cli.forked import Forked
from kvmesh.core import Role
from kvmesh.errors import MeshError
from tests.chaos.kills import Account, Requests, Shape, running_task
from tests.chaos.processes import ProcessMesh, fork_spares, process_mesh
from tests.chaos.samples import KINDS, Samples, metrics_of, total

PREFILL, DECODE, ROUTERS = 3, 3, 2
KEPT = ("frontend-0", "router-0", "router-1", "prefill-0", "decode-0")
"""Processes that run throughout. They are sampled and keep a worker of each role."""
CHURNED = ("prefill-1", "prefill-2", "decode-1", "decode-2")
STOPPED_S = 1.0
DRAIN_S = 40.0
IDLE_TIMEOUT_S = 60.0
"""Timeout for freeing the last blocks, leases and reservations: a lease, and some seconds for the reports."""
GAUGES = (
    "kv_blocks_used",
    "kv_blocks_held",
    "kv_blocks_unaccounted",
    "leases_handles",
    "legs_requests",
    "inflight_requests",
)
SPARES_MAX = 150
JUDGED_S = 300.0
"""Growth is not checked in shorter runs, because caches are still filling."""


@dataclass(slots=True)
class Soak:
    """A running mesh, its faults and its samples."""

    mesh: ProcessMesh
    account: Account
    random: Random
    samples: Samples = field(default_factory=Samples)
    faults: Counter[str] = field(default_factory=Counter)
    cancelled_early: Counter[str] = field(default_factory=Counter)

    async def churn(self, pause_s: float) -> None:
        """Applies one fault after the other to workers that are not in KEPT."""
        kinds: Sequence[Callable[[str], Awaitable[None]]] = (self._kill, self._drain, self._stop, self._change_role)
        while True:
            await asyncio.sleep(pause_s * self.random.uniform(0.5, 1.5))
            kind, name = self.random.choice(kinds), self.random.choice(CHURNED)
            if name in self.mesh.children:
                # Counted first: the run may end during a drain.
                self.faults[kind.__name__.strip("_")] += 1
                await kind(name)

    async def _kill(self, name: str) -> None:
        await self.mesh.kill(name)
        await self.mesh.start(name)

    async def _drain(self, name: str) -> None:
        await self.mesh.children.pop(name).stop(DRAIN_S)
        await self.mesh.start(name)

    async def _stop(self, name: str) -> None:
        await self.mesh.stop(name)
        await asyncio.sleep(STOPPED_S)
        self.mesh.go_on(name)

    async def _change_role(self, name: str) -> None:
        with suppress(MeshError):  # The worker may not be registered yet.
            for worker in await self.mesh.workers():
                if self.mesh.name_of(worker) == name:
                    other = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
                    await self.mesh.set_role(worker, other)

    async def cancel_early(self) -> None:
        """Sends requests whose client disconnects, or whose deadline passes, at a random moment."""
        async with aiohttp.ClientSession() as session:
            while True:
                prompt = [self.random.randrange(10, 400) for _ in range(self.random.randrange(40, 900))]
                body = {"model": "demo", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
                left_s = self.random.uniform(0.01, 1.5)
                kind = self.random.choice(("leaves", "deadline"))
                headers = {"x-request-timeout": f"{left_s:.3f}"} if kind == "deadline" else {}
                timeout = aiohttp.ClientTimeout(total=left_s if kind == "leaves" else 60.0)
                with suppress(aiohttp.ClientError, TimeoutError):
                    url = f"{self.mesh.url}/v1/completions"
                    async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
                        await response.read()
                self.cancelled_early[kind] += 1
                await asyncio.sleep(self.random.uniform(0.0, 1.0))

    async def sample(self, interval_s: float) -> None:
        """Samples the processes until it is cancelled."""
        while True:
            with suppress(MeshError):
                await self.samples.take(self.mesh, KEPT)
            await asyncio.sleep(interval_s)

    async def wait_idle(self) -> list[str]:
        """Waits until all resources of requests are free. Returns those that are still in use after the timeout."""
        left: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while left := await self._in_use():
                    await asyncio.sleep(0.5)
        return left

    async def _in_use(self) -> list[str]:
        names = {child.pid: name for name, child in self.mesh.children.items()}
        texts = {names[pid]: text for pid, text in (await metrics_of(self.mesh)).items() if pid in names}
        missing = [f"{name} does not answer" for name in KEPT if name not in texts]
        found = [
            f"{name}: {metric} {value:g}"
            for name, text in texts.items()
            for metric in GAUGES
            if (value := total(text, metric))
        ]
        with suppress(MeshError):
            found += [
                f"{worker.worker.worker_id}: {worker.requests_in_flight} reservations"
                for worker in await self.mesh.workers()
                if worker.requests_in_flight
            ]
        return missing + found

    def judge(self, seconds: float) -> None:
        """Adds each series that is not flat to the problems."""
        if seconds < JUDGED_S:
            return
        for (name, kind), slope in sorted(self.samples.slopes().items()):
            if not slope.is_flat(KINDS[kind]):
                self.account.problems.append(f"{name}: {kind} grow by {slope.per_hour:.1f} per hour")


async def run(shape: Shape, *, seconds: float, directory: Path, spares: Sequence[Forked] = ()) -> Soak:
    """Runs the mesh with load and faults for `seconds`, then checks that all resources are free."""
    account = Account()
    # A small pool fills soon. Its memory counts as used once a block is written.
    argv = (
        *("--simulated-time-factor", "1", "--simulated-kv-blocks", "2048"),
        *("--kv-lease-s", "10", "--kv-pull-timeout-s", "5"),
    )
    async with process_mesh(
        directory, prefill=PREFILL, decode=DECODE, routers=ROUTERS, spares=spares, engine_argv=argv
    ) as mesh:
        soak = Soak(mesh, account, Random(shape.seed))
        requests = Requests(mesh.url, shape, account)
        await requests.learn()
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + seconds
        async with running_task(soak.sample(max(1.0, seconds / 240))):
            async with running_task(soak.churn(shape.pause_s)), running_task(soak.cancel_early()):
                await requests.run(is_enough=lambda: loop.time() >= ends_s)
        account.problems += await soak.wait_idle()
        account.continued = int(await mesh.frontend_metric("kvmesh_frontend_continued_requests_total"))
        soak.judge(seconds)
        if account.problems:
            account.problems.append(mesh.logs())
        return soak


def report(soak: Soak, seconds: float) -> None:
    """Prints the results."""
    account = soak.account
    print(f"{seconds / 60:.0f} min: whole {dict(account.whole)}, streams {dict(account.streams)}")
    print(f"faults {dict(sorted(soak.faults.items()))}; clients {dict(sorted(soak.cancelled_early.items()))}")
    print(f"continued {account.continued} times on another worker")
    print(f"{'process':12} {'what':12} {'first':>8} {'last':>8} {'per hour':>10} {'error':>8}")
    for (name, kind), slope in sorted(soak.samples.slopes().items()):
        values = [value for _, value in soak.samples.series[name, kind]]
        numbers = f"{values[0]:8.1f} {values[-1]:8.1f} {slope.per_hour:+10.2f} {slope.error:8.2f}"
        print(f"{name:12} {kind:12} {numbers}")
    for problem in account.problems:
        print(f"PROBLEM {problem}")


def main() -> int:
    """Returns 0 if every answer was right, all resources were freed, and no process grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--pause-s", type=float, default=4.0, help="average time between two faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    seconds = 60 * options.minutes
    shape = Shape(
        requests=0, in_flight=options.in_flight, tokens=options.tokens, pause_s=options.pause_s, seed=options.seed
    )
    spares = fork_spares(PREFILL + DECODE + ROUTERS + 1 + min(SPARES_MAX, int(seconds / options.pause_s)))
    with tempfile.TemporaryDirectory() as directory:
        soak = asyncio.run(run(shape, seconds=seconds, directory=Path(directory), spares=spares))
    report(soak, seconds)
    return 1 if soak.account.problems or not soak.faults else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
