"""Reads an engine like a worker, and records every violation of the protocol's ordering rules."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

from kvmesh.core import (
    FinishReason,
    Generation,
    KvCleared,
    KvEvent,
    KvHandle,
    KvStored,
    LegTask,
    Rendezvous,
    SamplingParams,
    TokenLogprob,
)
from kvmesh.engines.base import Engine, EngineFinish, EngineRequest, StepOutput
from kvmesh.errors import MeshError

_NUMBERS = count(1)


@dataclass
class Record:
    """The output of one leg."""

    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: EngineFinish | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> EngineFinish:
        assert self.finish is not None
        return self.finish


class EngineDriver:
    """One engine and the tasks that read its steps and events."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.cached: set[int] = set()
        self.began: list[int] = []
        """The keys of legs in the order of their first tokens."""
        self.violations: list[str] = []
        self.error: MeshError | None = None
        self._records: dict[int, Record] = {}
        self._finished: set[int] = set()
        self._keys = count(1)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> "EngineDriver":
        await self.engine.start()
        self._tasks = [asyncio.create_task(self._read_steps()), asyncio.create_task(self._read_events())]
        return self

    async def aclose(self) -> None:
        await self.engine.aclose()
        async with asyncio.timeout(self.timeout_s):
            await asyncio.gather(*self._tasks)

    async def _read_steps(self) -> None:
        try:
            async with aclosing(self.engine.steps()) as steps:  # type: ignore[type-var]
                async for output in steps:
                    self._on_step(output)
        except MeshError as error:
            self.error = error

    async def _read_events(self) -> None:
        async with aclosing(self.engine.kv_events()) as batches:  # type: ignore[type-var]
            async for events in batches:
                for event in events:
                    self._on_event(event)

    def _on_step(self, output: StepOutput) -> None:
        counts = output.counts if output.counts is not None else [1] * len(output.keys)
        if sum(counts) != len(output.token_ids) or len(counts) != len(output.keys):
            self.violations.append(f"step {output.step}: counts do not match the tokens")
        for key, entries in output.prompt_logprobs.items():
            record = self._records.get(key)
            if record is None or record.tokens or record.prompt_logprobs:
                self.violations.append(f"the prompt of key {key} was scored twice, late, or for an unknown key")
            else:
                record.prompt_logprobs += entries
        start = 0
        for key, size in zip(output.keys, counts, strict=True):
            record = self._records.get(key)
            if record is None:
                self.violations.append(f"tokens for key {key}, which is not live")
            else:
                if size and not record.tokens:
                    self.began.append(key)
                record.tokens += output.token_ids[start : start + size]
                record.logprobs += output.logprobs.get(key, ())
                record.changed.set()
            start += size
        for finish in output.finishes:
            self._on_finish(finish)

    def _on_finish(self, finish: EngineFinish) -> None:
        record = self._records.pop(finish.key, None)
        if record is None:
            self.violations.append(f"a finish for key {finish.key}, which is not live")
            return
        if (finish.error is not None) != (finish.reason is FinishReason.ERROR):
            self.violations.append("error and reason disagree")
        if finish.embedding is not None and finish.reason is not FinishReason.STOP:
            self.violations.append("an embedding without STOP")
        if finish.handle is not None and finish.reason is not FinishReason.HANDED_OFF:
            self.violations.append("a handle without HANDED_OFF")
        record.finish = finish
        record.changed.set()

    def _on_event(self, event: KvEvent) -> None:
        match event:
            case KvStored():
                if event.parent_hash is not None and event.parent_hash not in self.cached:
                    self.violations.append("a block was stored whose parent is not cached")
                self.cached.update(event.block_hashes)
            case KvCleared():
                self.cached.clear()
            case _:
                if not self.cached.issuperset(event.block_hashes):
                    self.violations.append("a block was removed that was not cached")
                self.cached.difference_update(event.block_hashes)

    def submit(
        self,
        generation: Generation,
        *,
        task: LegTask = LegTask.GENERATE,
        handle: KvHandle | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> Record:
        record = Record(next(self._keys))
        self.engine.submit_nowait(
            EngineRequest(
                key=record.key,
                leg_id=f"leg-{next(_NUMBERS)}",
                task=task,
                generation=generation,
                handle=handle,
                rendezvous=rendezvous,
            )
        )
        self._records[record.key] = record
        return record

    async def wait(self, record: Record) -> Record:
        """Waits for the leg's finish."""
        return await self.wait_tokens(record, None)

    async def wait_tokens(self, record: Record, tokens: int | None) -> Record:
        """Waits until the leg has so many tokens or its finish."""
        async with asyncio.timeout(self.timeout_s):
            while record.finish is None and (tokens is None or len(record.tokens) < tokens):
                record.changed.clear()
                await record.changed.wait()
        return record

    async def run(self, generation: Generation, *, handle: KvHandle | None = None) -> Record:
        """Runs a decode leg from submit to finish."""
        return await self.wait(self.submit(generation, handle=handle))

    async def prefill(self, generation: Generation) -> KvHandle:
        """Runs a prefill leg and returns its handle."""
        record = await self.wait(self.submit(generation, task=LegTask.PREFILL))
        assert record.done.reason is FinishReason.HANDED_OFF, record.done
        assert record.done.handle is not None
        assert not record.tokens, "a prefill leg has no tokens"
        return record.done.handle

    async def wait_blocks(self, used: int, within_s: float) -> None:
        """Waits until exactly so many blocks are used. Fails if that takes longer than `within_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while (load := self.engine.load()).kv_blocks_used != used:
            assert loop.time() < until_s, f"{load.kv_blocks_used} blocks used, {load.kv_blocks_leased} leased"
            await asyncio.sleep(0.005)
        assert load.kv_blocks_used + load.kv_blocks_free == load.kv_blocks_total

    async def wait_cached(self, expected: Sequence[int]) -> None:
        """Waits until the replayed events contain these blocks."""
        async with asyncio.timeout(self.timeout_s):
            while not self.cached.issuperset(expected):
                await asyncio.sleep(0.005)


def greedy(model: str, token_ids: Sequence[int], max_tokens: int = 12, **sampling: object) -> Generation:
    """Returns a greedy generation that ignores end-of-sequence tokens."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return Generation(model=model, token_ids=token_ids, sampling=SamplingParams(**params))  # type: ignore[arg-type]
