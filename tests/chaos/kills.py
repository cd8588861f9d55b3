"""Workers of a real mesh are killed and started again while it answers: `python -m tests.chaos.kills --requests 1000`.

Half of the requests stream, half do not. Each has a prompt of its own, of which the simulated engine's answer is known.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson

from kvmesh.cli.forked import Forked
from kvmesh.core import Role
from kvmesh.engines.simulated.model_card import TokenRange, read_card
from kvmesh.engines.simulated.settings import SimulatedSettings
from kvmesh.errors import MeshError
from tests.chaos.processes import MODEL, ProcessMesh, fork_spares, process_mesh

PROMPT_TOKENS = 200
FIRST_PROMPT_ID = 10
PROMPT_SPAN = 400
REQUEST_TIMEOUT_S = 120.0
"""Longer than any request takes however often it is placed; one that does not end within it hangs."""
READY_S = 30.0
LOST = frozenset({"worker_lost", "worker_silent"})
"""With what a stream may end after its worker was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is run."""

    requests: int
    in_flight: int
    tokens: int
    pause_s: float
    seed: int


@dataclass(slots=True)
class Account:
    """What came of the requests. `problems` is empty when all is as promised."""

    whole: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    kills: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def expected(prompt: Sequence[int], count: int, token_range: TokenRange) -> list[int]:
    """The simulated engine's answer; `kvmesh.engines.simulated.tokens` says it in words."""
    total = sum((i + 1) * token for i, token in enumerate(prompt))
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        answer.append(token_range.first_id + total % token_range.span)
        total += (position + 1) * answer[-1]
    return answer


class Requests:
    """Sends them, `in_flight` at a time, and judges the answers."""

    def __init__(self, url: str, shape: Shape, account: Account) -> None:
        self._url = f"{url}/v1/completions"
        self._shape = shape
        self._account = account
        self._random = Random(shape.seed)
        self._numbers = iter(range(shape.requests))
        settings = SimulatedSettings(model="demo", model_dir=str(MODEL))
        self._range = read_card(settings)[1]

    async def run(self) -> None:
        """All of them."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as tasks:
            for _ in range(self._shape.in_flight):
                tasks.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        for number in self._numbers:
            prompt = [FIRST_PROMPT_ID + self._random.randrange(PROMPT_SPAN) for _ in range(PROMPT_TOKENS)]
            body = {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": self._shape.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": number % 2 == 0,
            }
            answer = expected(prompt, self._shape.tokens, self._range)
            outcomes = self._account.streams if body["stream"] else self._account.whole
            ask = self._stream if body["stream"] else self._whole
            try:
                outcome = await ask(session, body, answer)
            except TimeoutError:
                outcome = "hangs"
            except aiohttp.ClientError as error:
                outcome = f"broken: {type(error).__name__}"
            outcomes[outcome] += 1
            if outcome != "right" and (outcome not in LOST or not body["stream"]):
                self._account.problems.append(f"request {number}: {outcome}")

    async def _whole(self, session: aiohttp.ClientSession, body: dict[str, Any], answer: Sequence[int]) -> str:
        async with session.post(self._url, json=body) as response:
            found = await response.json()
        if response.status != 200:
            return str(found["error"]["code"])
        choice = found["choices"][0]
        is_right = choice["token_ids"] == answer and found["usage"]["completion_tokens"] == len(answer)
        return "right" if is_right else "wrong"

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any], answer: Sequence[int]) -> str:
        token_ids: list[int] = []
        last = ""
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                return str((await response.json())["error"]["code"])
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                last = line[6:].strip().decode()
                if last == "[DONE]":
                    break
                event = orjson.loads(last)
                for choice in event.get("choices", ()):
                    token_ids += choice.get("token_ids") or ()
        if token_ids != answer[: len(token_ids)]:
            return "wrong"
        if last == "[DONE]":
            return "right" if len(token_ids) == len(answer) else "short"
        return str(json.loads(last).get("error", {}).get("code", "no end"))


async def kill_workers(mesh: ProcessMesh, shape: Shape, account: Account) -> None:
    """One every `pause_s`, never the last of its role that takes requests; it is started again at once."""
    generator = Random(shape.seed + 1)
    loop = asyncio.get_running_loop()
    next_s = loop.time() + shape.pause_s
    while True:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        next_s = max(next_s + shape.pause_s, loop.time())
        try:
            taking = await mesh.taking(Role.PREFILL), await mesh.taking(Role.DECODE)
        except MeshError:
            continue  # Too busy to say who is there: nobody is killed whose role may have no other worker.
        names = sorted(mesh.name_of(each) for role in taking if len(role) > 1 for each in role)
        if names:
            name = generator.choice(names)
            account.kills.append(name)
            await mesh.kill(name)
            await mesh.start(name)


@asynccontextmanager
async def going_on(work: Any) -> AsyncIterator[None]:
    """Runs something beside the body; its failure is the body's."""
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
    """The mesh, the requests and the kills."""
    account = Account()
    async with process_mesh(
        directory,
        prefill=3,
        decode=3,
        routers=2,
        spares=spares,
        engine_argv=("--simulated-time-factor", "1"),
    ) as mesh:
        async with going_on(kill_workers(mesh, shape, account)):
            await Requests(mesh.url, shape, account).run()
        if account.problems:
            account.problems.append(mesh.logs())
    return account


def main() -> int:
    """0: every whole answer was right, every stream whole and right or ended with a typed error, and none hung."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pause-s", type=float, default=2.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.ERROR)
    shape = Shape(**vars(given))
    # 6 workers, 2 routers, a frontend, and as many restarts as ten minutes hold.
    spares = fork_spares(9 + min(60, int(600 / shape.pause_s)))
    with tempfile.TemporaryDirectory() as directory:
        account = asyncio.run(run(shape, Path(directory), spares))
    print(f"whole    {dict(sorted(account.whole.items()))}")
    print(f"streams  {dict(sorted(account.streams.items()))}")
    print(f"kills    {len(account.kills)}: {dict(sorted(Counter(account.kills).items()))}")
    for problem in account.problems:
        print(f"PROBLEM  {problem}")
    return 1 if account.problems or not account.kills else 0


if __name__ == "__main__":
    sys.exit(main())
