"""Measures one worker, and the handoff from a prefill worker to it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Protocol

from kvmesh.client import AsyncClient, Options
from kvmesh.core import Generation, KvHandle, KvReader, Leg, LegFinish, LegTask, Role, SamplingParams, WorkerDescription
from kvmesh.core.engine_profile import DecodePoint, HandoffPoint, PrefillPoint
from kvmesh.errors import LostError, UnavailableError
from kvmesh.rpc.plain_legs import PlainLegClient

FIRST_ID = 100
"""Smaller token ids are often special ones."""
HANDOFF_TOKENS = 2
STEPS_MIN = 4


def step_time(arrivals: Sequence[Sequence[tuple[float, int]]]) -> float | None:
    """Returns the mean time per token while all streams run, each given as (arrival, tokens). None: they never ran together.

    A median of gaps would be wrong: when this process is late, it reads several messages together, and most gaps are then far shorter
    than a step.
    """
    began_s = max(times_s[0][0] for times_s in arrivals)
    ended_s = min(times_s[-1][0] for times_s in arrivals)
    found = []
    for times_s in arrivals:
        shared = [(at_s, count) for at_s, count in times_s if began_s <= at_s <= ended_s]
        if len(shared) >= STEPS_MIN:
            found.append((shared[-1][0] - shared[0][0]) / sum(count for _, count in shared[1:]))
    return median(found) if found else None


class Legs(Protocol):
    """Runs legs: see PlainLegClient."""

    def run(self, address: str, role: Role, leg: Leg, *, timeout_s: float) -> AsyncGenerator[int | LegFinish, None]: ...


@dataclass(kw_only=True)
class EngineMeter:
    """Sends prompts of random tokens, which no cache knows, and takes times at this end of the call.

    `client` runs all legs but those of handoffs, which `workers` runs.
    """

    client: Legs
    workers: PlainLegClient
    decode_address: str
    decode: WorkerDescription
    prefill_address: str = ""
    timeout_s: float = 120.0
    random: Random = field(default_factory=Random)
    _legs: int = 0

    async def prefill_point(self, uncached_tokens: int, batch: int, *, cached_tokens: int = 0) -> PrefillPoint:
        """Sends `batch` prompts at the same time. With `cached_tokens`, each continues a prompt that the worker has already computed."""
        heads = [self._tokens(cached_tokens) for _ in range(batch)]
        if cached_tokens:
            await asyncio.gather(*(self._generate(head, 1) for head in heads))
        prompts = [[*head, *self._tokens(uncached_tokens)] for head in heads]
        began_s = time.perf_counter()
        finishes = await asyncio.gather(*(self._generate(prompt, 1) for prompt in prompts))
        time_s = time.perf_counter() - began_s
        found = [finish.usage.cached_tokens or 0 for _, finish in finishes]
        return PrefillPoint(
            prompt_tokens=cached_tokens + uncached_tokens,
            uncached_tokens=cached_tokens + uncached_tokens - round(sum(found) / batch),
            batch=batch,
            time_s=time_s,
        )

    async def decode_point(self, batch: int, context_tokens: int, tokens: int) -> DecodePoint:
        """Returns the mean step while all requests of the batch decode."""
        prompts = [self._tokens(context_tokens) for _ in range(batch)]
        arrivals = [times_s for times_s, _ in await asyncio.gather(*(self._generate(each, tokens) for each in prompts))]
        step_s = step_time(arrivals)
        if step_s is None:
            raise UnavailableError(
                f"{batch} requests of {tokens} tokens never decoded at the same time; use more decode tokens",
                reason="no_steps",
            )
        return DecodePoint(batch=batch, context_tokens=context_tokens + tokens // 2, step_s=step_s)

    async def handoff_point(self, prompt_tokens: int) -> HandoffPoint:
        """From the submission of the decode leg until its first token, KV transfer included."""
        prompt, leg_id = self._tokens(prompt_tokens), self._leg_id()
        reader = KvReader(worker_id=self.decode.worker.worker_id, leg_id=leg_id)
        leg = Leg(
            leg_id=self._leg_id(),
            task=LegTask.PREFILL,
            generation=self._generation(prompt, HANDOFF_TOKENS),
            reader=reader,
        )
        handle = await self.workers.prefill(self.prefill_address, leg, timeout_s=self.timeout_s)
        began_s = time.perf_counter()
        times_s, _ = await self._generate(prompt, HANDOFF_TOKENS, handle=handle, leg_id=leg_id, client=self.workers)
        return HandoffPoint(prompt_tokens=prompt_tokens, time_s=times_s[0][0] - began_s)

    async def _generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        handle: KvHandle | None = None,
        leg_id: str = "",
        client: Legs | None = None,
    ) -> tuple[list[tuple[float, int]], LegFinish]:
        """Returns the arrivals as (time, tokens), and the finish."""
        generation = self._generation(prompt, tokens)
        leg = Leg(leg_id=leg_id or self._leg_id(), task=LegTask.GENERATE, generation=generation, handle=handle)
        arrivals: list[tuple[float, int]] = []
        run = (client or self.client).run(self.decode_address, Role.DECODE, leg, timeout_s=self.timeout_s)
        async with aclosing(run) as outputs:
            async for output in outputs:
                if isinstance(output, LegFinish):
                    return arrivals, output
                arrivals.append((time.perf_counter(), output))
        raise AssertionError("the client yields a finish or raises")

    def _generation(self, prompt: Sequence[int], tokens: int) -> Generation:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return Generation(model=self.decode.model.name, token_ids=prompt, sampling=sampling)

    def _tokens(self, count: int) -> list[int]:
        highest = self.decode.model.vocabulary_size - 1
        return [self.random.randint(min(FIRST_ID, highest), highest) for _ in range(count)]

    def _leg_id(self) -> str:
        self._legs += 1
        return f"profile-{self.random.getrandbits(48):x}-{self._legs}"


class FrontendLegs:
    """Has the method of PlainLegClient that measures need. The mesh chooses the worker, so that it should have one only."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(
        self, address: str, role: Role, leg: Leg, *, timeout_s: float
    ) -> AsyncGenerator[int | LegFinish, None]:
        """Like PlainLegClient.run, for a leg without a handle.

        `address` and `role` are the worker's; this client does not call the worker itself.
        """
        generation = leg.generation
        options = Options(sampling=generation.sampling, returns_token_ids=True)
        stream = self._client.generate_stream(
            generation.model, generation.token_ids, options=options, timeout_s=timeout_s
        )
        async with stream:
            finish: LegFinish | None = None
            async for piece in stream:
                if piece.token_ids:
                    yield len(piece.token_ids)
                if piece.finish_reason is not None and finish is None:
                    finish = LegFinish(reason=piece.finish_reason)
                if piece.usage is not None and finish is not None:
                    finish = LegFinish(reason=finish.reason, usage=piece.usage)
        if finish is None:
            raise LostError("the frontend ended the call without a finish", reason="no_finish", where=address)
        yield finish
