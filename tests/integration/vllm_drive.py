"""Drives an engine in tests: reads its steps and events in the background, and collects the output of each key."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.core import (
    Generation,
    KvCleared,
    KvEvent,
    KvHandle,
    KvRemoved,
    KvStored,
    LegTask,
    LoadRecord,
    SamplingParams,
)
from kvmesh.engines.base import Engine, EngineFinish, EngineRequest, StepOutput

TIMEOUT_S = 90.0


@dataclass
class Got:
    """The output of one key."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: EngineFinish | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)


class Drive:
    """One engine and the tasks that read its steps and events."""

    def __init__(self, engine: Any) -> None:
        self.engine: Engine = engine
        self.remote: Any = engine
        self.got: dict[int, Got] = {}
        self.events: list[KvEvent] = []
        self.outputs: list[StepOutput] = []
        self.failure: BaseException | None = None
        self._next = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> "Drive":
        await self.engine.start()
        self._tasks = [asyncio.create_task(self._read_steps()), asyncio.create_task(self._read_events())]
        return self

    async def aclose(self) -> None:
        await self.engine.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, task: LegTask, generation: Generation, *, handle: KvHandle | None = None, name: str = "") -> int:
        self._next += 1
        key = self._next
        leg_id = name or f"leg-{key}"
        self.engine.submit_nowait(
            EngineRequest(key=key, leg_id=leg_id, task=task, generation=generation, handle=handle)
        )
        self.got[key] = Got()
        return key

    async def result(self, key: int, timeout_s: float = TIMEOUT_S) -> Got:
        async with asyncio.timeout(timeout_s):
            await self.got[key].done.wait()
        return self.got[key]

    async def decode(self, generation: Generation, handle: KvHandle | None = None) -> Got:
        return await self.result(self.submit(LegTask.GENERATE, generation, handle=handle))

    async def prefill(self, generation: Generation) -> KvHandle:
        got = await self.result(self.submit(LegTask.PREFILL, generation))
        assert got.finish is not None
        assert got.finish.handle is not None, got.finish
        assert got.tokens == []
        return got.finish.handle

    async def until(self, holds: Callable[[LoadRecord], bool], timeout_s: float = TIMEOUT_S) -> LoadRecord:
        """Returns the first load record that satisfies the condition. Polls every 5 ms."""
        async with asyncio.timeout(timeout_s):
            while not holds(load := self.engine.load()):
                await asyncio.sleep(0.005)
        return load

    async def idle(self, timeout_s: float = TIMEOUT_S) -> LoadRecord:
        return await self.until(lambda load: load.kv_blocks_used == 0, timeout_s)

    def cached(self) -> set[int]:
        """Returns the set of cached blocks according to the events."""
        blocks: set[int] = set()
        for event in self.events:
            if isinstance(event, KvCleared):
                blocks.clear()
            elif isinstance(event, KvStored):
                assert not blocks & set(event.block_hashes), "stored twice"
                assert event.parent_hash is None or event.parent_hash in blocks, "stored before its parent"
                blocks |= set(event.block_hashes)
            elif isinstance(event, KvRemoved):
                assert set(event.block_hashes) <= blocks, "removed a block that was not stored"
                blocks -= set(event.block_hashes)
        return blocks

    async def _read_steps(self) -> None:
        try:
            async for output in self.engine.steps():
                self.outputs.append(output)
                for key, entries in output.prompt_logprobs.items():
                    assert not self.got[key].tokens, "log-probabilities of the prompt came after the answer"
                    self.got[key].prompt_logprobs += entries
                at = 0
                for entry, key in enumerate(output.keys):
                    count = 1 if output.counts is None else output.counts[entry]
                    assert self.got[key].finish is None, "tokens after the finish"
                    self.got[key].tokens += output.token_ids[at : at + count]
                    self.got[key].logprobs += output.logprobs.get(key, ())
                    self.got[key].first.set()
                    at += count
                for finish in output.finishes:
                    assert self.got[finish.key].finish is None, "finished twice"
                    self.got[finish.key].finish = finish
                    self.got[finish.key].done.set()
        except Exception as error:
            self.failure = error

    async def _read_events(self) -> None:
        async for events in self.engine.kv_events():
            self.events += events


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns token ids without special tokens."""
    return [(index * index * 7 + index * 13 + 31 * seed + 7) % 500 + 2 for index in range(length)]


def greedy(length: int, *, seed: int = 0, tokens: int = 12, **more: Any) -> Generation:
    """Returns a greedy generation that does not stop early."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return replace(Generation(model="m", token_ids=prompt(length, seed), sampling=sampling), **more)
