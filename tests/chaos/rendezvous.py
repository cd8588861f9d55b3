"""Kills and stops SGLang's engine processes while requests are in each queue of a handoff, and measures when the requests end.

`python -m tests.chaos.rendezvous` starts two prefill and two decode workers and prints one line per case. A request must end with the tokens of
a
run without faults, or with a typed error. SGLang's own time limits are longer than the run, so that only those of the mesh apply.
*noticed*: time from the fault until the last request was placed again. *longest*: time until the last answer, with one worker less.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.discovery.base import DECODE, PREFILL, ROUTER, Instance
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.integration.mesh import RunningMesh, descendants, metrics_text, running_mesh, worker_metric

FLOAT32 = "--sglang-dtype float32"
SMALL_DECODE = "--sglang-kv-cache-bytes 9000000"
"""Room for three or four requests, so that others wait for blocks."""
FLAGS = (
    *("--engine", "sglang", "--greeting", "", "--no-planner"),
    f"--engine-args={FLOAT32} --sglang-chunk-tokens 128 --kv-pull-timeout-s 250 --kv-lease-s 300"
    # Makes JSON end within its tokens.
    """ --sglang-engine-arguments '{"constrained_json_disable_any_whitespace": true}'""",
    f"--decode-args={SMALL_DECODE}",
    # Breakers stay open only briefly, because the same workers fail repeatedly.
    "--router-args=--breaker-pause-min-s 0.2 --breaker-pause-max-s 0.2",
)
VOCABULARY = 2048
SEED = 5
ANSWER_TOKENS = 16
ANSWER_TIMEOUT_S = 60.0
"""A request without an end within this time counts as hung."""
SEEN_TIMEOUT_S = 4.0
"""How long a case waits for a request in its queue. Some queues hold a request for milliseconds only."""
STOPPED_S = 8.0
BURST, BURST_TOKENS = 10, 300
QUEUES = {
    PREFILL: ("bootstrapping_requests", "waiting_requests", "sending_requests"),
    DECODE: ("preallocating_requests", "receiving_requests"),
}
READY_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Case:
    """A fault: the signal that a worker's engine process gets while one of its queues holds a request."""

    service: str
    queue: str
    is_kill: bool

    @property
    def name(self) -> str:
        return f"{self.service.rpartition('-')[2]}, {'killed' if self.is_kill else 'stopped'}, {self.queue}"


CASES = [
    Case(service, queue, is_kill) for is_kill in (False, True) for service, queues in QUEUES.items() for queue in queues
]


@dataclass(slots=True)
class Outcome:
    """How the requests of a case ended. Times count from the fault. `noticed_s` is 0 if no request was at the worker."""

    counts: Counter[str] = field(default_factory=Counter)
    noticed_s: float = 0.0
    longest_s: float = 0.0
    was_seen: bool = False

    @property
    def is_good(self) -> bool:
        return not (self.counts["wrong"] or self.counts["hung"])


