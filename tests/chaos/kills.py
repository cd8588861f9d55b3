"""Kills and restarts workers of a real mesh under load: `python -m tests.chaos.kills --requests 2000`.

Every second request streams. The requests are of all kinds (`questions.py`). An answer is right if it equals the answer before the first kill:
each token, text, call, log-probability, finish reason and usage. `--engine vllm` kills each worker once.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from kvmesh.cli.forked import Forked
from kvmesh.core import Role
from kvmesh.engines.simulated.model_card import TokenRange
from kvmesh.errors import MeshError
from tests.chaos.processes import ProcessMesh, fork_spares, process_mesh
from tests.chaos.questions import FailedError, Normal, Question, ask, make_questions, reference

REQUEST_TIMEOUT_S = 120.0
"""Longer than any request takes with all its placements. A request that does not end within this time counts as hung."""
RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a run. `questions` is the number of different requests, which are sent repeatedly."""

    requests: int
    in_flight: int
    tokens: int
    pause_s: float
    seed: int
    questions: int = 45


@dataclass(slots=True)
class Account:
    """Outcomes of the requests. `problems` is empty if all promises were kept."""

    whole: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    kills: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    continued: int = 0
    undisturbed_pauses_s: list[float] = field(default_factory=list)
    """The longest time between two events of each stream before the first kill."""
    pauses_s: list[float] = field(default_factory=list)
    """The longest time between two events of each stream while workers are killed."""


def expected(prompt: Sequence[int], count: int, token_range: TokenRange) -> list[int]:
    """Returns the simulated engine's greedy answer, an independent version of `kvmesh.engines.simulated.tokens`."""
    total = sum((i + 1) * token for i, token in enumerate(prompt))
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        answer.append(token_range.first_id + total % token_range.span)
        total += (position + 1) * answer[-1]
    return answer


