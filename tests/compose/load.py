"""Streams chats without a pause. Each answer must be complete and equal the first answer to its prompt.

Requests alternate between the frontends. Like a load balancer, the load sends a request to the next frontend if one refuses it, or if its
connection ends before the answer begins. It never repeats a request whose answer has begun.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk

TOKENS = 120
NOT_TAKEN = 503
"""The frontend has not started the request. The openai client also retries this status by default."""
ROUNDS, PAUSE_S = 3, 0.5
"""All frontends are tried three times, like the openai client's default retries, with its first pause in between."""


@dataclass(slots=True, kw_only=True)
class Load:
    """The load's clients and results."""

    clients: Sequence[AsyncOpenAI]
    """One client per frontend."""
    tokens: int
    begun: int = 0
    expected: dict[str, str] = field(default_factory=dict)
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    async def ask(self, prompt: str) -> str:
        """Returns the text of a streamed answer."""
        stream = await self.open_stream(prompt)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length", chunks[-1]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def open_stream(self, prompt: str) -> AsyncStream[ChatCompletionChunk]:
        """Returns the stream of the first frontend that accepts the request. Raises AssertionError with all refusals if none does."""
        self.begun += 1
        number = self.begun
        refusals: list[str] = []
        last = ROUNDS * len(self.clients) - 1
        for attempt in range(last + 1):
            if attempt and attempt % len(self.clients) == 0:
                await asyncio.sleep(PAUSE_S)
            client = self.clients[(number + attempt) % len(self.clients)]
            try:
                return await client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=self.tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
            except (APIConnectionError, APIStatusError) as error:
                if isinstance(error, APIStatusError) and error.status_code != NOT_TAKEN:
                    raise
                refusals.append(f"{datetime.now(UTC):%H:%M:%S.%f} {client.base_url}: {error!r}: {error.__cause__!r}")
        raise AssertionError("no frontend takes the request:\n" + "\n".join(refusals))

    async def send_until(self, prompt: str, stop: asyncio.Event) -> None:
        """Sends requests until `stop`. The last one is read to its end."""
        while not stop.is_set():
            try:
                answer = await self.ask(prompt)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            else:
                self.answered += 1
                if answer != self.expected[prompt]:
                    self.failures.append(f"another answer: {answer!r} instead of {self.expected[prompt]!r}")

    async def wait_answers(self, count: int) -> None:
        """Waits until `count` more answers are complete."""
        goal = self.answered + count
        while self.answered < goal and not self.failures:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running_load(urls: Sequence[str], streams: int, *, tokens: int = TOKENS) -> AsyncIterator[Load]:
    """Keeps `streams` streams running until the context ends."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
            )
            for url in urls
        ]
        load = Load(clients=clients, tokens=tokens)
        prompts = [f"Stream number {number}. " + "Please tell me more about it. " * 12 for number in range(streams)]
        answers = await asyncio.gather(*map(load.ask, prompts))
        load.expected.update(zip(prompts, answers, strict=True))
        stop, group = asyncio.Event(), await stack.enter_async_context(asyncio.TaskGroup())
        for prompt in prompts:
            group.create_task(load.send_until(prompt, stop))
        try:
            yield load
        finally:
            stop.set()