@dataclass(slots=True)
class Rendezvous:
    """A running mesh and its clients."""

    mesh: RunningMesh
    session: aiohttp.ClientSession
    rng: random.Random
    router: GrpcRouterClient
    workers: int = 4

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[self.rng.randrange(10, VOCABULARY) for _ in range(length)] for length in lengths]

    async def ask(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """Returns the answer's tokens. Raises ConnectionError with the reason of a typed error."""
        body = {
            "model": "demo", "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **options,
        }  # fmt: skip
        async with self.session.post(f"{self.mesh.url}/v1/completions", json=body) as response:
            answer: Any = await response.json()
            if response.status != 200:
                raise ConnectionError(f"{response.status} {answer['error']['code']}")
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

    async def run(self, case: Case, *, workers: int | None = None) -> Outcome:
        """Runs one fault. Returns when all requests have ended, all workers (or `workers` of them) take requests, and all blocks are free."""
        prompts = self.prompts([BURST_TOKENS + number for number in range(BURST)])
        expected = [await self.ask(prompt, cache_salt="expected") for prompt in prompts]
        outcome = Outcome()
        tasks = [asyncio.create_task(self.ask(prompt)) for prompt in prompts]
        target = await self._worker_with(case, tasks)
        outcome.was_seen = target is not None
        engine = self._engine(target or (await self.instances(case.service))[0])
        began_s = time.time()
        engine_send(engine, signal.SIGKILL if case.is_kill else signal.SIGSTOP)
        waking = asyncio.get_running_loop().call_later(STOPPED_S, engine_send, engine, signal.SIGCONT)
        for task, tokens in zip(tasks, expected, strict=True):
            outcome.counts[await _judge(task, tokens)] += 1
        outcome.longest_s = time.time() - began_s
        outcome.noticed_s = max([0.0, *(at_s - began_s for at_s in self.placed_again_s())])
        waking.cancel()
        if not case.is_kill:
            engine_send(engine, signal.SIGCONT)
        await self.wait_whole(workers)
        return outcome

    def placed_again_s(self) -> list[float]:
        """Returns the times at which requests were placed again, from the frontend's log."""
        lines = (self.mesh.directory / "gateway-0.log").read_text().splitlines()
        found = [json.loads(line)["time"] for line in lines if '"event":"request_placed_again"' in line]
        return [datetime.fromisoformat(each).timestamp() for each in found]

    async def _worker_with(self, case: Case, tasks: Sequence["asyncio.Task[Any]"]) -> Instance | None:
        """Returns a worker with a request in the case's queue; None if none was observed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEEN_TIMEOUT_S):
                while not all(task.done() for task in tasks):
                    for instance in await self.instances(case.service):
                        if await self.total(instance, case.queue):
                            return instance
        return None

    async def instances(self, service: str) -> list[Instance]:
        registry = self.mesh.target.registry()
        try:
            return list((await registry.instances(service)).instances)
        finally:
            await registry.aclose()

    async def total(self, instance: Instance, name: str) -> float:
        """Returns a worker's metric; 0 while the worker does not answer."""
        try:
            text = await metrics_text(instance.host, int(instance.meta["metrics_port"]))
        except aiohttp.ClientError:
            return 0.0
        return worker_metric(text, f"kvmesh_worker_{name}")

    def _engine(self, instance: Instance) -> int:
        """Returns the process id of a worker's engine."""
        service = "prefill" if instance.service == PREFILL else "decode"
        for pid in self.mesh.pids(service):
            if listens(pid, instance.port):
                return descendants(pid)[0]
        raise AssertionError(f"no process listens at {instance.host}:{instance.port}")

    async def wait_whole(self, workers: int | None = None) -> None:
        """Waits until all workers, or `workers` of them, take requests and no worker holds blocks."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await self._is_whole(self.workers if workers is None else workers):
                await asyncio.sleep(0.1)

    async def _is_whole(self, workers: int) -> bool:
        found = await self.router.list_workers(timeout_s=30.0)
        if sum(not worker.excluded_by for worker in found) < workers:
            return False
        instances = [*await self.instances(PREFILL), *await self.instances(DECODE)]
        return not any([await self.total(instance, "kv_blocks_used") for instance in instances])


def engine_send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to an engine process, which leads a process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def listens(pid: int, port: int) -> bool:
    """Returns whether a process listens on this TCP port."""
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    with suppress(FileNotFoundError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if os.readlink(link) in sockets:
                    return True
    return False


async def _judge(task: "asyncio.Task[list[int]]", expected: Sequence[int]) -> str:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return "right" if await task == expected else "wrong"
    except TimeoutError:
        return "hung"
    except (ConnectionError, aiohttp.ClientError) as error:
        return str(error)


@asynccontextmanager
async def rendezvous(
    directory: Path, *argv: str, workers: int = 4, env: dict[str, str] | None = None
) -> AsyncIterator[Rendezvous]:
    """Starts a mesh of two prefill and two decode workers, or of `workers` workers with the flags of `argv`."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S + 10)
    argv = ("--prefill", "2", "--decode", "2", *FLAGS, *argv)
    async with (
        running_mesh(directory, *argv, ready_timeout_s=READY_TIMEOUT_S, env=env) as mesh,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        registry, channels = mesh.target.registry(), mesh.target.channels()
        (router,) = (await registry.instances(ROUTER)).instances
        await registry.aclose()
        try:
            client = GrpcRouterClient(channels, router.address)
            running = Rendezvous(mesh=mesh, session=session, rng=random.Random(SEED), router=client, workers=workers)
            await running.wait_whole()
            yield running
        finally:
            await channels.aclose()


async def run(cases: Sequence[Case], directory: Path) -> bool:
    is_good = True
    async with rendezvous(directory) as running:
        print(f"{'case':44} {'in queue':8} {'noticed':>8} {'longest':>8}  outcomes", flush=True)
        for case in cases:
            outcome = await running.run(case)
            is_good = is_good and outcome.is_good
            seen = "yes" if outcome.was_seen else "no"
            times = f"{outcome.noticed_s:6.1f} s {outcome.longest_s:6.1f} s"
            print(f"{case.name:44} {seen:8} {times}  {dict(outcome.counts)}", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose names contain this text")
    parser.add_argument("--directory", type=Path, help="folder in which to keep the services' logs")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    with tempfile.TemporaryDirectory() as folder:
        directory = options.directory or Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        return 0 if asyncio.run(run(cases, directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