class Requests:
    """Sends the requests, `in_flight` at a time, and checks the answers."""

    def __init__(self, url: str, shape: Shape, account: Account, *, answers: Sequence[Normal] = ()) -> None:
        self.answers = answers
        """The answer to each question without faults."""
        self._url = url
        self._shape = shape
        self._account = account
        self._questions = make_questions(Random(shape.seed), shape.questions, shape.tokens)
        self._numbers = iter(range(10**9))

    async def learn(self) -> None:
        """Records the answers before the first fault."""
        async with _session() as session:
            self.answers = await reference(session, self._url, self._questions, self._account.undisturbed_pauses_s)

    async def run(self, is_enough: Callable[[], bool] = lambda: True) -> None:
        """Sends `requests` requests, and further ones until `is_enough`."""
        async with _session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(self._shape.in_flight):
                tasks.create_task(self._client(session, is_enough))

    async def _client(self, session: aiohttp.ClientSession, is_enough: Callable[[], bool]) -> None:
        for number in self._numbers:
            if number >= self._shape.requests and is_enough():
                return
            i = number % len(self._questions)
            # Every kind is sent with and without streaming, for any number of kinds.
            is_stream = (number + number // len(self._questions)) % 2 == 0
            outcome = await self._judged(session, self._questions[i], self.answers[i], is_stream=is_stream)
            (self._account.streams if is_stream else self._account.whole)[outcome.partition(":")[0]] += 1
            if outcome != RIGHT:
                self._account.problems.append(f"request {number} ({self._questions[i].path}): {outcome}")

    async def _judged(
        self, session: aiohttp.ClientSession, question: Question, expected: Normal, *, is_stream: bool
    ) -> str:
        try:
            answer = await ask(session, self._url, question, is_stream=is_stream, pauses_s=self._account.pauses_s)
        except FailedError as error:
            return f"failed: {error}"
        except TimeoutError:
            return "hangs"
        except aiohttp.ClientError as error:
            return f"broken: {type(error).__name__}: {error}"
        return RIGHT if answer == expected else f"wrong: {answer} instead of {expected}"


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def kill_workers(mesh: ProcessMesh, shape: Shape, account: Account) -> None:
    """Kills a worker every `pause_s` and restarts it at once. Never kills the last worker of a role that takes requests."""
    generator = Random(shape.seed + 1)
    loop = asyncio.get_running_loop()
    next_s = loop.time() + shape.pause_s
    while True:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        next_s = max(next_s + shape.pause_s, loop.time())
        try:
            account.continued = await continued(mesh)
            taking = await mesh.taking(Role.PREFILL), await mesh.taking(Role.DECODE)
        except MeshError:
            continue  # The router is too busy to list the workers, so no kill is safe.
        names = sorted(mesh.name_of(each) for role in taking if len(role) > 1 for each in role)
        if names:
            name = generator.choice(names)
            account.kills.append(name)
            await mesh.kill(name)
            await mesh.start(name)


async def kill_each_once(mesh: ProcessMesh, account: Account, pairs: int) -> None:
    """Kills and restarts a decode and a prefill worker, then the next pair once these serve again. Does not wait for the last pair."""
    for i in range(pairs):
        for name in (f"decode-{i}", f"prefill-{i}"):
            await asyncio.sleep(2.0)
            await mesh.kill(name)
            await mesh.start(name)
            account.kills.append(name)
        if i < pairs - 1:
            await mesh.wait_ready(pairs, pairs)


async def kill_two(mesh: ProcessMesh, account: Account) -> None:
    """Kills a busy decode worker and the only prefill worker without restarting them. The remaining decode worker serves alone."""
    for name in ("decode-0", "prefill-0"):
        await asyncio.sleep(1.0)
        if name == "decode-0":
            await mesh.stop_in_answers(name)
        await mesh.kill(name)
        account.kills.append(name)


@asynccontextmanager
async def running_task(work: Any) -> AsyncIterator[None]:
    """Runs a task while the context is entered. Raises its error if it failed."""
    task = asyncio.create_task(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def run(shape: Shape, directory: Path, spares: Sequence[Forked] = ()) -> Account:
    """Runs the requests and the kills on a mesh of simulated engines."""
    account = Account()
    argv = ("--simulated-time-factor", "1")
    async with process_mesh(directory, prefill=3, decode=3, routers=2, spares=spares, engine_argv=argv) as mesh:
        requests = Requests(mesh.url, shape, account)
        await requests.learn()
        async with running_task(kill_workers(mesh, shape, account)):
            # On a busy machine the first kills may hit workers that generate nothing.
            await requests.run(is_enough=lambda: account.continued > 0)
        await _close(mesh, account)
    return account


async def run_vllm(shape: Shape, directory: Path, *, is_short: bool = False) -> Account:
    """Runs the requests on a mesh of vLLM with two workers of each role, and kills each once. Short: one prefill worker, and two kills."""
    account = Account()
    # The batch composition depends on timing and determines the order of additions. In bfloat16 this order decides near ties.
    argv = ("--vllm-dtype", "float32")
    prefill, kills = (1, 2) if is_short else (2, 4)
    # A policy without regard to caches. With repeated requests, a cache-aware policy would use one decode worker only.
    async with process_mesh(
        directory,
        engine="vllm",
        policy="round_robin",
        prefill=prefill,
        decode=2,
        routers=1,
        engine_argv=argv,
        ready_timeout_s=300.0,
    ) as mesh:
        requests = Requests(mesh.url, shape, account)
        await requests.learn()
        async with running_task(kill_two(mesh, account) if is_short else kill_each_once(mesh, account, 2)):
            await requests.run(is_enough=lambda: len(account.kills) == kills)
        await _close(mesh, account)
    return account


async def continued(mesh: ProcessMesh) -> int:
    """Returns how often an answer was continued on another worker."""
    return int(await mesh.frontend_metric("kvmesh_frontend_continued_requests_total"))


async def _close(mesh: ProcessMesh, account: Account) -> None:
    account.continued = await continued(mesh)
    if account.problems:
        account.problems.append(mesh.logs())


def _quantiles(values_s: Sequence[float]) -> str:
    """Formats the quantiles of the longest pause of each stream."""
    ordered = sorted(values_s) or [0.0]
    p50, p90, p99 = (ordered[min(len(ordered) - 1, round(share * len(ordered)))] for share in (0.5, 0.9, 0.99))
    return f"p50 {p50:.3f} s, p90 {p90:.3f} s, p99 {p99:.3f} s, longest {ordered[-1]:.3f} s"


def main() -> int:
    """Returns 0 if every answer was right and workers were killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pause-s", type=float, default=1.0, help="time between two kills of simulated workers")
    parser.add_argument("--seed", type=int, default=1)
    given = vars(parser.parse_args())
    engine = given.pop("engine")
    logging.disable(logging.ERROR)
    shape = Shape(**given)
    # 6 workers, 2 routers, a frontend, and enough restarts for ten minutes.
    spares = fork_spares(9 + min(120, int(600 / shape.pause_s))) if engine == "simulated" else ()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        account = asyncio.run(run(shape, path, spares) if engine == "simulated" else run_vllm(shape, path))
    print(f"whole     {dict(sorted(account.whole.items()))}")
    print(f"streams   {dict(sorted(account.streams.items()))}")
    print(f"kills     {len(account.kills)}: {dict(sorted(Counter(account.kills).items()))}")
    print(f"continued {account.continued} times on another worker")
    print(f"pauses    {_quantiles(account.pauses_s)}; before the first kill {_quantiles(account.undisturbed_pauses_s)}")
    for problem in account.problems:
        print(f"PROBLEM   {problem}")
    return 1 if account.problems or not account.kills else 0


if __name__ == "__main__":
    sys.exit(main())
