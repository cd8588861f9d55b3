"""Sends requests at a fixed pace during a fault and records their outcomes. The right answers are known. A late answer is still right."""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import aiohttp

from kvmesh.engines.simulated.model_card import TokenRange, read_card
from kvmesh.engines.simulated.settings import SimulatedSettings
from tests.chaos.kills import expected
from tests.integration.mesh import ROOT

MODEL = ROOT / "models" / "demo"
PROMPT_TOKENS, ANSWER_TOKENS = 200, 16
ANSWER_S_MAX = 90.0
"""A request without an end within this time hangs."""
RIGHT, WRONG, HANGS = "right", "wrong", "hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Sends requests to one frontend. With pins they run on these workers only."""

    name: str
    url: str
    pins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request: its client, start and duration, and its outcome: right, wrong, hangs, or the code of its error."""

    client: str
    began_s: float
    wait_s: float
    outcome: str


@dataclass(slots=True)
class Samples:
    """Outcomes of requests."""

    samples: Sequence[Sample]

    def of(self, *clients: str) -> "Samples":
        return Samples([each for each in self.samples if each.client in clients])

    def between(self, first_s: float, end_s: float) -> "Samples":
        """Returns the requests that began between the two times."""
        return Samples([each for each in self.samples if first_s <= each.began_s < end_s])

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for each in self.samples)

    @property
    def errors(self) -> Counter[str]:
        """Number of requests by error code, including those that hang."""
        return Counter(each.outcome for each in self.samples if each.outcome not in (RIGHT, WRONG))

    @property
    def longest_s(self) -> float:
        return max((each.wait_s for each in self.samples), default=0.0)

    @property
    def usual_s(self) -> float:
        return statistics.median(each.wait_s for each in self.samples)

    def late(self, limit_s: float) -> int:
        return sum(each.wait_s > limit_s for each in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt that no cache holds under its salt, and the right answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    salt: str = ""


class Questions(Protocol):
    """Yields questions without end. `pace_s` is the time between two questions of a client at which the engine keeps up."""

    pace_s: float

    def next(self) -> Question: ...


class SimulatedQuestions:
    """Generates new prompts. The simulated engine's answers are computed from them."""

    pace_s = 0.25

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._range: TokenRange = read_card(SimulatedSettings(model="m", model_dir=str(MODEL)))[1]

    def next(self) -> Question:
        prompt = [self._random.randrange(10, 400) for _ in range(PROMPT_TOKENS)]
        return Question(prompt=prompt, answer=expected(prompt, ANSWER_TOKENS, self._range))


class KnownQuestions:
    """Repeats the same prompts, each time under a new salt, with the answers of a single engine."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, pace_s: float) -> None:
        self.pace_s = pace_s
        self._known = list(zip(prompts, answers, strict=True))
        self._numbers = count()

    def next(self) -> Question:
        number = next(self._numbers)
        prompt, answer = self._known[number % len(self._known)]
        return Question(prompt=prompt, answer=answer, salt=f"question-{number}")


class Traffic:
    """Sends questions at their pace, whether or not earlier ones have ended."""

    def __init__(self, clients: Sequence[Client], questions: Questions) -> None:
        self._clients = clients
        self._questions = questions
        self._samples: list[Sample] = []
        self._is_over = asyncio.Event()

    @property
    def samples(self) -> Samples:
        """The requests that have ended."""
        return Samples(self._samples)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Traffic"]:
        """Sends requests until the body ends, then waits for those in flight."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(session, group))
                try:
                    yield self
                finally:
                    self._is_over.set()
                    await sending

    async def _send(self, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        while not self._is_over.is_set():
            for client in self._clients:
                group.create_task(self.ask(session, client))
                await asyncio.sleep(self._questions.pace_s / len(self._clients))

    async def ask(self, session: aiohttp.ClientSession, client: Client) -> Sample:
        """Sends one request and records its outcome."""
        question = self._questions.next()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            outcome = await self._outcome(session, client, question)
        except TimeoutError:
            outcome = HANGS
        except aiohttp.ClientError as error:
            outcome = type(error).__name__
        sample = Sample(client=client.name, began_s=began_s, wait_s=loop.time() - began_s, outcome=outcome)
        self._samples.append(sample)
        return sample

    async def _outcome(self, session: aiohttp.ClientSession, client: Client, question: Question) -> str:
        body = {
            "model": "m", "prompt": list(question.prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "cache_salt": question.salt or None,
        }  # fmt: skip
        headers = {f"x-kvmesh-pin-{role}": name for role, name in client.pins.items()}
        async with session.post(f"{client.url}/v1/completions", json=body, headers=headers) as response:
            answer: Any = await response.json()
        if response.status != 200:
            return f"{response.status} {answer['error']['code']}"
        return RIGHT if answer["choices"][0]["token_ids"] == list(question.answer) else WRONG
